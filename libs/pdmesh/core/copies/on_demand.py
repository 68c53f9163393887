"""Room for growing decodes on demand; where there is none left, some move away or are retracted.

An instance reports requests that have room for few more tokens, long before they have none. These get more blocks at
once, the oldest first; a grant that finds no blocks waits for the next release. A request that cannot continue at all
takes precedence over younger ones. Of the younger ones, the core retracts the requests that cost the least work to
bring back for each block that they free. So the oldest request on an instance always continues, and no two retract each
other in turns. If another instance has room, a request that takes longer to compute again than to move is moved
instead. Moves begin with the first grant that finds no blocks (`pdmesh.core.copies.rebalancing`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from pdmesh.core.copies.context_ranges import can_resume
from pdmesh.core.copies.rebalancing import Rebalancer
from pdmesh.core.instances.allocations import READ_BY_STEPS, Allocation, AllocationKind
from pdmesh.core.instances.instance import InstanceState
from pdmesh.core.mesh_state import MeshState
from pdmesh.core.requests.phases import Phase
from pdmesh.core.requests.request import RequestState
from pdmesh.model import InstanceId, RequestId, RequestKey
from pdmesh.plans import ResidentContext
from pdmesh.policy.bundle import Bundle
from pdmesh.policy.latency import ChunkShape, LatencyModel, StepShape
from pdmesh.policy.on_demand import granted_blocks, is_low

#: Arrival and id; an older request compares as less.
_Age = tuple[float, RequestId]


class _Victim(NamedTuple):
    """Candidate for retraction, ordered by predicted cost per freed block, then by youth."""

    cost_s: float
    youth: float
    request_id: RequestId
    state: RequestState
    num_blocks: int


class OnDemandKv:
    """Grants of blocks to decoding requests, and retractions to make room for them."""

    def __init__(self, mesh: MeshState, rebalancer: Rebalancer) -> None:
        self._mesh = mesh
        self._rebalancer = rebalancer
        # Instances with requests that are low on room.
        self._short: dict[InstanceId, None] = {}

    def joined(self, instance: InstanceState) -> None:
        """Note which residents of a joining instance are low on room; earlier grants to it are lost."""
        for key, allocation in instance.allocations.items():
            self._note(instance, key, allocation)

    def is_low(self, instance: InstanceState, residents: Iterable[ResidentContext]) -> None:
        """Learn the growth of the reported residents, and note which of them are low on room.

        An unknown resident, or an outdated report, is counted as ignored.
        """
        has_news = False
        for resident in residents:
            key = (resident.request_id, resident.epoch)
            allocation = instance.allocations.get(key)
            if allocation is None or resident.num_tokens < allocation.num_tokens:
                self._mesh.ignore("KvLow")
                continue
            state = self._mesh.find(key)
            before = allocation.num_tokens or (
                resident.num_tokens if state is None else state.request.num_prompt_tokens
            )
            has_news |= self._mesh.growth.drew(max(0, resident.num_tokens - before))
            allocation.num_tokens = resident.num_tokens
            self._note(instance, key, allocation)
        if has_news:
            self._tell_growth()

    def handed_on(self, instance: InstanceState, key: RequestKey) -> None:
        """Note a resident that handed a range on, if it is low on room."""
        self._note(instance, key, instance.allocations[key])

    def _note(self, instance: InstanceState, key: RequestKey, allocation: Allocation) -> None:
        if self._wants(instance, allocation):
            instance.low[key] = None
            self._short[instance.instance_id] = None

    def ended(self, state: RequestState, instance_id: InstanceId, num_output_tokens: int) -> None:
        """Learn how many tokens a request drew that ended."""
        instance = self._mesh.instances.get(instance_id)
        allocation = None if instance is None else instance.allocations.get(state.key)
        request = state.request
        num_tokens = 0
        # In later epochs, the tokens of earlier ones were counted already.
        if request.epoch == 0:
            drawn_before = 0 if allocation is None else max(0, allocation.num_tokens - request.num_prompt_tokens)
            num_tokens = max(0, min(num_output_tokens, request.max_tokens) - drawn_before)
        if self._mesh.growth.ended(num_tokens):
            self._tell_growth()

    def _tell_growth(self) -> None:
        if self._mesh.growth.on_demand:
            for instance in self._mesh.instances.values():
                instance.hear_of_growth()

    @staticmethod
    def _wants(instance: InstanceState, allocation: Allocation) -> bool:
        return (
            allocation.num_tokens > 0
            and allocation.num_blocks < allocation.max_blocks
            and not allocation.freeing
            and is_low(allocation.num_own_tokens, allocation.num_blocks, instance.block_size)
        )

    # --- granting ---

    def serve(self, bundle: Bundle, latency: LatencyModel, now_s: float, *, moves: bool) -> None:
        """Grant free blocks to requests that are low, and make room for requests that cannot continue without.

        With ``moves``, first younger requests move away where the bundle rebalances.
        """
        for instance_id in list(self._short):
            instance = self._mesh.instances.get(instance_id)
            if instance is None or not instance.low:
                del self._short[instance_id]
                continue
            stuck = self._grant_all(instance)
            if instance.low and moves and bundle.rebalancing is not None:
                self._rebalancer.relieve(
                    instance,
                    len(instance.low),
                    _younger_than(min(map(self._age, instance.low))),
                    bundle.rebalancing,
                    bundle.decode_placement,
                    now_s,
                )
            if stuck:
                self._make_room(instance, stuck, latency)

    def _grant_all(self, instance: InstanceState) -> list[RequestKey]:
        """Grant free blocks, the oldest request first; return the stuck residents that got none."""
        line = sorted(instance.low, key=self._age)
        instance.low.clear()
        size = instance.block_size
        wanted = {
            key: granted_blocks(allocation.num_own_tokens, allocation.max_blocks, size)
            for key in line
            if self._wants(instance, allocation := instance.allocations[key])
        }
        is_short = (
            sum(wanted.values()) - sum(instance.allocations[key].num_blocks for key in wanted)
            > instance.num_free_blocks
        )
        stuck: list[RequestKey] = []
        for key, num_blocks in wanted.items():
            allocation = instance.allocations[key]
            if instance.num_free_blocks > 0:
                self._grant(instance, key, allocation.num_blocks + 1 if is_short else num_blocks)
                continue
            instance.low[key] = None
            if allocation.num_own_tokens > allocation.num_blocks * size:
                stuck.append(key)
        return stuck

    def _grant(self, instance: InstanceState, key: RequestKey, num_blocks: int) -> None:
        instance.grow(key, num_blocks)
        self._mesh.hold(instance, key, room=instance.make_room())

    def _age(self, key: RequestKey) -> _Age:
        """Return a resident's age. A resident without a known request is the youngest."""
        state = self._mesh.find(key)
        return (float("inf"), key[0]) if state is None else _age_of(state)

    # --- retracting ---

    def _make_room(self, instance: InstanceState, stuck: Iterable[RequestKey], latency: LatencyModel) -> None:
        """Find a block for each of ``stuck``, the oldest first: one being freed, or one of a retracted request."""
        freeing = [allocation for allocation in instance.allocations.values() if allocation.freeing]
        coming = sum([instance.num_freed_blocks(allocation) for allocation in freeing])
        coming += self._rebalancer.num_leaving_blocks(instance)
        for key in stuck:
            if not coming:
                victim = self._victim(instance, self._age(key), latency)
                if victim is None:
                    return
                self._mesh.restart(victim.state, f"instance {instance.instance_id} is short of memory", retracted=True)
                coming = victim.num_blocks
            coming -= 1

    def _victim(self, instance: InstanceState, age: _Age, latency: LatencyModel) -> _Victim | None:
        """Return the younger resident that is cheapest to retract for each block; None if there is none."""
        found: list[_Victim] = []
        for key, allocation in instance.allocations.items():
            state = self._mesh.find(key)
            if state is None or allocation.freeing or allocation.kind not in READ_BY_STEPS or state.move:
                continue
            home, resident = instance, allocation
            # A range of a context that decodes elsewhere, or will.
            if allocation.kind is AllocationKind.PART:
                if state.phase is not Phase.DECODING or state.decode_id is None:
                    continue
                home = self._mesh.instances[state.decode_id]
                resident = home.allocations[key]
            num_freed = instance.num_freed_blocks(allocation)
            if num_freed and _age_of(state) > age and self._can_resume(home, state, resident):
                cost_s = self._cost_s(home, state, resident, latency) / num_freed
                found.append(_Victim(cost_s, -state.request.arrival_s, key[0], state, num_freed))
        return min(found, default=None, key=lambda victim: victim[:3])

    def _cost_s(
        self, instance: InstanceState, state: RequestState, allocation: Allocation, latency: LatencyModel
    ) -> float:
        """Predict the remaining work after a retraction: its context computed again, and its further tokens.

        The context is computed where most of it is cached, not counting this instance, where it would be evicted.
        """
        num_tokens = allocation.num_tokens or allocation.num_blocks * instance.block_size
        num_tokens = max(num_tokens, allocation.num_remote_tokens)
        num_left = max(1.0, min(self._mesh.growth.mean_tokens, state.request.max_total_tokens - num_tokens + 1))
        num_cached = self._mesh.num_cached_elsewhere(state.request, instance)
        again_s = latency.step_s(StepShape((ChunkShape(num_tokens - num_cached, num_cached),), 0, 0))
        return again_s + num_left * latency.step_s(StepShape((), 1, num_tokens))

    def _can_resume(self, instance: InstanceState, state: RequestState, allocation: Allocation) -> bool:
        """Whether the mesh, if empty, could compute a request's held tokens as a prompt, and decode on.

        The held tokens are the room of ``allocation``, which is on ``instance``, and the tokens on other instances.
        """
        num_held = allocation.num_blocks * instance.block_size + allocation.num_remote_tokens
        return can_resume(self._mesh, state, num_held)


def _age_of(state: RequestState) -> _Age:
    return state.request.arrival_s, state.request.request_id


def _younger_than(age: _Age) -> Callable[[RequestState], bool]:
    return lambda state: _age_of(state) > age
