"""Contexts that are spread over several instances, on both sides: the home, where they decode, and the members.

The home changes its members between two steps, and frees its own blocks of the first ranges then. A range for another
instance is copied before that, while the request decodes (`pdmesh.core.copies.context_ranges`).
"""

from __future__ import annotations

from functools import partial

import structlog

from pdmesh.core.commands import GrantTransfer, PlaceDecode, SetPlaces
from pdmesh.core.events import DecodeReserved, MembersSet, PartLost, TransferFailed
from pdmesh.errors import PdmeshError, ProtocolError
from pdmesh.instance.copy_state import Copy, Then, range_at
from pdmesh.instance.effects import CopySent
from pdmesh.instance.sequence_phases import SeqPhase
from pdmesh.kv.blocks import OutOfBlocks
from pdmesh.kv.spread import PartHolder, SpreadKv
from pdmesh.model import InstanceId, PartMember, TransferId, TransferPurpose
from pdmesh.wire.messages import Prompt, pack_token_ids
from pdmesh.worker.context import InstanceContext
from pdmesh.worker.growth import RoomGrowth
from pdmesh.worker.intake import Intake, check_prompt
from pdmesh.worker.leaving_kv import LeavingCopies
from pdmesh.worker.lost_ranges import LostRanges
from pdmesh.worker.sequences import LocalRequest

log = structlog.get_logger()


class SpreadContexts:
    """What an instance has of them."""

    def __init__(
        self,
        context: InstanceContext,
        *,
        intake: Intake,
        growth: RoomGrowth,
        copies: LeavingCopies,
        lost_ranges: LostRanges,
    ) -> None:
        self._context = context
        self._copies = copies
        self._lost_ranges = lost_ranges
        self._intake = intake
        self._growth = growth

    # --- ranges that come here ---

    def expect_hand_over(self, command: PlaceDecode, prompt: Prompt | None) -> None:
        """Make room for a range of a context that begins to decode elsewhere."""
        try:
            num_context_tokens = check_prompt(command, prompt).num_context_tokens
        except ProtocolError as error:
            self._intake.refuse(command, error, command.transfer.transfer_id)
            return
        self._expect(command, num_context_tokens)

    def expect(self, command: PlaceDecode) -> None:
        """Make room for a range of a context that decodes."""
        self._context.tables.make_room(command.room)
        if command.transfer.purpose is TransferPurpose.LOST_PART:
            self._lost_ranges.expect(command, self._intake)
            return
        self._expect(command, command.transfer.destinations[0].part.blocks.stop * self._context.block_size)

    def _expect(self, command: PlaceDecode, num_context_tokens: int) -> None:
        transfer = command.transfer
        try:
            if command.instance_id not in transfer.destination_ids:
                raise ProtocolError("the instance is no destination of the transfer")
            place = transfer.destination_ids.index(command.instance_id)
            blocks = transfer.destinations[place].part.blocks
            source_addresses = self._context.addresses.of(transfer.source_ids)
            (home_address,) = self._context.addresses.of([command.home_id or transfer.destination_ids[0]])
            part = range_at(transfer, command.instance_id)
            request = self._intake.take_unknown(command, command.num_blocks, (), 0, SeqPhase.EXPECTED, part=part)
        except PdmeshError as error:
            self._intake.refuse(command, error, transfer.transfer_id)
            return
        self._context.mover.parts.hold(
            request.request_id,
            request.epoch,
            capability=transfer.capability,
            block_ids=request.sequence.block_table,
            home_address=home_address,
            member=blocks.start // blocks.size,
        )
        self._context.mover.arrivals.expect(
            request.request_id,
            request.epoch,
            capability=transfer.capability,
            block_ids=request.sequence.block_table,
            num_context_tokens=num_context_tokens,
            blocks=blocks,
            source_addresses=source_addresses,
            destination=place,
            draws=False,
        )
        self._context.report(
            DecodeReserved(self._context.instance_id, request.request_id, request.epoch, transfer.transfer_id)
        )

    def rehome(self, command: SetPlaces, home_id: InstanceId) -> None:
        """Answer questions about a range from another instance, too. Raises ProtocolError if it is unknown."""
        (address,) = self._context.addresses.of([home_id])
        self._context.mover.parts.rehome(command.request_id, command.epoch, address)

    # --- ranges that were lost ---

    def lost(self, request: LocalRequest) -> None:
        """Pause a context if one holder of a range does not answer, and drop it if several do not."""
        if request.next_holders is not None:  # named while the step ran: continue if the range is there
            self.between_steps(request)
            return
        elsewhere = request.sequence.elsewhere
        numbers = elsewhere.lost_members if isinstance(elsewhere, SpreadKv) else ()
        if request.state.has_lost_range:
            return  # the scheduler knows
        if len(numbers) != 1 or request.state.move is not None:
            self._context.endings.drop(request, "other instances that hold KV of it do not answer")
            return
        (number,) = numbers
        request.state.lose_range(number)
        self._context.report(PartLost(self._context.instance_id, request.request_id, request.epoch, number))

    def send_tokens(self, command: GrantTransfer) -> None:
        """Send the tokens of a lost range to the instance that computes it again. The request pauses.

        Raises ProtocolError if the instance is unknown.
        """
        transfer = command.transfer
        request = self._context.sequences.get(command.request_id, command.epoch)
        if request is None:
            return  # the request ended meanwhile
        blocks = transfer.destinations[0].part.blocks
        begin, end = (number * request.block_size for number in blocks)
        elsewhere, number = request.sequence.elsewhere, blocks.start // blocks.size
        is_member = isinstance(elsewhere, SpreadKv) and end <= elsewhere.num_tokens
        if not request.state.is_decoding or not is_member or len(transfer.destinations) != 1:
            self._failed(request, transfer.transfer_id, "no other instance held the range")
            return
        assert isinstance(elsewhere, SpreadKv)
        (address,) = self._context.addresses.of(transfer.destination_ids)
        request.state.lose_range(number)
        elsewhere.fail("a range of its KV was lost", number)

        def failed(reason: str) -> None:
            if not request.is_released:
                self._failed(request, transfer.transfer_id, reason)

        self._context.mover.parts.send_tokens(
            request.request_id,
            request.epoch,
            pack_token_ids(request.sequence.token_ids[begin:end]),
            request.sequence.num_prompt_tokens,
            holder=PartHolder(address, transfer.capability),
            on_failure=failed,
        )

    def _failed(self, request: LocalRequest, transfer_id: TransferId, reason: str) -> None:
        log.info("a range was not sent", request_id=request.request_id, epoch=request.epoch, reason=reason)
        self._context.report(
            TransferFailed(self._context.instance_id, request.request_id, request.epoch, transfer_id, reason)
        )

    # --- whom a home asks ---

    def respread(self, command: SetPlaces, members: tuple[PartMember, ...]) -> None:
        """Let a context have these members, as soon as no step computes it. Raises ProtocolError if one is unknown."""
        request = self._context.sequences.get(command.request_id, command.epoch)
        if request is not None and (request.state.is_decoding or request.gives_back):
            request.next_holders = self._context.addresses.holders(members)
            request.state.expect_members(members)
            self.between_steps(request)

    def between_steps(self, request: LocalRequest) -> None:
        """Let a context have the members that the scheduler named, if it named any and no step computes it."""
        members, holders = request.state.next_members, request.next_holders
        if members is None or holders is None or request.in_step or request.is_released:
            return
        request.next_holders = None
        num_tokens = len(members) * self._context.range_tokens
        num_more = num_tokens - request.sequence.num_elsewhere_tokens
        num_with_kv = len(request.sequence.token_ids) - 1
        if request.gives_back:
            num_with_kv = request.num_computed_tokens
        if num_more < 0 or num_tokens > num_with_kv or not members:
            reason = f"{len(members)} others are to hold what they cannot of {len(request.sequence.token_ids)} tokens"
            self._context.endings.drop(request, reason)
            return
        state, number = request.state, request.state.lost_range
        asks_again = members == state.members  # a scheduler says so that may not have heard of the lost one
        if number is not None and (asks_again or members[number : number + 1] != state.members[number : number + 1]):
            state.find_range()
        if state.handing is not None:
            self._end_if_landed(request, state.handing, members)
        request.sequence.elsewhere = self._context.mover.parts.open(
            request.request_id, request.epoch, members=holders, num_tokens=num_tokens
        )
        table, num_blocks = request.sequence.block_table, num_more // request.block_size
        given_back = table[:num_blocks]
        del table[:num_blocks]
        state.spread(members, num_blocks)
        request.low_at_blocks = request.out_at_blocks = 0
        member_ids = tuple([member.instance_id for member in members])
        done = MembersSet(self._context.instance_id, request.request_id, request.epoch, member_ids, request.gives_back)
        if request.sender is not None:
            request.sender.give_back(num_tokens // request.block_size)
            self._context.tables.take_out(given_back, partial(self._given_back, request, num_blocks, done))
            return
        self._context.tables.take_out(given_back, partial(self._context.report, done))
        self._growth.tell([request])
        self._context.wake()

    def _end_if_landed(self, request: LocalRequest, copy: Copy, members: tuple[PartMember, ...]) -> None:
        """End the copy of a range that only waits for an acknowledgement: the request may go elsewhere next."""
        transfer = copy.transfer
        if transfer is not None and transfer.capability in [each.capability for each in members]:
            self._context.mover.departures.cancel(request.request_id, request.epoch)
            sent = CopySent(request.state.key, Then.HOLD, 0, 0.0, destination_id=transfer.destination_ids[0])
            self._copies.hear(request, sent)

    def _given_back(self, request: LocalRequest, num_blocks: int, done: MembersSet) -> None:
        """Take as many blocks for the tokens of a prompt that follow, as far as there are any, and say so."""
        sender, table = request.sender, request.sequence.block_table
        if request.is_released or sender is None:
            return
        first = request.sequence.num_elsewhere_tokens // request.block_size + len(table)
        try:
            new = self._context.tables.allocate(min(num_blocks, len(sender.block_ids) - first))
        except OutOfBlocks as error:  # the scheduler's count is wrong
            self._context.endings.drop(request, str(error))
            return
        table += new
        request.state.grow(len(new))
        sender.hold(first, new)
        self._context.report(done)
