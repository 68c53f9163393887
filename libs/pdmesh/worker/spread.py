"""Contexts that are spread over several instances, on both sides: where they decode, and where others hold ranges.

Where one decodes, its members change between two steps, and what it held itself of the first ranges is given back then.
A range that others are to hold is copied before, while the request decodes on (`pdmesh.core.copies.context_ranges`).
"""

from __future__ import annotations

from functools import partial

import structlog

from pdmesh.core.commands import GrantTransfer, PlaceDecode, SetPlaces, StopCopy
from pdmesh.core.events import DecodeReserved, MembersSet, PartLost, TransferFailed, TransferSent
from pdmesh.errors import PdmeshError, ProtocolError
from pdmesh.kv.blocks import OutOfBlocks
from pdmesh.kv.outcome import SentTransfer
from pdmesh.kv.receiver import NO_BLOCK
from pdmesh.kv.spread import PartHolder, SpreadKv
from pdmesh.kv.transfer import KvDestination
from pdmesh.model import IndexRange, InstanceId, PartMember, TransferId, TransferPurpose
from pdmesh.plans import TransferPlan
from pdmesh.wire.messages import Prompt, pack_token_ids
from pdmesh.worker.context import InstanceContext
from pdmesh.worker.departures import part_to_send
from pdmesh.worker.growth import RoomGrowth
from pdmesh.worker.intake import Intake, check_prompt
from pdmesh.worker.lost_ranges import LostRanges
from pdmesh.worker.sequences import LocalRequest, Respread, Stage

log = structlog.get_logger()


class SpreadContexts:
    """What an instance has of them."""

    def __init__(
        self, context: InstanceContext, *, intake: Intake, growth: RoomGrowth, lost_ranges: LostRanges
    ) -> None:
        self._context = context
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
            request = self._intake.take_unknown(command, command.num_blocks, (), 0, Stage.HOLDING)
        except PdmeshError as error:
            self._intake.refuse(command, error, transfer.transfer_id)
            return
        request.part = blocks.start // blocks.size
        self._context.mover.parts.hold(
            request.request_id,
            request.epoch,
            capability=transfer.capability,
            block_ids=request.sequence.block_table,
            home_address=home_address,
            member=request.part,
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

    # --- ranges that go elsewhere ---

    def grant(self, command: GrantTransfer) -> None:
        """Begin to send a range that is here. The request decodes on. Raises ProtocolError if the target is unknown."""
        transfer = command.transfer
        request = self._context.sequences.get(command.request_id, command.epoch)
        if request is None:
            return  # it ended meanwhile
        if transfer.purpose is TransferPurpose.LOST_PART:
            self._send_tokens(request, transfer)
            return
        blocks, table = transfer.sources[0].part.blocks, request.sequence.block_table
        if not self._has(request, blocks) or len(transfer.destinations) != 1:
            self._failed(request, transfer.transfer_id, "the range is not here")
            return
        (address,) = self._context.addresses.of(transfer.destination_ids)
        request.handing = transfer
        departures = self._context.mover.departures
        sender = departures.offer(
            request.request_id,
            request.epoch,
            block_ids=[*[NO_BLOCK] * blocks.start, *table[: blocks.size]],  # of a member, its own alone
            num_context_tokens=blocks.stop * request.block_size,
            blocks=blocks,
            num_present_blocks=blocks.stop,
        )
        sender.commit(None)
        part = part_to_send(transfer, 0, request.block_size)
        departures.grant(
            request.request_id,
            request.epoch,
            destinations=[KvDestination(address, part)],
            capability=transfer.capability,
        )

    @staticmethod
    def _has(request: LocalRequest, blocks: IndexRange) -> bool:
        """Whether the first blocks here are these of the context, and have their KV."""
        if request.handing is not None or blocks.size > len(request.sequence.block_table):
            return False
        if request.stage is Stage.HOLDING:
            return True
        num_elsewhere_blocks = request.sequence.num_elsewhere_tokens // request.block_size
        has_kv = blocks.size * request.block_size <= request.num_own_tokens - 1
        return request.stage is Stage.DECODING and has_kv and blocks.start == num_elsewhere_blocks

    def withdraw(self, command: StopCopy) -> bool:
        """Send a range no further. False if this is no range's way."""
        request = self._context.sequences.get(command.request_id, command.epoch)
        if request is None or request.handing is None or request.handing.transfer_id != command.transfer_id:
            return False
        self._stop(request)
        return True

    def stay_all(self) -> None:
        """Forget what members are to be, and what is on its way to them: the scheduler that said so is gone."""
        for request in self._context.sequences:
            request.respread = None
            if request.handing is not None:
                self._stop(request)

    def sent(self, request: LocalRequest, outcome: SentTransfer) -> None:
        """Report that a range was acknowledged where it went."""
        assert request.handing is not None
        transfer, request.handing = request.handing, None
        self._context.metrics.transfer_bytes.labels("out").inc(outcome.num_bytes)
        self._context.report(
            TransferSent(
                self._context.instance_id,
                request.request_id,
                request.epoch,
                transfer.transfer_id,
                outcome.num_bytes,
                outcome.duration_s,
                0.0,  # nobody waited for it
                outcome.sent_s,
                transfer.destination_ids[0],
                outcome.carrier,
            )
        )

    def failed(self, request: LocalRequest, reason: str) -> None:
        """Report that a range could not be sent. It is here as before."""
        assert request.handing is not None
        self._context.metrics.failed_transfers.labels("out").inc()
        transfer_id = request.handing.transfer_id
        self._stop(request)
        self._failed(request, transfer_id, reason)

    def _failed(self, request: LocalRequest, transfer_id: TransferId, reason: str) -> None:
        log.info("a range was not sent", request_id=request.request_id, epoch=request.epoch, reason=reason)
        self._context.report(
            TransferFailed(self._context.instance_id, request.request_id, request.epoch, transfer_id, reason)
        )

    def _has_landed(self, request: LocalRequest, transfer: TransferPlan) -> None:
        """End what only waits for an acknowledgement, which was perhaps lost: the request may go elsewhere next."""
        self._stop(request)
        sent = TransferSent(
            self._context.instance_id,
            request.request_id,
            request.epoch,
            transfer.transfer_id,
            num_bytes=0,  # nobody says
            duration_s=0.0,
            exposed_s=0.0,
            destination_id=transfer.destination_ids[0],
        )
        self._context.report(sent)

    def _stop(self, request: LocalRequest) -> None:
        request.handing = None
        self._context.mover.departures.cancel(request.request_id, request.epoch)

    # --- ranges that were lost ---

    def lost(self, request: LocalRequest) -> None:
        """Let a context stand still of which a member gives no answer; of several it is given up."""
        if request.respread is not None:  # named while the step ran: it asks these, and goes on if the range is there
            self.between_steps(request)
            return
        elsewhere = request.sequence.elsewhere
        numbers = elsewhere.lost_members if isinstance(elsewhere, SpreadKv) else ()
        if request.lost_part is not None:
            return  # the scheduler knows
        if len(numbers) != 1 or request.leaving is not None:
            self._context.endings.drop(request, "other instances that hold KV of it do not answer")
            return
        (request.lost_part,) = numbers
        self._context.report(PartLost(self._context.instance_id, request.request_id, request.epoch, request.lost_part))

    def _send_tokens(self, request: LocalRequest, transfer: TransferPlan) -> None:
        """Send the tokens of a range that was lost to who computes it again. The request stands still."""
        blocks = transfer.destinations[0].part.blocks
        begin, end = (number * request.block_size for number in blocks)
        elsewhere, number = request.sequence.elsewhere, blocks.start // blocks.size
        is_member = isinstance(elsewhere, SpreadKv) and end <= elsewhere.num_tokens
        if request.stage is not Stage.DECODING or not is_member or len(transfer.destinations) != 1:
            self._failed(request, transfer.transfer_id, "no other instance held the range")
            return
        (address,) = self._context.addresses.of(transfer.destination_ids)
        assert isinstance(elsewhere, SpreadKv)
        request.lost_part = number
        elsewhere.fail("a range of its KV was lost", number)

        def failed(reason: str) -> None:
            if not request.doomed:
                self._failed(request, transfer.transfer_id, reason)

        self._context.mover.parts.send_tokens(
            request.request_id,
            request.epoch,
            pack_token_ids(request.sequence.token_ids[begin:end]),
            request.sequence.num_prompt_tokens,
            holder=PartHolder(address, transfer.capability),
            on_failure=failed,
        )

    # --- whom a home asks ---

    def respread(self, command: SetPlaces, members: tuple[PartMember, ...]) -> None:
        """Let a context have these members, as soon as no step computes it. Raises ProtocolError if one is unknown."""
        request = self._context.sequences.get(command.request_id, command.epoch)
        if request is not None and (request.stage is Stage.DECODING or request.gives_back):
            request.respread = Respread(members, self._context.addresses.holders(members))
            self.between_steps(request)

    def between_steps(self, request: LocalRequest) -> None:
        """Let a context have the members that the scheduler named, if it named any and no step computes it."""
        respread, range_tokens = request.respread, self._context.range_tokens
        if respread is None or request.in_step or request.doomed:
            return
        request.respread = None
        members = respread.members
        num_tokens = len(members) * range_tokens
        num_more = num_tokens - request.sequence.num_elsewhere_tokens
        num_with_kv = len(request.sequence.token_ids) - 1
        if request.gives_back:
            num_with_kv = request.num_computed_tokens
        if num_more < 0 or num_tokens > num_with_kv or not members:
            reason = f"{len(members)} others are to hold what they cannot of {len(request.sequence.token_ids)} tokens"
            self._context.endings.drop(request, reason)
            return
        number, before = request.lost_part, request.members
        asks_again = members == before  # a scheduler says so that may not have heard of the lost one
        if number is not None and (asks_again or members[number : number + 1] != before[number : number + 1]):
            request.lost_part = None
        request.members = members
        if request.handing is not None and request.handing.capability in [each.capability for each in members]:
            self._has_landed(request, request.handing)
        request.sequence.elsewhere = self._context.mover.parts.open(
            request.request_id, request.epoch, members=respread.holders, num_tokens=num_tokens
        )
        table, num_blocks = request.sequence.block_table, num_more // request.block_size
        given_back = table[:num_blocks]
        del table[:num_blocks]
        request.chain = ()  # all of it was in what is given back
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

    def _given_back(self, request: LocalRequest, num_blocks: int, done: MembersSet) -> None:
        """Take as many blocks for the tokens of a prompt that follow, as far as there are any, and say so."""
        sender, table = request.sender, request.sequence.block_table
        if request.doomed or sender is None:
            return
        first = request.sequence.num_elsewhere_tokens // request.block_size + len(table)
        try:
            new = self._context.tables.allocate(min(num_blocks, len(sender.block_ids) - first))
        except OutOfBlocks as error:  # the scheduler's count is wrong
            self._context.endings.drop(request, str(error))
            return
        table += new
        sender.hold(first, new)
        self._context.report(done)
