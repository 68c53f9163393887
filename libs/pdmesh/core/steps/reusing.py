"""Cost comparison for a waiting request with cached KV: it goes to the cheapest instance, and may wait for it a while.

The candidates are the holders of the request's prefix and the first offers of the placement. If the cheapest candidate
has no room for a plan now, the request is skipped and others may overtake it. It waits while waiting is predicted to
cost less than beginning elsewhere, and no longer than the predicted saving when it began to wait.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from math import inf
from operator import attrgetter
from typing import NamedTuple

from pdmesh.core.copies.prefix_fetches import Fetches
from pdmesh.core.instances.instance import InstanceState
from pdmesh.core.instances.reusable import reusable
from pdmesh.core.mesh_state import MeshState
from pdmesh.core.requests.request import RequestState
from pdmesh.core.steps.placing import MAX_ASKED
from pdmesh.kv_layout import GRANULE_TOKENS
from pdmesh.model import InstanceId, PrefixHash
from pdmesh.policy.bundle import Bundle
from pdmesh.policy.reuse import ReuseCost
from pdmesh.policy.views import InstanceView


class PrefillCandidate(NamedTuple):
    """A way to compute a prompt on ``instance``, where the first ``num_tokens`` need not be computed.

    ``ready_s``: predicted time until the prompt can begin there. ``cost_s``: predicted cost, to compare candidates.
    ``source`` would send the missing KV, which takes ``bring_s``; None if no KV has to be sent.
    """

    instance: InstanceState
    num_tokens: int
    ready_s: float
    cost_s: float
    source: InstanceState | None = None
    bring_s: float = 0.0


_COST_S = attrgetter("cost_s")


class Reusing:
    """Candidates for the heads with cached KV in one round of packing."""

    def __init__(self, mesh: MeshState, fetches: Fetches, now_s: float) -> None:
        self._mesh = mesh
        self._fetches = fetches
        self._now_s = now_s
        #: Granules of the head that each instance would load, by the instance's number.
        self._loads: Mapping[int, int] = {}
        #: Work of the requests that wait for each instance.
        self._awaited_s: dict[InstanceId, float] = {}

    def look_at(self, head: RequestState, reuse: ReuseCost | None) -> Mapping[int, int]:
        """Return how many granules of the head each instance, by number, has cached or, given ``reuse``, can load."""
        depths, self._loads = reusable(
            head.request, self._mesh.reusable_depths(head.request), self._mesh.cache_index, self._mesh.by_number, reuse
        )
        return depths

    def num_loaded(self, instance: InstanceState) -> int:
        """Return how many granules of the head, last given to `look_at`, the instance would load from its tier."""
        return self._loads.get(instance.number, 0)

    def holders(self, depths: Mapping[int, int]) -> list[InstanceState]:
        """Return the `MAX_ASKED` instances with the most reusable granules, the most first."""
        deepest = sorted(depths, key=lambda number: (-depths[number], number))
        return [self._mesh.by_number[number] for number in islice(deepest, MAX_ASKED)]

    def cheapest(
        self,
        head: RequestState,
        depths: Mapping[int, int],
        computing: Iterable[RequestState],
        bundle: Bundle,
        offers: Iterable[InstanceState],
        may_begin: Callable[[InstanceState, RequestState], bool],
    ) -> Iterator[InstanceState] | PrefillCandidate:
        """Return the ``offers`` and the holders that ``may_begin`` the head, the cheapest first; or one to wait for.

        Only the first `MAX_ASKED` offers are compared; the others follow in their order. The candidates to wait for
        include instances where requests are ``computing`` shared tokens, and instances that could be sent some.
        """
        reuse = bundle.reuse
        assert reuse is not None
        takes, line = bundle.prefill_placement.takes, iter(offers)
        first = {instance.instance_id: instance for instance in islice(line, MAX_ASKED)}
        asked = {
            instance_id: instance
            for instance_id, instance in first.items()
            if takes(head.request, instance.view, _num_tokens(depths, instance))
        }
        busy: list[InstanceState] = []
        holders = self.holders(depths)
        for holder in holders:
            if holder.instance_id in asked:
                continue
            if may_begin(holder, head) and takes(head.request, holder.view, _num_tokens(depths, holder)):
                asked[holder.instance_id] = holder
            elif holder.takes_prompts and holder.could_prefill(head.request):
                busy.append(holder)
        if not asked:
            return _one_by_one(first.values(), line)
        now = [self._own(head, depths, instance, reuse) for instance in asked.values()]
        now.sort(key=_COST_S)
        later = [self._own(head, depths, holder, reuse) for holder in busy]
        later += self._coming(head, computing, reuse)
        fetched = self._fetched(head, depths, holders, (*now, *later), reuse)
        awaited = min((*later, *fetched), default=None, key=_COST_S)
        if awaited is not None and self._had_better_wait(head, awaited, now[0].cost_s):
            return awaited
        others = (each for each in _one_by_one(first.values(), line) if each.instance_id not in asked)
        return _one_by_one([candidate.instance for candidate in now], others)

    def wait_for(self, head: RequestState, awaited: PrefillCandidate, reuse: ReuseCost) -> None:
        """Count the head as work of the awaited instance, and begin the fetch that the candidate needs, if any."""
        instance_id = awaited.instance.instance_id
        work_s = reuse.work_s(head.request, awaited.num_tokens)
        self._awaited_s[instance_id] = self._awaited_s.get(instance_id, 0.0) + work_s
        if awaited.source is not None:
            assert head.awaits_until_s is not None, f"{head.key} waits for ever"
            self._fetches.begin(
                head.request.chain[: awaited.num_tokens // GRANULE_TOKENS],
                awaited.source,
                awaited.instance,
                tenant=head.request.tenant,
                share=head.request.share,
                arrives_s=self._now_s + awaited.bring_s,
                until_s=head.awaits_until_s,
                wanted_by=head.key,
            )

    def _own(
        self, head: RequestState, depths: Mapping[int, int], instance: InstanceState, reuse: ReuseCost
    ) -> PrefillCandidate:
        """Return the candidate with the KV that the instance has in its cache, or would load from its tier."""
        num_tokens, load_s = _num_tokens(depths, instance), instance.load_s(self.num_loaded(instance))
        candidate = self._candidate(head, instance, num_tokens, reuse)
        return candidate._replace(ready_s=candidate.ready_s + load_s, cost_s=candidate.cost_s + load_s)

    def _num_cached_tokens(self, depths: Mapping[int, int], instance: InstanceState) -> int:
        """Return how many tokens of the head an instance has in its cache."""
        return _num_tokens(depths, instance) - self.num_loaded(instance) * GRANULE_TOKENS

    def _candidate(
        self, head: RequestState, instance: InstanceState, num_tokens: int, reuse: ReuseCost, there_in_s: float = 0.0
    ) -> PrefillCandidate:
        """Return the candidate on an instance that has the head's first ``num_tokens``, or will in ``there_in_s``."""
        ready_s = max(self.ready_s(instance, reuse), there_in_s)
        return PrefillCandidate(instance, num_tokens, ready_s, reuse.cost_s(head.request, num_tokens, ready_s))

    def _coming(
        self, head: RequestState, computing: Iterable[RequestState], reuse: ReuseCost
    ) -> Iterator[PrefillCandidate]:
        """Yield candidates on instances that compute tokens of the head's prompt for others, or are being sent some."""
        chain = head.request.chain
        for state in islice(computing, MAX_ASKED):
            instance = self._mesh.instances[state.prefill_ids[0]]
            if instance.takes_prompts and instance.could_prefill(head.request):
                num_common = _num_common(chain, state.request.chain)
                num_tokens = instance.num_coming_granules(state.key, num_common) * GRANULE_TOKENS
                yield self._candidate(head, instance, num_tokens, reuse)
        for fetch in islice(self._fetches.coming(head), MAX_ASKED):
            destination = self._mesh.instances.get(fetch.copy.target_id)
            if destination is not None and destination.could_prefill(head.request):
                num_tokens = _num_common(chain, fetch.copy.chain) * GRANULE_TOKENS
                yield self._candidate(head, destination, num_tokens, reuse, fetch.arrives_s - self._now_s)

    def _fetched(
        self,
        head: RequestState,
        depths: Mapping[int, int],
        holders: Iterable[InstanceState],
        known: Sequence[PrefillCandidate],
        reuse: ReuseCost,
    ) -> Iterator[PrefillCandidate]:
        """Yield improved ``known`` candidates, to which a holder could send more tokens than they have.

        A holder is skipped if even an immediate copy of all its tokens could not beat the cheapest known candidate. So
        most heads compare no pair of instances.
        """
        request, least_s = head.request, min([candidate.cost_s for candidate in known])
        for source in holders:
            num_tokens = self._num_cached_tokens(depths, source)
            if reuse.cost_s(request, num_tokens, 0.0) >= least_s or not self._fetches.may_send(source):
                continue
            cut = self._mesh.cut.of(source.instance_id)
            for candidate in known:
                instance = candidate.instance
                num_there = instance.num_cached_granules(request) * GRANULE_TOKENS
                if (
                    max(num_there, candidate.num_tokens) < num_tokens
                    and instance.arithmetic_class == source.arithmetic_class
                    and instance.instance_id not in cut
                    and self._fetches.may_receive(instance)
                    and instance.can_prefill(request)
                ):
                    num_bytes = (num_tokens - num_there) * instance.profile.kv_layout.token_bytes
                    bring_s = reuse.fetch_s(source.view, instance.view, num_bytes)
                    ready_s = max(candidate.ready_s, bring_s)
                    cost_s = reuse.cost_s(request, num_tokens, candidate.ready_s, bring_s)
                    yield PrefillCandidate(instance, num_tokens, ready_s, cost_s, source, bring_s)

    def cheapest_local(
        self,
        head: RequestState,
        depths: Mapping[int, int],
        spare: Iterable[InstanceState],
        least_queued: Callable[[str], InstanceState | None],
        bundle: Bundle,
        reuse: ReuseCost,
        beside: Callable[[InstanceState], InstanceView],
    ) -> InstanceState | None:
        """Return the cheapest of ``spare``, which only decode, if it is cheaper than each prefill instance; else None.

        Only short prompts that the placement allows there. Beside decodes a prompt takes longer, but need not move, and
        most of it may be cached there. ``beside`` returns an instance's load beside a new chunk.
        """
        request, local = head.request, bundle.local_prefill
        assert local is not None
        elsewhere: dict[str, float] = {}
        best: tuple[float, InstanceState] | None = None
        for instance in spare:
            num_reused = _num_tokens(depths, instance)
            if bundle.is_long(request, num_reused) or not bundle.prefill_placement.takes(
                request, instance.view, num_reused
            ):
                continue
            kv_group = instance.kv_group
            if kv_group not in elsewhere:
                elsewhere[kv_group] = self._least_s(head, depths, kv_group, least_queued(kv_group), reuse)
            work_s = local.packing.local_s(beside(instance), request.num_prompt_tokens - num_reused, num_reused)
            work_s += instance.load_s(self.num_loaded(instance))
            cost_s = work_s + reuse.price * reuse.work_s(request, num_reused)
            if cost_s < elsewhere[kv_group] and (best is None or cost_s < best[0]):
                best = cost_s, instance
        return None if best is None else best[1]

    def _least_s(
        self,
        head: RequestState,
        depths: Mapping[int, int],
        kv_group: str,
        least_queued: InstanceState | None,
        reuse: ReuseCost,
    ) -> float:
        """Return the least seconds that the holders and the least queued instance of a KV group need; else infinite."""
        some = [each for each in self.holders(depths) if each.takes_prompts and each.kv_group == kv_group]
        if least_queued is not None:
            some.append(least_queued)
        costs = [self._own(head, depths, each, reuse).cost_s for each in some]
        return min(costs, default=inf)

    def _had_better_wait(self, head: RequestState, awaited: PrefillCandidate, least_s: float) -> bool:
        """Whether the head should wait: waiting costs less than ``least_s``, and its deadline has not passed.

        The first call that finds waiting cheaper sets that deadline.
        """
        if awaited.cost_s >= least_s:
            return False
        if head.awaits_until_s is None:
            head.await_until(self._now_s + least_s - awaited.cost_s + awaited.ready_s)
        return head.awaits_until_s is not None and self._now_s < head.awaits_until_s

    def ready_s(self, instance: InstanceState, reuse: ReuseCost) -> float:
        """Return the predicted time until an instance has computed all prompts that are placed there or wait for it."""
        remaining_s = reuse.remaining.remaining_s
        in_flight_s = 0.0
        for plan in instance.plans.values():
            for chunk in plan.chunks:
                in_flight_s += remaining_s(chunk.start + chunk.num_tokens, chunk.start)
        in_flight_s = max(0.0, in_flight_s - (self._now_s - instance.turned_s))
        placed_s = sum([remaining_s(s.request.num_prompt_tokens, s.num_planned_tokens) for s in instance.prefills])
        return in_flight_s + placed_s + self._awaited_s.get(instance.instance_id, 0.0)


def _num_tokens(depths: Mapping[int, int], instance: InstanceState) -> int:
    """Return how many reusable tokens an instance has."""
    return depths.get(instance.number, 0) * GRANULE_TOKENS


def _num_common(chain: Sequence[PrefixHash], other: Sequence[PrefixHash]) -> int:
    """Return how many granules two chains have in common, by bisection: equal hashes mean equal beginnings."""
    low, high = 0, min(len(chain), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if chain[middle - 1] == other[middle - 1]:
            low = middle
        else:
            high = middle - 1
    return low


def _one_by_one(first: Iterable[InstanceState], then: Iterable[InstanceState]) -> Iterator[InstanceState]:
    yield from first
    yield from then
