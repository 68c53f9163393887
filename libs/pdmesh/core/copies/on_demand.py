"""Requests that decode are granted KV as they grow; where there is none left, some move away or are retracted.

An instance reports which of its requests have room for few more tokens, long before they have none. These get more
blocks at once, the oldest first; a grant that finds no blocks waits for the next release. A request that cannot
continue at all takes precedence over younger ones. Of the younger ones, the core retracts the requests that
cost the least work to bring back for each block that they free. So the oldest request on an instance always continues,
and no two retract each other in turns. If another instance has room, a request that takes longer to compute again than
to move is moved instead. Moves begin with the first grant that finds no blocks (`pdmesh.core.copies.rebalancing`).
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

#: Older is less.
_Age = tuple[float, RequestId]


class _Victim(NamedTuple):
    cost_s: float  # for each block
    youth: float  # of equal ones the youngest
    request_id: RequestId
    state: RequestState
    num_blocks: int


class OnDemandKv:
    def __init__(self, mesh: MeshState, rebalancer: Rebalancer) -> None:
        self._mesh = mesh
        self._rebalancer = rebalancer
        self._short: dict[InstanceId, None] = {}  # where somebody has asked

    def joined(self, instance: InstanceState) -> None:
        """Take over what a joining instance says its residents have; grants on their way to it are lost."""
        for key, allocation in instance.allocations.items():
            self._note(instance, key, allocation)

    def is_low(self, instance: InstanceState, residents: Iterable[ResidentContext]) -> None:
        """Some of its residents have room for few tokens more."""
        has_news = False
        for resident in residents:
            key = (resident.request_id, resident.epoch)
            allocation = instance.allocations.get(key)
            if allocation is None or resident.num_tokens < allocation.num_tokens:
                self._mesh.ignore("CreditLow")
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
        """A resident has less room, for the rest of its context."""
        self._note(instance, key, instance.allocations[key])

    def _note(self, instance: InstanceState, key: RequestKey, allocation: Allocation) -> None:
        if self._wants(instance, allocation):
            instance.low[key] = None
            self._short[instance.instance_id] = None

    def ended(self, state: RequestState, instance_id: InstanceId, num_output_tokens: int) -> None:
        """A request drew its last token."""
        instance = self._mesh.instances.get(instance_id)
        allocation = None if instance is None else instance.allocations.get(state.key)
        request = state.request
        num_tokens = 0
        if request.epoch == 0:  # else what it drew before counts, too, and was counted
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
        """Give those that asked what there is, and make room for those that cannot go on without."""
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
        """Grant blocks, and return residents that cannot go on and got nothing; the oldest first."""
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
        """A resident that nobody has claimed yet is the youngest."""
        state = self._mesh.find(key)
        return (float("inf"), key[0]) if state is None else _age_of(state)

    # --- retracting ---

    def _make_room(self, instance: InstanceState, stuck: Iterable[RequestKey], latency: LatencyModel) -> None:
        """A block for each of ``stuck``, the oldest first, from what is being freed or from somebody younger."""
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
        """Return the younger resident that is cheapest to retract for each block."""
        found: list[_Victim] = []
        for key, allocation in instance.allocations.items():
            state = self._mesh.find(key)
            if state is None or allocation.freeing or allocation.kind not in READ_BY_STEPS or state.move:
                continue
            home, resident = instance, allocation
            if allocation.kind is AllocationKind.PART:  # of one that decodes elsewhere, or will
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
        """Predicted work left of it: its context computed again where most of it is kept, and what it will still draw.

        What only this instance keeps goes to who needs its room.
        """
        num_tokens = allocation.num_tokens or allocation.num_blocks * instance.block_size
        num_tokens = max(num_tokens, allocation.num_elsewhere_tokens)
        num_left = max(1.0, min(self._mesh.growth.mean_tokens, state.request.max_total_tokens - num_tokens + 1))
        num_kept = self._mesh.num_kept_elsewhere(state.request, instance)
        again_s = latency.step_s(StepShape((ChunkShape(num_tokens - num_kept, num_kept),), 0, 0))
        return again_s + num_left * latency.step_s(StepShape((), 1, num_tokens))

    def _can_resume(self, instance: InstanceState, state: RequestState, allocation: Allocation) -> bool:
        """Whether there is an instance that computes all that it holds as a prompt."""
        num_held = allocation.num_blocks * instance.block_size + allocation.num_elsewhere_tokens
        return can_resume(self._mesh, state, num_held)


def _age_of(state: RequestState) -> _Age:
    return state.request.arrival_s, state.request.request_id


def _younger_than(age: _Age) -> Callable[[RequestState], bool]:
    return lambda state: _age_of(state) > age
