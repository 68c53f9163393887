"""Moves of ranges between the holders of contexts that are spread over several instances.

The home is the instance where a context decodes. The home hands a full range on to another instance, and an instance
that stops hands on all its ranges. The range is copied while the request decodes. Once it has landed, the home gets the
new list of members. When the home reports that it asks these members, the previous holder frees the range. If the copy
fails before that, nothing changes.

A range whose holder was lost takes the same way, except that only its tokens are copied. The request is paused, and an
instance with room for the range computes it again. That instance asks the holders of earlier ranges, as a decode would.
Nothing else is computed again, and the request continues in the same epoch. A request that finds no room in time, or
whose context loses ranges again and again, starts again from its transcript.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from math import inf

from pdmesh.core.copies.decode_moves import MAX_AT_ONCE, MAX_FAILED
from pdmesh.core.copies.receivers import replace_receiver
from pdmesh.core.events import MembersSet, RangeLost
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


class ContextRanges:
    """Full ranges and lost ranges of contexts, and their copies to the next holders."""

    def __init__(self, mesh: MeshState) -> None:
        self._mesh = mesh
        # Requests that hold more than a range where they decode.
        self._full: dict[RequestKey, None] = {}
        # Deadlines of lost ranges that no instance computes yet.
        self._until_s: dict[RequestKey, float] = {}

    # --- full ranges ---

    def grew(self, instance: InstanceState, residents: Iterable[ResidentContext]) -> None:
        """Note which of the reported residents hold more than a range on the instance."""
        if instance.max_kv_tokens:
            for resident in residents:
                self._note(instance, (resident.request_id, resident.epoch))

    def _note(self, instance: InstanceState, key: RequestKey) -> None:
        allocation = instance.allocations.get(key)
        if allocation is not None and _is_full(instance, allocation):
            self._full[key] = None

    def serve(self, leaving: Sequence[InstanceId], placement: DecodePlacement, now_s: float) -> None:
        """Copy lost ranges' tokens, full ranges, and the ranges that ``leaving`` instances hold; after any event."""
        for key, state in list(self._mesh.lost_ranges.items()):
            if self._mesh.find(key) is not state or state.lost_range is None:
                del self._mesh.lost_ranges[key]
                self._until_s.pop(key, None)
            elif state.outgoing is None:
                self._serve_lost(state, state.lost_range, placement, now_s)
        for key in list(self._full):
            self._serve_full(key, placement)
        for instance_id in leaving:
            source = self._mesh.instances.get(instance_id)
            if source is not None and source.allocated.num_range_blocks and source.reachable and not source.suspected:
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
        """Restart a request that is stuck: it has all room on its instance, and no instance takes its full range.

        The restarted request waits until enough instances have room.
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

    # --- lost ranges ---

    @property
    def next_deadline_s(self) -> float:
        """Earliest deadline of a lost range that no instance computes yet; infinite if there is none."""
        return min(self._until_s.values(), default=inf)

    def lost_range(self, event: RangeLost) -> None:
        """Replace the holder of a range, which did not answer the decoding instance.

        A report from another instance, or about a range that the context does not have, is counted as ignored.
        """
        state = self._mesh.find((event.request_id, event.epoch))
        if state is None or state.decode_id != event.instance_id or event.number >= len(state.members):
            self._mesh.ignore("RangeLost")
            return
        member_id = state.members[event.number].instance_id
        if state.needs(member_id):
            replace_receiver(
                self._mesh, state, member_id, f"instance {member_id}, which holds some of its KV, does not answer"
            )

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
        is_whole = state.outgoing is None and state.lost_range is None
        return state.phase is Phase.DECODING and is_whole and state.num_failed_moves < MAX_FAILED

    # --- beginning a copy ---

    def _begin(self, state: RequestState, source: InstanceState, number: int, placement: DecodePlacement) -> bool:
        """Begin to copy range ``number`` to another instance with room, or to compute the range there if it was lost.

        Returns False if no instance has room. True without a copy means that the range waits for its turn, or for a
        silent instance.
        """
        mesh, home_id = self._mesh, state.decode_id
        copies = [each.range_copy for each in mesh.copying.values()]
        under_way = [copy for copy in copies if copy is not None and not copy.has_landed]
        if sum(copy.source_id == source.instance_id for copy in under_way) >= MAX_AT_ONCE:
            return True
        num_coming = Counter([copy.target_id for copy in under_way])
        with_room = [
            each
            for each in mesh.instances.values()
            if each is not source
            and each.instance_id != home_id
            and state.key not in each.allocations
            and each.arithmetic_class == source.arithmetic_class
            and each.is_usable
            and each.role_decodes
            and source.part_blocks <= each.room.bounded
        ]
        able = [each for each in with_room if each.takes_new and num_coming[each.instance_id] < MAX_AT_ONCE]
        cut = mesh.cut.of(source.instance_id) | mesh.cut.of(home_id or source.instance_id)
        target = mesh.nearest(source, source.part_blocks, able, cut, placement)
        if target is not None:
            self._hand_on(state, source, target, number)
        return bool(with_room)

    def _hand_on(self, state: RequestState, source: InstanceState, target: InstanceState, number: int) -> None:
        mesh, size = self._mesh, source.part_blocks
        is_lost = number == state.lost_range
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

    # --- instances' reports ---

    def landed(self, state: RequestState) -> None:
        """Tell the decoding instance the new members: the range has landed."""
        assert state.decode_id is not None
        self._mesh.set_places(state.decode_id, state.key, state.next_members)

    def landed_of_prompt(self, state: RequestState, copy: Copy) -> None:
        """Tell the computing instance the holders of landed ranges, so that it frees their blocks for the next ones."""
        num_ranges = copy.num_landed_parts
        if state.streams_out and state.phase is Phase.PREFILLING and num_ranges > state.num_ranges_away:
            self._mesh.set_places(state.prefill_ids[0], state.key, state.members[:num_ranges])

    def set(self, event: MembersSet) -> RequestState | None:
        """Note that the home asks the new members. Return the request if a copied range waited for this, else None.

        A report of the instance that computes a long prompt instead counts the ranges that it has freed. An outdated
        report is counted as ignored.
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
        if not state.streams_out or event.instance_id != state.prefill_ids[0] or member_ids != event.member_ids:
            self._mesh.ignore("MembersSet")
            return
        state.give_back(len(members))

    def _end(self, state: RequestState, copy: Copy, home: InstanceState) -> None:
        """Record the range's new holder, which the home knows now, and free the previous holder's copy."""
        if copy.source_id != home.instance_id:
            self._mesh.free(copy.source_id, state.key)
        allocation = home.allocations[state.key]
        first_block = allocation.num_remote_tokens // home.block_size
        state.hand_on_range(home.shard(allocation.num_blocks, first_block))
        allocation.last_sent_members = ()
        del self._mesh.copying[state.key]
        self._note(home, state.key)

    def failed(self, key: RequestKey, instance_id: InstanceId, transfer_id: TransferId | None = None) -> bool:
        """Handle a failed copy of a range. False if the instance or ``transfer_id`` (None: any) has no part in it.

        A lost target restarts the request if the range has landed there, and a lost source then changes nothing. If
        the range has not landed, the copy ends without effect.
        """
        state = self._mesh.find(key)
        copy = None if state is None else state.range_copy
        if state is None or copy is None or instance_id not in (copy.source_id, copy.target_id):
            return False
        if transfer_id is not None and copy.plan.transfer_id != transfer_id:
            return False
        if instance_id == copy.target_id:
            self._lose_target(state, copy)
        elif not copy.has_landed:
            self._over(state, copy, told_by=instance_id)
        return True

    def released(self, instance_id: InstanceId, key: RequestKey) -> None:
        """End a copy whose target released its room; restart the request if the range has landed there."""
        state = self._mesh.find(key)
        if state is not None and state.range_copy is not None and state.range_copy.target_id == instance_id:
            self._lose_target(state, state.range_copy)

    def _lose_target(self, state: RequestState, copy: Copy) -> None:
        """End the copy without effect. If the range has landed, the target may be asked by now: restart the request."""
        if copy.has_landed:
            self._mesh.restart(state, f"instance {copy.target_id} dropped a range of its KV")
        else:
            self._over(state, copy)

    def _over(self, state: RequestState, copy: Copy, *, told_by: InstanceId | None = None) -> None:
        """End the copy of a range that has not landed, without effect. ``told_by`` is the source that reported it."""
        self._mesh.withdraw(copy, told_by=told_by)
        self._mesh.end_copy(state, failed=True)

    # --- membership ---

    def _of_instance(self, instance_id: InstanceId) -> list[tuple[RequestState, Copy]]:
        return [(state, copy) for state, copy in self._mesh.copies_of(instance_id) if copy.plan.is_of_range]

    def lost(self, instance_id: InstanceId) -> None:
        """End copies to or from a lost instance that have not landed; restart requests with a range landed there."""
        for state, copy in self._of_instance(instance_id):
            if copy.target_id == instance_id:
                self._lose_target(state, copy)
            elif not copy.has_landed:
                self._over(state, copy)

    def joined(self, instance: InstanceState) -> None:
        """Compare the copies of an instance that registered, perhaps again, with its residents.

        Copies that have not landed end. If a range has landed, the instance's own list of members shows whether its
        context uses the range; otherwise the instance is told the members again. Full ranges are noted.
        """
        for state, copy in self._of_instance(instance.instance_id):
            if not copy.has_landed:
                self._over(state, copy)
            elif copy.target_id == instance.instance_id and state.key not in instance.allocations:
                self._lose_target(state, copy)
        for state in list(self._mesh.copying.values()):
            landed = state.range_copy
            if landed is not None and landed.has_landed and state.decode_id == instance.instance_id:
                if instance.allocations[state.key].last_sent_members == state.next_members:
                    self._end(state, landed, instance)
                else:
                    self.landed(state)
        if instance.max_kv_tokens:
            for key in instance.allocations:
                self._note(instance, key)

    def check_integrity(self) -> None:
        """Raise AssertionError if a copied range has no room at its target."""
        for state in self._mesh.copying.values():
            if (copy := state.range_copy) is not None:
                held = self._mesh.allocation_of(copy.target_id, state.key)
                assert held is not None, f"{state.key} has no room on {copy.target_id}, where a part of it goes"
                assert held.kind is AllocationKind.PART, f"{state.key} has {held.kind} on {copy.target_id}"


def _is_full(instance: InstanceState, allocation: Allocation) -> bool:
    """Whether the resident has KV of more than ``max_kv_tokens`` tokens here. The last token has no KV yet.

    False if contexts are not spread.
    """
    return allocation.kind is AllocationKind.RESIDENT and allocation.num_own_tokens - 1 > instance.max_kv_tokens > 0


def can_resume(mesh: MeshState, state: RequestState, num_held_tokens: int) -> bool:
    """Whether the mesh, if empty, could compute ``num_held_tokens`` of the request as a prompt, and decode on."""
    num_tokens = min(state.request.max_total_tokens, num_held_tokens)
    num_more = max(0, num_tokens - state.request.num_prompt_tokens)
    resumed = replace(
        state.request,
        num_prompt_tokens=state.request.num_prompt_tokens + num_more,
        max_tokens=state.request.max_tokens - num_more,
    )
    return could_place(resumed, mesh.kinds)
