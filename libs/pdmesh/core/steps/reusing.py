"""Where the head of the line goes if some of its KV is kept: to the cheapest instance, for which it may wait a while.

Instances that keep its prefix are asked beside the first of the sorted line. Where the cheapest has no room for a plan
now, the request steps aside for it and lets others pass: while that is predicted to cost less than beginning elsewhere,
and no longer than that difference was when it began to wait.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice

from pdmesh.core.instances.instance import InstanceState
from pdmesh.core.mesh_state import MeshState
from pdmesh.core.requests import RequestState
from pdmesh.core.steps.placing import MAX_ASKED
from pdmesh.model import GRANULE_TOKENS, InstanceId
from pdmesh.policy.reuse import ReuseCost


class Reusing:
    """For one round of packing."""

    def __init__(self, mesh: MeshState, now_s: float) -> None:
        self._mesh = mesh
        self._now_s = now_s
        self._awaited_s: dict[InstanceId, float] = {}  # work of those who wait for each

    def holders(self, depths: Mapping[int, int]) -> list[InstanceState]:
        """Return the instances that keep most, some of them."""
        deepest = sorted(depths, key=lambda number: (-depths[number], number))
        return [self._mesh.by_number[number] for number in islice(deepest, MAX_ASKED)]

    def cheapest(
        self,
        head: RequestState,
        depths: Mapping[int, int],
        reuse: ReuseCost,
        offers: Iterable[InstanceState],
        may_begin: Callable[[InstanceState, RequestState], bool],
    ) -> Iterator[InstanceState] | None:
        """Return the ``offers`` and the holders that ``may_begin`` it, the cheapest first; None if it had better wait.

        Of the offers the first few alone are compared; the others come behind them.
        """
        line = iter(offers)
        asked = {instance.instance_id: instance for instance in islice(line, MAX_ASKED)}
        busy: list[InstanceState] = []
        for holder in self.holders(depths):
            if holder.instance_id in asked:
                continue
            if may_begin(holder, head):
                asked[holder.instance_id] = holder
            elif holder.takes_prompts and holder.could_prefill(head.request):
                busy.append(holder)
        if not asked:
            return iter(())
        costs = {instance_id: self._cost_s(head, instance, depths, reuse) for instance_id, instance in asked.items()}
        least_s = min(costs.values())
        for holder in busy:
            cost_s = self._cost_s(head, holder, depths, reuse)
            if cost_s < least_s and self._may_wait(head, least_s - cost_s + self.ready_s(holder, reuse)):
                awaited_s = reuse.work_s(head.request, _num_tokens(depths, holder))
                self._awaited_s[holder.instance_id] = self._awaited_s.get(holder.instance_id, 0.0) + awaited_s
                return None
        ranked = sorted(asked.values(), key=lambda instance: costs[instance.instance_id])
        return _one_by_one(ranked, (instance for instance in line if instance.instance_id not in asked))

    def _may_wait(self, head: RequestState, for_s: float) -> bool:
        if head.awaits_until_s is None:
            head.await_until(self._now_s + for_s)
        return head.awaits_until_s is not None and self._now_s < head.awaits_until_s

    def _cost_s(
        self, head: RequestState, instance: InstanceState, depths: Mapping[int, int], reuse: ReuseCost
    ) -> float:
        return reuse.cost_s(head.request, _num_tokens(depths, instance), self.ready_s(instance, reuse))

    def ready_s(self, instance: InstanceState, reuse: ReuseCost) -> float:
        """Return the predicted time until an instance has computed all that is placed there, or waits for it."""
        remaining_s = reuse.remaining.remaining_s
        in_flight_s = 0.0
        for plan in instance.plans.values():
            for chunk in plan.chunks:
                in_flight_s += remaining_s(chunk.start + chunk.num_tokens, chunk.start)
        in_flight_s = max(0.0, in_flight_s - (self._now_s - instance.turned_s))
        placed_s = sum([remaining_s(s.request.num_prompt_tokens, s.num_planned_tokens) for s in instance.prefills])
        return in_flight_s + placed_s + self._awaited_s.get(instance.instance_id, 0.0)


def _num_tokens(depths: Mapping[int, int], instance: InstanceState) -> int:
    """Return the tokens that an instance keeps."""
    return depths.get(instance.number, 0) * GRANULE_TOKENS


def _one_by_one(first: Iterable[InstanceState], then: Iterable[InstanceState]) -> Iterator[InstanceState]:
    yield from first
    yield from then
