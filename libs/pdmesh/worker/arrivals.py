"""KV that comes to an instance: the blocks for it, and how a request continues once all has landed.

There are three kinds: the KV of a prompt, of a running decode with its transcript, and of granules that are cached.
"""

from __future__ import annotations

import array

import structlog

from pdmesh.core.commands import FetchKept, PlaceDecode
from pdmesh.core.events import DecodeReserved
from pdmesh.engine.base import EngineSequence
from pdmesh.errors import PdmeshError, ProtocolError
from pdmesh.instance.copy_state import Then, then_of
from pdmesh.instance.effects import CopyFailed, CopyLanded
from pdmesh.instance.sequence_phases import SeqPhase
from pdmesh.kv.frames import OutOfFrames
from pdmesh.kv.outcome import LandedTransfer
from pdmesh.kv.transcript import unpack_transcript
from pdmesh.model import GRANULE_TOKENS, IndexRange, PartMember, blocks_of_granule
from pdmesh.wire.messages import Prompt, unpack_token_ids
from pdmesh.worker.context import InstanceContext
from pdmesh.worker.growth import RoomGrowth
from pdmesh.worker.intake import Intake, check_prompt, check_request, transcript
from pdmesh.worker.leaving_kv import LeavingCopies
from pdmesh.worker.sequences import LocalRequest
from pdmesh.worker.spans import FAILED, trace_of
from pdmesh.worker.spread import SpreadContexts

log = structlog.get_logger()


class Arrivals:
    """What an instance receives."""

    def __init__(
        self,
        context: InstanceContext,
        *,
        intake: Intake,
        copies: LeavingCopies,
        growth: RoomGrowth,
        spread: SpreadContexts,
    ) -> None:
        self._context = context
        self._intake = intake
        self._spread = spread
        self._copies = copies
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
                incoming=transfer,
                members=tuple(members),
            )
        except PdmeshError as error:
            self._intake.refuse(command, error, transfer.transfer_id)
            return
        if blocks.start:
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
        self._reserved(request)

    def expect_move(self, command: PlaceDecode) -> None:
        """Make room for a request that comes with its KV."""
        transfer, num_granules = command.transfer, command.transfer.num_reused_granules
        blocks = transfer.destinations[0].part.blocks
        num_tokens = command.num_blocks * self._context.block_size
        self._context.tables.make_room(command.room)
        try:
            source_addresses = self._context.addresses.of(transfer.source_ids)
            holders = self._context.addresses.holders(command.members)
            if num_granules * GRANULE_TOKENS >= num_tokens:
                raise ProtocolError(f"room for {num_tokens} tokens, and {num_granules} granules that are there")
            request = self._intake.take_unknown(
                command,
                command.num_blocks,
                command.chain,
                num_granules,
                SeqPhase.EXPECTED,
                members=command.members if blocks.start else (),
            )
        except PdmeshError as error:
            self._intake.refuse(command, error, transfer.transfer_id)
            return
        if blocks.start:
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
        self._reserved(request)

    def _hold(self, request: LocalRequest, blocks: IndexRange) -> bool:
        """Hold blocks that come in layers with a window; False if there is no room."""
        try:
            self._context.windows.extend(request.held, request.sequence.block_table, blocks)
        except OutOfFrames:
            return False
        return True

    def fetch(self, command: FetchKept) -> None:
        """Make room for granules that another instance has cached, and expect them."""
        transfer, num_granules = command.transfer, len(command.chain)
        num_blocks = num_granules * blocks_of_granule(self._context.block_size)
        self._context.tables.make_room(command.room)
        try:
            source_addresses = self._context.addresses.of(transfer.source_ids)
            if transfer.num_reused_granules >= num_granules:
                raise ProtocolError(
                    f"{transfer.num_reused_granules} of {num_granules} granules that are to come are there"
                )
            request = self._intake.take_unknown(
                command,
                num_blocks,
                command.chain,
                transfer.num_reused_granules,
                SeqPhase.EXPECTED,
                num_coming_tokens=num_granules * GRANULE_TOKENS,
            )
        except PdmeshError as error:
            self._intake.refuse(command, error, transfer.transfer_id)
            return
        self._context.mover.arrivals.expect(
            request.request_id,
            request.epoch,
            capability=transfer.capability,
            block_ids=request.sequence.block_table,
            num_context_tokens=num_granules * GRANULE_TOKENS,
            num_present_blocks=request.num_reused_tokens // request.block_size,
            source_addresses=source_addresses,
            draws=False,
        )
        self._reserved(request)

    def _reserved(self, request: LocalRequest) -> None:
        self._context.report(DecodeReserved(self._context.instance_id, *request.state.key, request.state.received_by))

    def landed(self, request: LocalRequest, outcome: LandedTransfer) -> None:
        """Use the KV that has landed: decode, answer for a range, or cache granules."""
        transfer = request.state.incoming
        if transfer is None or request.phase is not SeqPhase.EXPECTED:
            return
        metrics, num_tokens = self._context.metrics, 0
        is_cached = then_of(transfer) is Then.KEEP
        if is_cached:
            metrics.fetched_bytes.inc(outcome.num_bytes)
            metrics.fetched_tokens.inc(len(request.chain) * GRANULE_TOKENS - request.num_reused_tokens)
        elif request.state.is_range:
            self._context.mover.parts.landed(request.request_id, request.epoch)
        else:
            try:
                self._check(request, outcome)
            except ProtocolError as error:
                self._context.endings.fail_to_receive(request, transfer.transfer_id, str(error))
                return
            num_tokens = len(request.sequence.token_ids)
        metrics.transfer_bytes.labels("in").inc(outcome.num_bytes)
        landed = CopyLanded(request.state.key, num_tokens, outcome.num_bytes, outcome.duration_s)
        self._copies.hear(request, landed)
        if request.state.is_decoding and outcome.token_id is not None:
            request.sequence.token_ids.append(outcome.token_id)
            self._growth.tell([request])

    def _check(self, request: LocalRequest, outcome: LandedTransfer) -> None:
        """Take over the transcript, if one came. Raises ProtocolError if the token that came is not the next one."""
        if outcome.transcript:
            self._take_transcript(request, outcome.transcript)
            self._context.gateways.open(request)
            request.trace = trace_of(self._context.tracing, request.generation, self._context.instance_id)
        if outcome.token_id is None or outcome.token_index != request.sequence.num_output_tokens:
            raise ProtocolError(f"the first token came with index {outcome.token_index}")

    def _take_transcript(self, request: LocalRequest, packed: bytes) -> None:
        """Take over the transcript that came with the KV. Raises ProtocolError if it cannot be this request's."""
        generation, token_ids = unpack_transcript(packed)
        if (generation.request_id, generation.epoch) != request.state.key:
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

    def failed(self, request: LocalRequest, reason: str) -> None:
        """Report a copy that did not arrive, or not whole."""
        if request.phase is not SeqPhase.EXPECTED:
            return
        self._context.metrics.failed_transfers.labels("in").inc()
        log.info("a copy did not arrive", request_id=request.request_id, epoch=request.epoch, reason=reason)
        request.end_trace(FAILED)
        self._copies.hear(request, CopyFailed(request.state.key, None, reason))


def stand_in(num_tokens: int, tail: bytes, max_model_len: int) -> array.array[int]:
    """Return a prompt that sampling does not look at: zeros, but for the packed tokens behind its last full granule.

    Raises ProtocolError if these are not.
    """
    if len(tail) % 4 or len(tail) > 4 * min(num_tokens, GRANULE_TOKENS):
        raise ProtocolError(f"a prompt of {num_tokens} tokens that ends in {len(tail)} bytes")
    num_zeros = min(max(0, num_tokens - len(tail) // 4), max_model_len)
    return array.array("i", bytes(4 * num_zeros)) + unpack_token_ids(tail)
