"""Running decodes that move to another instance, on both sides: see `docs/architecture/moves.md`.

The source decodes on until the sender has caught up, names the target with the token after which it stands still, and
goes on by itself only before the commit. The target takes the request with its KV, and decodes once all has landed.
"""

from __future__ import annotations

import structlog

from pdmesh.core.commands import GrantTransfer, Hold, PlaceDecode, StopCopy
from pdmesh.core.events import DecodeReserved, MoveFailed, MoveSent
from pdmesh.engine.base import EngineSequence
from pdmesh.errors import PdmeshError, ProtocolError
from pdmesh.kv.frames import OutOfFrames
from pdmesh.kv.outcome import FailedTransfer, LandedTransfer, SentTransfer
from pdmesh.kv.receiver import FirstToken
from pdmesh.kv.transcript import pack_transcript, unpack_transcript
from pdmesh.kv.transfer import KvDestination
from pdmesh.model import GRANULE_TOKENS, IndexRange, InstanceId, TransferId
from pdmesh.wire.messages import pack_token_ids
from pdmesh.worker.context import InstanceContext
from pdmesh.worker.departures import part_to_send
from pdmesh.worker.intake import Intake, check_request
from pdmesh.worker.sequences import Leaving, LocalRequest, Stage
from pdmesh.worker.spans import DONE

log = structlog.get_logger()


class MovingDecodes:
    """What of an instance moves."""

    def __init__(self, context: InstanceContext, *, intake: Intake) -> None:
        self._context = context
        self._intake = intake

    # --- away from here ---

    def grant(self, command: GrantTransfer) -> None:
        """Begin to send a request that decodes here. Raises ProtocolError if the target is unknown."""
        request = self._context.sequences.get(command.request_id, command.epoch)
        if request is None:
            return  # it ended meanwhile
        transfer = command.transfer
        if request.stage is not Stage.DECODING or len(transfer.destinations) != 1:
            self._failed(request, transfer.transfer_id, committed=False, reason="it does not decode here")
            return
        (address,) = self._context.addresses.of(transfer.destination_ids)
        num_kv_tokens = len(request.sequence.token_ids) - 1
        sender = self._context.mover.departures.move(
            request.request_id,
            request.epoch,
            block_ids=request.context_table,
            transcript=pack_transcript(request.generation, request.sequence.token_ids[:num_kv_tokens]),
            destination=KvDestination(address, part_to_send(transfer, 0, self._context.block_size)),
            capability=transfer.capability,
            on_caught_up=lambda: self._caught_up(request),
            first_held=request.held.first,
        )
        request.leaving = Leaving(transfer, sender, num_kv_tokens)
        sender.advance(num_kv_tokens)

    def successor(self, request: LocalRequest) -> InstanceId | None:
        """Return the instance that goes on after the token that a step has just drawn; None for this one."""
        leaving = request.leaving
        if leaving is None or leaving.sender is None or not leaving.can_freeze:
            return None
        # The step has computed the KV of the token before.
        return leaving.target_id if leaving.sender.has_room_for(len(request.sequence.token_ids)) else None

    def stepped(self, request: LocalRequest, successor: InstanceId | None) -> None:
        """A step has drawn a token more, and named what goes on."""
        leaving = request.leaving
        if leaving is None or leaving.sender is None:
            return
        if successor is not None:
            self._freeze(request, leaving)
        else:
            leaving.sender.advance(len(request.sequence.token_ids) - 1)

    def _caught_up(self, request: LocalRequest) -> None:
        """Little is left to send. One that no step computes now need not wait for a step."""
        leaving = request.leaving
        if leaving is not None and leaving.can_freeze and not request.in_step and not request.doomed:
            self._context.gateways.give_turn(request, leaving.target_id)
            self._freeze(request, leaving)

    def _freeze(self, request: LocalRequest, leaving: Leaving) -> None:
        assert leaving.sender is not None
        token_ids = request.sequence.token_ids
        num_kv_tokens = len(token_ids) - 1
        leaving.is_frozen = True
        self._context.sequences.stop_decoding(request)
        leaving.sender.freeze(
            num_kv_tokens=num_kv_tokens,
            tail=pack_token_ids(token_ids[leaving.num_tokens_told : num_kv_tokens]),
            next_token=FirstToken(token_ids[-1], request.sequence.num_output_tokens - 1),
        )

    # --- it does not leave after all ---

    def cancel(self, command: StopCopy) -> None:
        """Send no more of it, and say whether it goes on here."""
        request = self._context.sequences.get(command.request_id, command.epoch)
        if request is None:
            return  # it ended, or was released: that was told
        leaving = request.leaving
        committed = leaving is not None and leaving.is_of(command.transfer_id) and leaving.committed
        if leaving is not None and leaving.is_of(command.transfer_id) and not committed:
            self._stay(request)
        self._failed(request, command.transfer_id, committed=committed, reason="it was taken back")

    def resume(self, command: Hold) -> None:
        """The target never began: go on here."""
        request = self._context.sequences.get(command.request_id, command.epoch)
        if request is not None and request.leaving is not None and request.leaving.is_of(command.move_id):
            self._stay(request)

    def stay_all(self) -> None:
        """Everything goes on here that has not been committed: the scheduler is to hear of it as decoding."""
        for request in self._context.sequences:
            if request.leaving is not None and not request.leaving.committed:
                self._stay(request)

    def _stay(self, request: LocalRequest) -> None:
        assert request.leaving is not None
        leaving, request.leaving = request.leaving, None
        self._context.mover.cancel(request.request_id, request.epoch)
        if leaving.is_frozen:
            self._context.gateways.give_turn(request, self._context.instance_id)
            self._context.sequences.resume_decoding(request)
            self._context.wake()

    # --- how it went ---

    def sent(self, request: LocalRequest, outcome: SentTransfer) -> None:
        """The target has acknowledged it, and goes on."""
        assert request.leaving is not None
        transfer_id = request.leaving.transfer.transfer_id
        self._context.metrics.transfer_bytes.labels("out").inc(outcome.num_bytes)
        self._context.report(
            MoveSent(
                self._context.instance_id,
                request.request_id,
                request.epoch,
                transfer_id,
                outcome.num_bytes,
                outcome.duration_s,
                outcome.exposed_s,
                outcome.sent_s,
                request.leaving.transfer.destination_ids[0],
                outcome.carrier,
            )
        )
        request.end_trace(DONE)
        self._context.sequences.release(request)

    def failed(self, request: LocalRequest, outcome: FailedTransfer) -> None:
        """Report a move that could not be sent or was not acknowledged; before the commit the request goes on here."""
        leaving = request.leaving
        assert leaving is not None
        self._context.metrics.failed_transfers.labels("out").inc()
        committed, transfer_id = leaving.committed, leaving.transfer.transfer_id
        if committed:
            leaving.stop_sending()
        else:
            self._stay(request)
        self._failed(request, transfer_id, committed=committed, reason=outcome.reason)

    def _failed(self, request: LocalRequest, transfer_id: TransferId, *, committed: bool, reason: str) -> None:
        log.info(
            "a move failed", request_id=request.request_id, epoch=request.epoch, committed=committed, reason=reason
        )
        self._context.report(
            MoveFailed(self._context.instance_id, request.request_id, request.epoch, transfer_id, committed, reason)
        )

    # --- to here ---

    def expect(self, command: PlaceDecode) -> None:
        """Make room for a request that comes with its KV."""
        transfer = command.transfer
        self._context.tables.make_room(command.room)
        try:
            source_addresses = self._context.addresses.of(transfer.source_ids)
            holders = self._context.addresses.holders(command.members)
            request = self._take(command)
        except PdmeshError as error:
            self._intake.refuse(command, error, transfer.transfer_id)
            return
        blocks = transfer.destinations[0].part.blocks
        if blocks.start:
            request.members = command.members
            request.sequence.elsewhere = self._context.mover.parts.open(
                request.request_id,
                request.epoch,
                members=holders,
                num_tokens=blocks.start * request.block_size,
            )
        self._context.mover.arrivals.expect(
            request.request_id,
            request.epoch,
            capability=transfer.capability,
            block_ids=request.sequence.block_table,
            num_context_tokens=None,
            num_present_blocks=request.num_reused_tokens // request.block_size,
            blocks=blocks if blocks.start else None,
            source_addresses=source_addresses,
            hold=lambda blocks: self._hold(request, blocks),
        )
        self._context.report(
            DecodeReserved(self._context.instance_id, request.request_id, request.epoch, transfer.transfer_id)
        )

    def _hold(self, request: LocalRequest, blocks: IndexRange) -> bool:
        """Hold blocks that come in layers with a window; False if there is no room."""
        try:
            self._context.windows.extend(request.held, request.sequence.block_table, blocks)
        except OutOfFrames:
            return False
        return True

    def _take(self, command: PlaceDecode) -> LocalRequest:
        """Take the blocks of a request that nothing else is known of. Raises PdmeshError if that cannot be."""
        num_granules = command.transfer.num_reused_granules
        num_tokens = command.num_blocks * self._context.block_size
        if num_granules * GRANULE_TOKENS >= num_tokens:
            raise ProtocolError(f"room for {num_tokens} tokens, and {num_granules} granules that are there")
        return self._intake.take_unknown(command, command.num_blocks, command.chain, num_granules, Stage.RECEIVING)

    def arrived(self, request: LocalRequest, outcome: LandedTransfer) -> None:
        """Take over the transcript that came with the KV. Raises ProtocolError if it cannot be this request's."""
        generation, token_ids = unpack_transcript(outcome.transcript)
        if (generation.request_id, generation.epoch) != (request.request_id, request.epoch):
            raise ProtocolError(f"the transcript is that of request {generation.request_id}, epoch {generation.epoch}")
        params, num_prompt_tokens = generation.params, generation.num_prompt_tokens
        max_kv_tokens = num_prompt_tokens + params.max_tokens - 1
        check_request(
            generation,
            len(token_ids),
            num_blocks=len(request.context_table),
            max_kv_tokens=max_kv_tokens,
            block_size=self._context.block_size,
            max_model_len=self._context.max_model_len,
        )
        if len(token_ids) >= max_kv_tokens:
            raise ProtocolError("no output tokens are left after the one that comes with the KV")
        request.generation = generation
        request.max_kv_tokens = max_kv_tokens
        request.sequence = EngineSequence(
            request_id=request.request_id,
            params=params,
            token_ids=token_ids,
            num_prompt_tokens=num_prompt_tokens,
            block_table=request.sequence.block_table,
            elsewhere=request.sequence.elsewhere,
        )
