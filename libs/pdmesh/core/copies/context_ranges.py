"""Contexts that are spread over several instances change their holders while they decode.

The home is the instance where a context decodes. It hands a full range on to another instance, and an instance that
stops hands the ranges that it holds to instances that stay. The range is copied while the request decodes. Once it has
landed, the home gets the new list of members. When the home reports that it asks these members, the previous holder
frees the range. If the copy fails before that, nothing changes.

A range whose holder was lost takes the same way, except that only its tokens are copied. The request is paused, and an
instance with room for the range computes it again: it asks the holders of earlier ranges, as a decode would. Nothing
else is computed again, and the request continues in the same epoch. A request that finds no room in time, or whose
context loses ranges again and again, starts again from its transcript.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from math import inf

from pdmesh.core.copies.decode_moves import MAX_AT_ONCE, MAX_FAILED
from pdmesh.core.copies.receivers import do_without
from pdmesh.core.events import MembersSet, PartLost
from pdmesh.core.instances.allocations import Allocation, AllocationKind
from pdmesh.core.instances.feasibility import could_place
from pdmesh.core.instances.instance import InstanceState
from pdmesh.core.mesh_state import MeshState
from pdmesh.core.requests.copy import Copy
from pdmesh.core.requests.phases import Phase
from pdmesh.core.requests.request import RequestState
from pdmesh.model import InstanceId, RequestKey, Then, TransferId
from pdmesh.plans import ResidentContext
from pdmesh.policy.seams import DecodePlacement

#: Longest pause of a request for an instance with room for its lost range. A holder that died has mostly been started
#: again by then. A request that starts again elsewhere would need as many instances.
FIND_ROOM_S = 30.0


class Parts:
    """Ranges of contexts, full ones and lost ones, and their ways to their next holders."""

    def __init__(self, mesh: MeshState) -> None:
        self._mesh = mesh
        self._full: dict[RequestKey, None] = {}  # hold more than a range where they decode
        self._until_s: dict[RequestKey, float] = {}  # deadlines of lost ranges that no instance computes yet

    # --- who holds too much ---

    def grew(self, instance: InstanceState, residents: Iterable[ResidentContext]) -> None:
        """Requests that decode on an instance have become longer, as it said."""
        if instance.max_kv_tokens:
            for resident in residents:
                self._note(instance, (resident.request_id, resident.epoch))

    def _note(self, instance: InstanceState, key: RequestKey) -> None:
        allocation = instance.allocations.get(key)
        if allocation is not None and _is_full(instance, allocation):
            self._full[key] = None

    def serve(self, leaving: Sequence[InstanceId], placement: DecodePlacement, now_s: float) -> None:
        """Have computed what was lost; hand on what is full, and what instances that stop hold; after any event."""
        for key, state in list(self._mesh.parts_lost.items()):
            if self._mesh.find(key) is not state or state.lost_part is None:
                del self._mesh.parts_lost[key]
                self._until_s.pop(key, None)
            elif state.outgoing is None:
                self._serve_lost(state, state.lost_part, placement, now_s)
        for key in list(self._full):
            self._serve_full(key, placement)
        for instance_id in leaving:
            source = self._mesh.instances.get(instance_id)
            if source is not None and source.allocated.num_part_blocks and source.reachable and not source.suspected:
                self._empty(source, placement)

    def _serve_full(self, key: RequestKey, placement: DecodePlacement) -> None:
        state = self._mesh.find(key)
        home = None if state is None or state.decode_id is None else self._mesh.instances.get(state.decode_id)
        allocation = None if home is None else home.allocations.get(key)
        if state is None or home is None or allocation is None or not _is_full(home, allocation):
            del self._full[key]
        elif self._may_move(state) and not self._begin(state, home, len(state.members), placement):
            self._give_up(state, home, allocation)

    def _give_up(self, state: RequestState, home: InstanceState, allocation: Allocation) -> None:
        """Let a request start again that cannot go on: it has all of its instance, and nobody takes its full range.

        Then it waits for as many instances with room as it needs.
        """
        most_blocks = min(allocation.max_blocks, home.num_blocks - home.num_quarantined_blocks)
        is_stuck = allocation.num_own_tokens > allocation.num_blocks * home.block_size
        has_all = allocation.num_blocks >= most_blocks and not allocation.freeing
        if is_stuck and has_all and can_resume(self._mesh, state, allocation.num_tokens):
            reason = f"instance {home.instance_id} is full, and no other has room for a range of the context"
            self._mesh.restart(state, reason, retracted=True)

    def _empty(self, source: InstanceState, placement: DecodePlacement) -> None:
        for key, allocation in list(source.allocations.items()):
            state = self._mesh.find(key)
            if (
                allocation.kind is AllocationKind.PART
                and state is not None
                and source.instance_id in state.decode_ids[1:]
                and self._may_move(state)
            ):
                self._begin(state, source, state.decode_ids.index(source.instance_id) - 1, placement)

    # --- a range is lost ---

    @property
    def next_deadline_s(self) -> float:
        """Infinite if no lost range waits for an instance."""
        return min(self._until_s.values(), default=inf)

    def lost_range(self, event: PartLost) -> None:
        """Replace a holder of a range that gave no answer where the context decodes."""
        state = self._mesh.find((event.request_id, event.epoch))
        if state is None or state.decode_id != event.instance_id or event.number >= len(state.members):
            self._mesh.ignore("PartLost")
            return
        member_id = state.members[event.number].instance_id
        if state.needs(member_id):
            do_without(self._mesh, state, member_id, f"instance {member_id} does not answer, which holds KV of it")

    def _serve_lost(self, state: RequestState, number: int, placement: DecodePlacement, now_s: float) -> None:
        assert state.phase is Phase.DECODING, f"{state.key} lacks a range, and is {state.phase}"
        home = None if state.decode_id is None else self._mesh.instances.get(state.decode_id)
        until_s = self._until_s.setdefault(state.key, now_s + FIND_ROOM_S)
        may_begin = state.num_failed_moves < MAX_FAILED
        is_heard = home is not None and home.reachable and not home.suspected
        if may_begin and is_heard and home is not None and self._begin(state, home, number, placement):
            del self._until_s[state.key]
        elif now_s >= until_s or not may_begin:
            self._mesh.restart(state, f"range {number} of its KV was lost, and no instance computes it again")

    @staticmethod
    def _may_move(state: RequestState) -> bool:
        is_whole = state.outgoing is None and state.lost_part is None
        return state.phase is Phase.DECODING and is_whole and state.num_failed_moves < MAX_FAILED

    # --- a range begins to move ---

    def _begin(self, state: RequestState, source: InstanceState, number: int, placement: DecodePlacement) -> bool:
        """Hand a range on to another instance with room, or have it computed there. False if there is none."""
        mesh, home_id = self._mesh, state.decode_id
        copies = [each.range_copy for each in mesh.copying.values()]
        under_way = [copy for copy in copies if copy is not None and not copy.has_landed]
        if sum(copy.source_id == source.instance_id for copy in under_way) >= MAX_AT_ONCE:
            return True  # it waits for its turn
        num_coming = Counter([copy.target_id for copy in under_way])
        with_room = [
            each
            for each in mesh.instances.values()
            if each is not source
            and each.instance_id != home_id
            and state.key not in each.allocations
            and each.exact_group == source.exact_group
            and each.is_usable
            and each.role_decodes
            and source.part_blocks <= each.room.bounded
        ]
        able = [each for each in with_room if each.takes_new and num_coming[each.instance_id] < MAX_AT_ONCE]
        cut = mesh.cut.of(source.instance_id) | mesh.cut.of(home_id or source.instance_id)
        target = mesh.nearest(source, source.part_blocks, able, cut, placement)
        if target is not None:
            self._hand_on(state, source, target, number)
        return bool(with_room)  # without a target, the range waits for a silent instance, or for its turn there

    def _hand_on(self, state: RequestState, source: InstanceState, target: InstanceState, number: int) -> None:
        mesh, size = self._mesh, source.part_blocks
        is_lost = number == state.lost_part
        copy = mesh.begin_copy(
            state,
            source.shard(size, number * size),
            target.shard(size, number * size),
            then=Then.HOLD,
            computes=is_lost,
        )
        target.take(state.key, Allocation(AllocationKind.PART, size, transfer_id=copy.plan.transfer_id))
        before = state.members[:number] if is_lost else ()
        for member in before:
            mesh.set_places(member.instance_id, state.key, target.instance_id)
        mesh.expect_kv(target, copy, home_id=state.decode_id, members=before)
        mesh.grant(mesh.broker.offer(copy))

    # --- what instances say of it ---

    def landed(self, state: RequestState) -> None:
        """The range is where it goes: its request asks for it there from now on."""
        assert state.decode_id is not None
        self._mesh.set_places(state.decode_id, state.key, state.next_members)

    def landed_of_prompt(self, state: RequestState, copy: Copy) -> None:
        """A range of a prompt is where it decodes: where it is computed its room is needed for the next ones."""
        num_ranges = copy.num_landed_parts
        if state.gives_back and state.phase is Phase.PREFILLING and num_ranges > state.num_ranges_away:
            self._mesh.set_places(state.prefill_ids[0], state.key, state.members[:num_ranges])

    def set(self, event: MembersSet) -> RequestState | None:
        """The instance where it decodes has done so. Return the request, if that was waited for.

        Or the one that computes its prompt has given these ranges back.
        """
        state = self._mesh.find((event.request_id, event.epoch))
        if state is not None and state.phase is Phase.PREFILLING:
            self._given_back(state, event)
            return None
        copy = None if state is None else state.range_copy
        if (
            state is None
            or copy is None
            or not copy.has_landed
            or state.decode_id != event.instance_id
            or copy.range_number >= len(event.member_ids)
            or event.member_ids[copy.range_number] != copy.target_id
        ):
            self._mesh.ignore("MembersSet")
            return None
        home = self._mesh.instances[event.instance_id]
        if copy.source_id == event.instance_id and not copy.plan.computes:
            home.hand_on(state.key, home.num_home_blocks(state.request, len(event.member_ids)))
        self._end(state, copy, home)
        return state

    def _given_back(self, state: RequestState, event: MembersSet) -> None:
        members = state.members[: len(event.member_ids)]
        member_ids = tuple([member.instance_id for member in members])
        if not state.gives_back or event.instance_id != state.prefill_ids[0] or member_ids != event.member_ids:
            self._mesh.ignore("MembersSet")
            return
        state.give_back(len(members))

    def _end(self, state: RequestState, copy: Copy, home: InstanceState) -> None:
        """The range has its next holder, and the instance where it decodes knows."""
        if copy.source_id != home.instance_id:
            self._mesh.free(copy.source_id, state.key)
        allocation = home.allocations[state.key]
        first_block = allocation.num_elsewhere_tokens // home.block_size
        state.hand_on_range(home.shard(allocation.num_blocks, first_block))
        allocation.told_members = ()
        del self._mesh.copying[state.key]
        self._note(home, state.key)

    def failed(self, key: RequestKey, instance_id: InstanceId, transfer_id: TransferId | None = None) -> bool:
        """One side of a range's way has given it up, or an instance its room. False if it has no part in one."""
        state = self._mesh.find(key)
        copy = None if state is None else state.range_copy
        if state is None or copy is None or instance_id not in (copy.source_id, copy.target_id):
            return False
        if transfer_id is not None and copy.plan.transfer_id != transfer_id:
            return False
        if instance_id == copy.target_id:
            self._lose_target(state, copy)
        elif not copy.has_landed:  # otherwise the source missed the acknowledgement
            self._over(state, copy, told_by=instance_id)
        return True

    def released(self, instance_id: InstanceId, key: RequestKey) -> None:
        """An instance has given back a range, or its room for one: perhaps that was on its way there."""
        state = self._mesh.find(key)
        if state is not None and state.range_copy is not None and state.range_copy.target_id == instance_id:
            self._lose_target(state, state.range_copy)

    def _lose_target(self, state: RequestState, copy: Copy) -> None:
        """Go on as before; or start again, if perhaps the target is asked by now."""
        if copy.has_landed:
            self._mesh.restart(state, f"instance {copy.target_id} dropped a part of its KV")
        else:
            self._over(state, copy)

    def _over(self, state: RequestState, copy: Copy, *, told_by: InstanceId | None = None) -> None:
        """End the way of a range that has not landed."""
        self._mesh.withdraw(copy, told_by=told_by)
        self._mesh.end_copy(state, failed=True)

    # --- instances come and go ---

    def _of_instance(self, instance_id: InstanceId) -> list[tuple[RequestState, Copy]]:
        return [(state, copy) for state, copy in self._mesh.copies_of(instance_id) if copy.plan.is_of_part]

    def lost(self, instance_id: InstanceId) -> None:
        """An instance is gone, or has begun anew: what was on its way there, or from there, is not."""
        for state, copy in self._of_instance(instance_id):
            if copy.target_id == instance_id:
                self._lose_target(state, copy)
            elif not copy.has_landed:
                self._over(state, copy)

    def joined(self, instance: InstanceState) -> None:
        """An instance registered, perhaps again: it may not have heard of its requests' members, or we not of that."""
        for state, copy in self._of_instance(instance.instance_id):
            if not copy.has_landed:
                self._over(state, copy)
            elif copy.target_id == instance.instance_id and state.key not in instance.allocations:
                self._lose_target(state, copy)
        for state in list(self._mesh.copying.values()):
            landed = state.range_copy
            if landed is not None and landed.has_landed and state.decode_id == instance.instance_id:
                if instance.allocations[state.key].told_members == state.next_members:
                    self._end(state, landed, instance)
                else:
                    self.landed(state)
        if instance.max_kv_tokens:
            for key in instance.allocations:
                self._note(instance, key)

    def check_integrity(self) -> None:
        """AssertionError names what does not balance."""
        for state in self._mesh.copying.values():
            if (copy := state.range_copy) is not None:
                held = self._mesh.allocation_of(copy.target_id, state.key)
                assert held is not None, f"{state.key} has no room on {copy.target_id}, where a part of it goes"
                assert held.kind is AllocationKind.PART, f"{state.key} has {held.kind} on {copy.target_id}"


def _is_full(instance: InstanceState, allocation: Allocation) -> bool:
    """Whether a range of a context is complete where it decodes, and the next one has begun; the last has no KV yet."""
    return allocation.kind is AllocationKind.RESIDENT and allocation.num_own_tokens - 1 > instance.max_kv_tokens > 0


def can_resume(mesh: MeshState, state: RequestState, num_held_tokens: int) -> bool:
    """Whether there are instances that compute so many tokens that it holds as a prompt, and decode on."""
    num_tokens = min(state.request.max_total_tokens, num_held_tokens)
    num_more = max(0, num_tokens - state.request.num_prompt_tokens)
    resumed = replace(
        state.request,
        num_prompt_tokens=state.request.num_prompt_tokens + num_more,
        max_tokens=state.request.max_tokens - num_more,
    )
    return could_place(resumed, mesh.kinds)
