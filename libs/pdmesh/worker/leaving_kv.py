"""KV that leaves an instance, for whichever reason: `pdmesh.instance.copying` decides, and the KV mover sends.

The KV of a prompt is kept until it has landed at its receiver, to be sent to another receiver or decoded here.
"""

from __future__ import annotations

import structlog

from pdmesh.core.commands import GrantTransfer, Hold, InstanceCommand, SendKept, Stop, StopCopy
from pdmesh.core.events import MoveFailed, TransferFailed
from pdmesh.errors import PdmeshError, ProtocolError
from pdmesh.instance.copy_state import Then, then_of
from pdmesh.instance.copying import CopyCommand, CopyRules
from pdmesh.instance.effects import (
    CopyEvent,
    CopyFailed,
    CopyPaused,
    CopySent,
    Effect,
    PauseSending,
    Refused,
    SendKv,
    StopSending,
)
from pdmesh.instance.sequence import Sequence
from pdmesh.instance.sequence_phases import CopyState, SeqPhase
from pdmesh.kv.outcome import FailedTransfer, SentTransfer
from pdmesh.kv.pages import NO_BLOCK
from pdmesh.kv.piece import KvDestination
from pdmesh.model import GRANULE_TOKENS, IndexRange, InstanceId, KvPart, blocks_of_granule
from pdmesh.plans import TransferPlan
from pdmesh.worker.context import InstanceContext
from pdmesh.worker.growth import RoomGrowth
from pdmesh.worker.intake import Intake
from pdmesh.worker.moves import MovingDecodes
from pdmesh.worker.sequences import LocalRequest
from pdmesh.worker.spans import DONE

log = structlog.get_logger()


class LeavingCopies:
    """The copies of an instance's requests, and what these need of blocks and residents (`Floor`)."""

    def __init__(self, context: InstanceContext, *, intake: Intake, growth: RoomGrowth, moves: MovingDecodes) -> None:
        self._context = context
        self._intake = intake
        self._growth = growth
        self._moves = moves
        self._effects: list[Effect] = []
        self._copying = CopyRules(self)

    # --- in ---

    def obey(self, command: CopyCommand) -> None:
        """Obey a command for a request. Raises ProtocolError if it names an unknown instance."""
        if isinstance(command, Hold):
            self._context.tables.make_room(command.room)
        request = self._context.sequences.get(command.request_id, command.epoch)
        if request is None:
            return  # the request ended meanwhile
        has_new_receiver = False
        if isinstance(command, GrantTransfer):
            self._context.addresses.of(command.transfer.destination_ids)
            if self._refuses(request, command.transfer):
                return
            onward = request.state.onward
            has_new_receiver = onward is not None and onward.transfer_id != command.transfer.transfer_id
        was_decoding = request.state.is_decoding
        request.note_commit()
        self._copying.obey(request.state, command)
        self._carry_out()
        if has_new_receiver and request.phase is SeqPhase.COMPUTED:
            self._context.gateways.give_turn(request, request.next_instance_id or self.instance_id)
        if request.state.is_decoding and not was_decoding:
            self._growth.tell([request])

    def send_cached(self, command: SendKept) -> None:
        """Send granules that are cached here."""
        transfer, num_granules = command.transfer, len(command.chain)
        num_blocks = num_granules * blocks_of_granule(self._context.block_size)
        try:
            if len(transfer.destinations) != 1:
                raise ProtocolError(f"{len(transfer.destinations)} destinations of granules")
            self._context.addresses.of(transfer.destination_ids)
            request = self._intake.take_unknown(command, num_blocks, command.chain, num_granules, SeqPhase.COMPUTED)
        except PdmeshError as error:
            self._intake.refuse(command, error, transfer.transfer_id)
            return
        request.state.send_on(transfer, Then.KEEP, CopyState.SENDING)
        self._send_blocks(request, transfer, request.sequence.block_table, num_granules * GRANULE_TOKENS)

    def sent(self, request: LocalRequest, outcome: SentTransfer) -> None:
        """Note that a destination has acknowledged a whole copy."""
        then, transfer = _leaving(request)
        if transfer is None:
            return
        self._context.metrics.transfer_bytes.labels("out").inc(outcome.num_bytes)
        waited_s, sent_s = outcome.exposed_s, outcome.sent_s
        if then is Then.KEEP:
            # All KV was here from the start, so its time measures the link, also where the destination reads it.
            waited_s, sent_s = 0.0, outcome.duration_s
        elif then is Then.HOLD:
            waited_s = 0.0  # no stream waited for it
        elif request.state.move is not None:
            request.end_trace(DONE)
        else:
            self._context.metrics.transfer_s.observe(outcome.duration_s)
            self._context.metrics.exposed_s.observe(outcome.exposed_s)
            if request.trace is not None:
                request.trace.transfer_sent(outcome)
        destination_id = transfer.destination_ids[0] if len(transfer.destinations) == 1 else None
        sent = CopySent(
            request.state.key,
            then,
            outcome.num_bytes,
            outcome.duration_s,
            waited_s,
            sent_s,
            destination_id,
            outcome.carrier,
        )
        self.hear(request, sent)

    def paused(self, request: LocalRequest) -> None:
        """Note that no piece of a copy is under way until it is granted again."""
        _, transfer = _leaving(request)
        if transfer is not None:
            self.hear(request, CopyPaused(request.state.key, transfer.transfer_id))

    def failed(self, request: LocalRequest, outcome: FailedTransfer) -> None:
        """Note that a copy could not be sent, or was not acknowledged."""
        then, transfer = _leaving(request)
        if transfer is None:
            return
        self._context.metrics.failed_transfers.labels("out").inc()
        log.info(
            "a copy failed",
            request_id=request.request_id,
            epoch=request.epoch,
            purpose=transfer.purpose,
            reason=outcome.reason,
        )
        self.hear(request, CopyFailed(request.state.key, then, outcome.reason))

    def hear(self, request: LocalRequest, event: CopyEvent) -> None:
        """Take an event of a copy."""
        request.note_commit()
        self._copying.hear(request.state, event)
        self._carry_out()

    def end_with_scheduler(self, request: LocalRequest) -> None:
        """End what a lost scheduler began: moves that are not committed, and copies of ranges."""
        request.note_commit()
        if request.state.move is not None and not request.state.move.may_have_begun:
            self._copying.stay(request.state)
        self._copying.forget_plans(request.state)
        request.next_holders = None
        self._carry_out()

    # --- blocks and residents ---

    @property
    def instance_id(self) -> InstanceId:
        return self._context.instance_id

    @property
    def effects(self) -> list[Effect]:
        return self._effects

    def keep(self, sequence: Sequence, command: Hold) -> bool:
        """Let a request have room for its output. False if there is no room."""
        request = self._request(sequence)
        num_tokens = len(request.sequence.token_ids) - (request.phase is SeqPhase.COMPUTED)
        request.max_kv_tokens = num_tokens + request.generation.max_tokens_left - 1
        request.sender = None
        self._context.mover.departures.withdraw(request.request_id, request.epoch)
        try:
            if request.max_kv_tokens > self._context.max_model_len:
                raise ProtocolError(
                    f"{request.max_kv_tokens} tokens are more than the {self._context.max_model_len} of the model"
                )
            self._growth.extend(request, command.num_blocks)
        except PdmeshError as error:
            self._context.endings.drop(request, str(error))
            return False
        return True

    def land(self, sequence: Sequence, num_tokens: int) -> None:
        """Cache the prompt of a request whose KV has landed."""
        sequence.land(num_tokens)
        self._context.tables.keep_prompt(self._request(sequence), num_tokens)

    def decode(self, sequence: Sequence) -> None:
        """Let a request decode here, and say so to its gateway unless it decodes where that was expected."""
        request = self._request(sequence)
        if request.phase is not SeqPhase.EXPECTED:
            self._context.gateways.give_turn(request, self.instance_id)
        self._context.sequences.decode(request)
        self._context.wake()

    def leave(self, sequence: Sequence) -> None:
        """Do nothing: the step that draws the last token ends it (`MovingDecodes.successor`)."""

    def stay(self, sequence: Sequence) -> None:
        """Do nothing: it decodes."""

    def lose_range(self, sequence: Sequence, number: int) -> None:
        """Pause a request until another instance has computed a range of its context."""
        sequence.lose_range(number)

    def computed(self, sequence: Sequence, num_granules: int) -> None:
        """Cache the first granules of a request."""
        self._context.tables.keep_prompt(self._request(sequence), num_granules * GRANULE_TOKENS)

    def release(self, sequence: Sequence) -> None:
        """Release a request, after the effects before have been carried out."""
        self._carry_out()
        self._context.sequences.release(self._request(sequence))

    def _request(self, sequence: Sequence) -> LocalRequest:
        request = self._context.sequences.get(*sequence.key)
        assert request is not None, f"{sequence.key} is not held"
        return request

    # --- out ---

    def _carry_out(self) -> None:
        effects = self._effects[:]
        self._effects.clear()
        for effect in effects:
            match effect:
                case SendKv(sequence=sequence, transfer=transfer):
                    self._send(self._request(sequence), transfer)
                case StopSending(sequence=sequence, transfer=transfer):
                    self._stop(self._request(sequence), transfer)
                case PauseSending(sequence=sequence):
                    self._context.mover.departures.pause(*sequence.key)
                case Refused(command=command, reason=reason):
                    self._refused(command, reason)
                case tuple():
                    raise AssertionError(f"a copy has the effect {effect}")
                case _:
                    self._context.report(effect)

    def _refuses(self, request: LocalRequest, transfer: TransferPlan) -> bool:
        """Whether what a grant is for is not here; the scheduler is told."""
        about = self.instance_id, request.request_id, request.epoch, transfer.transfer_id
        if then_of(transfer) is Then.DECODE and request.state.is_decoding and len(transfer.destinations) != 1:
            self._context.report(MoveFailed(*about, False, "it would move to several instances"))
            return True
        if then_of(transfer) is Then.HOLD and not _has_range(request, transfer):
            self._context.report(TransferFailed(*about, "the range is not here"))
            return True
        return False

    def _refused(self, command: InstanceCommand, reason: str) -> None:
        """Drop a request if the scheduler would wait for a copy that never begins or pauses."""
        log.warning("a command was refused", command=type(command).__name__, reason=reason)
        if isinstance(command, GrantTransfer) or (isinstance(command, StopCopy) and command.how is Stop.PAUSE):
            request = self._context.sequences.get(command.request_id, command.epoch)
            if request is not None and request.state.onward is not None:
                self._context.endings.drop(request, reason)

    def _send(self, request: LocalRequest, transfer: TransferPlan) -> None:
        match then_of(transfer):
            case Then.DECODE if request.state.move is not None:
                self._moves.begin(request, self._destinations(transfer)[0], transfer)
            case Then.HOLD:
                blocks, table = transfer.sources[0].part.blocks, request.sequence.block_table
                # of an instance that holds a range alone its own blocks
                block_ids = [*[NO_BLOCK] * blocks.start, *table[: blocks.size]]
                self._send_blocks(request, transfer, block_ids, blocks.stop * request.block_size, blocks)
            case _:
                self._grant(request, transfer)
                if request.trace is not None:
                    request.trace.transfer_granted()

    def _send_blocks(
        self,
        request: LocalRequest,
        transfer: TransferPlan,
        block_ids: list[int],
        num_context_tokens: int,
        blocks: IndexRange | None = None,
    ) -> None:
        """Send blocks that have their KV already; None: all."""
        sender = self._context.mover.departures.offer(
            request.request_id,
            request.epoch,
            block_ids=block_ids,
            num_context_tokens=num_context_tokens,
            blocks=blocks,
            num_present_blocks=len(block_ids),
        )
        sender.commit(None)
        self._grant(request, transfer)

    def _grant(self, request: LocalRequest, transfer: TransferPlan) -> None:
        self._context.mover.departures.grant(
            request.request_id,
            request.epoch,
            destinations=self._destinations(transfer),
            capability=transfer.capability,
        )

    def _destinations(self, transfer: TransferPlan) -> list[KvDestination]:
        addresses = self._context.addresses.of(transfer.destination_ids)
        return [
            KvDestination(address, part_to_send(transfer, number, self._context.block_size))
            for number, address in enumerate(addresses)
        ]

    def _stop(self, request: LocalRequest, transfer: TransferPlan) -> None:
        key = request.state.key
        match then_of(transfer):
            case Then.DECODE if request.move is not None:
                request.move = None
                self._context.mover.departures.cancel(*key)
            case Then.HOLD:
                self._context.mover.departures.cancel(*key)
            case _:
                log.info("kv kept for another receiver", request_id=request.request_id, epoch=request.epoch)
                self._context.mover.departures.withdraw(*key)
                if request.trace is not None:
                    request.trace.receiver_lost()
                if request.phase is SeqPhase.COMPUTED:
                    self._context.gateways.give_turn(request, self.instance_id)


def _leaving(request: LocalRequest) -> tuple[Then, TransferPlan | None]:
    """Return the copy that leaves: the copy of a range, if one is under way."""
    state = request.state
    if state.handing is not None:
        return Then.HOLD, state.handing.transfer
    copy = state.move or state.onward
    then = Then.KEEP if Then.KEEP in state.outgoing else Then.DECODE
    return then, None if copy is None else copy.transfer


def _has_range(request: LocalRequest, transfer: TransferPlan) -> bool:
    """Whether the first blocks here belong to the range of a transfer, and have their KV."""
    blocks = transfer.sources[0].part.blocks
    if len(transfer.destinations) != 1 or blocks.size > len(request.sequence.block_table):
        return False
    if request.phase is SeqPhase.HOLDING:
        return True
    num_elsewhere_blocks = request.sequence.num_elsewhere_tokens // request.block_size
    has_kv = blocks.size * request.block_size <= request.num_own_tokens - 1
    return request.state.is_decoding and has_kv and blocks.start == num_elsewhere_blocks


def part_to_send(transfer: TransferPlan, number: int, block_size: int) -> KvPart:
    """Return what a transfer's destination is sent: its part, but for the blocks that it shares."""
    part = transfer.destinations[number].part
    num_shared = max(0, transfer.num_reused_granules) * blocks_of_granule(block_size)
    start, stop = part.blocks
    return part._replace(blocks=IndexRange(min(max(start, num_shared), stop), stop))
