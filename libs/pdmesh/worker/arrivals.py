"""KV that comes to an instance to be decoded there: the room for it, and how the request begins once all has landed."""

from __future__ import annotations

import array

from pdmesh.core.commands import PlaceDecode
from pdmesh.core.events import DecodeReserved, TransferLanded
from pdmesh.errors import PdmeshError, ProtocolError
from pdmesh.kv.outcome import LandedTransfer
from pdmesh.model import GRANULE_TOKENS, PartMember, TransferId
from pdmesh.wire.messages import Prompt, unpack_token_ids
from pdmesh.worker.context import InstanceContext
from pdmesh.worker.growth import RoomGrowth
from pdmesh.worker.intake import Intake, check_prompt, transcript
from pdmesh.worker.moves import MovingDecodes
from pdmesh.worker.sequences import LocalRequest, Stage
from pdmesh.worker.spans import trace_of
from pdmesh.worker.spread import SpreadContexts


class Arrivals:
    """What an instance receives."""

    def __init__(
        self,
        context: InstanceContext,
        *,
        intake: Intake,
        moves: MovingDecodes,
        growth: RoomGrowth,
        spread: SpreadContexts,
    ) -> None:
        self._context = context
        self._intake = intake
        self._spread = spread
        self._moves = moves
        self._growth = growth

    def expect(self, command: PlaceDecode, prompt: Prompt | None) -> None:
        """Make room for a request whose prompt others compute."""
        transfer = command.transfer
        self._context.tables.make_room(command.room)
        if not command.receives_prompt:
            self._spread.expect_hand_over(command, prompt)
            return
        blocks = transfer.destinations[0].part.blocks
        try:
            source_addresses = self._context.addresses.of(transfer.source_ids)
            members = [
                PartMember(instance_id=instance_id, capability=transfer.capability)
                for instance_id in transfer.destination_ids[1:]
            ]
            holders = self._context.addresses.holders(members)
            prompt = check_prompt(command, prompt)
            generation, num_context_tokens = prompt.generation, prompt.num_context_tokens
            if generation.token_ids:
                token_ids = transcript(generation)
            else:
                token_ids = stand_in(num_context_tokens, prompt.tail, self._context.max_model_len)
            if len(token_ids) != num_context_tokens:
                raise ProtocolError(f"{num_context_tokens} tokens of KV for a transcript of {len(token_ids)}")
            max_tokens_left = generation.params.max_tokens - (num_context_tokens - generation.num_prompt_tokens)
            max_kv_tokens = num_context_tokens + max_tokens_left - 1
            request = self._intake.take(
                generation,
                token_ids,
                command.num_blocks,
                max_kv_tokens,
                num_reused_granules=transfer.num_reused_granules,
                num_elsewhere_tokens=blocks.start * self._context.block_size,
                num_coming_tokens=num_context_tokens,
            )
        except PdmeshError as error:
            self._intake.refuse(command, error, transfer.transfer_id)
            return
        request.stage = Stage.RECEIVING
        request.transfer, request.received_by = transfer, transfer.transfer_id
        if blocks.start:
            request.members = tuple(members)
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
            num_context_tokens=num_context_tokens,
            num_present_blocks=request.num_reused_tokens // request.block_size,
            blocks=blocks if blocks.start else None,
            source_addresses=source_addresses,
        )
        self._reserved(request, transfer.transfer_id)

    def _reserved(self, request: LocalRequest, transfer_id: TransferId) -> None:
        self._context.report(DecodeReserved(self._context.instance_id, request.request_id, request.epoch, transfer_id))

    def landed(self, request: LocalRequest, transfer_id: TransferId, outcome: LandedTransfer) -> None:
        """All of it is in place: decode on from the token that came with it, or answer who decodes elsewhere."""
        if request.stage is Stage.HOLDING:
            self._context.metrics.transfer_bytes.labels("in").inc(outcome.num_bytes)
            self._context.mover.parts.landed(request.request_id, request.epoch)
            self._landed(request, transfer_id, outcome)
            return
        if outcome.transcript:
            try:
                self._moves.arrived(request, outcome)
            except ProtocolError as error:
                self._context.endings.fail_to_receive(request, transfer_id, str(error))
                return
            self._context.gateways.open(request)
            request.trace = trace_of(self._context.tracing, request.generation, self._context.instance_id)
        if outcome.token_id is None or outcome.token_index != request.sequence.num_output_tokens:
            reason = f"the first token came with index {outcome.token_index}"
            self._context.endings.fail_to_receive(request, transfer_id, reason)
            return
        self._context.metrics.transfer_bytes.labels("in").inc(outcome.num_bytes)
        self._context.tables.keep_prompt(request, len(request.sequence.token_ids))
        request.sequence.token_ids.append(outcome.token_id)
        self._context.sequences.start_decoding(request)
        self._landed(request, transfer_id, outcome)
        self._growth.tell([request])
        self._context.wake()

    def _landed(self, request: LocalRequest, transfer_id: TransferId, outcome: LandedTransfer) -> None:
        self._context.report(
            TransferLanded(
                self._context.instance_id,
                request.request_id,
                request.epoch,
                transfer_id,
                outcome.num_bytes,
                outcome.duration_s,
            )
        )

    def failed(self, request: LocalRequest, transfer_id: TransferId, reason: str) -> None:
        """Report a transfer that did not arrive, or not whole."""
        self._context.metrics.failed_transfers.labels("in").inc()
        self._context.endings.fail_to_receive(request, transfer_id, reason)


def stand_in(num_tokens: int, tail: bytes, max_model_len: int) -> array.array[int]:
    """Return a prompt that sampling does not look at: zeros, but for the packed tokens behind its last full granule.

    Raises ProtocolError if these are not.
    """
    if len(tail) % 4 or len(tail) > 4 * min(num_tokens, GRANULE_TOKENS):
        raise ProtocolError(f"a prompt of {num_tokens} tokens that ends in {len(tail)} bytes")
    num_zeros = min(max(0, num_tokens - len(tail) // 4), max_model_len)
    return array.array("i", bytes(4 * num_zeros)) + unpack_token_ids(tail)
