"""KV that comes to an instance, for whichever reason, and how its request continues once all has landed."""

from __future__ import annotations

import structlog

from pdmesh.core.commands import ExpectCopy
from pdmesh.engine.base import EngineSequence
from pdmesh.errors import ProtocolError
from pdmesh.instance.effects import CopyFailed, CopyLanded
from pdmesh.instance.sequence_phases import SeqPhase
from pdmesh.kv.copy_in import Expected
from pdmesh.kv.frames import OutOfFrames
from pdmesh.kv.offload.copies import KvLoad
from pdmesh.kv.outcome import LandedTransfer
from pdmesh.kv.transcript import unpack_transcript
from pdmesh.kv_layout import GRANULE_TOKENS, IndexRange
from pdmesh.model import PartMember, Then
from pdmesh.worker.context import InstanceContext
from pdmesh.worker.growth import RoomGrowth
from pdmesh.worker.intake import Intake, check_request
from pdmesh.worker.recomputing import RecomputedRanges
from pdmesh.worker.sequences import LocalRequest
from pdmesh.worker.spans import FAILED, trace_of

log = structlog.get_logger()


class Arrivals:
    """Receiving side of all copies to an instance."""

    def __init__(
        self, context: InstanceContext, *, intake: Intake, growth: RoomGrowth, lost_ranges: RecomputedRanges
    ) -> None:
        self._context = context
        self._intake = intake
        self._growth = growth
        self._lost_ranges = lost_ranges

    def expect(self, request: LocalRequest, command: ExpectCopy) -> None:
        """Open the receiving side of a copy, or load granules from the offload tier.

        For a lost range, the source sends only tokens, to be computed here.
        """
        transfer, state, mover = command.transfer, request.state, self._context.mover
        if command.num_loaded_granules:
            self._intake.load(request, self._loaded)
            return
        place = transfer.destination_ids.index(command.instance_id)
        blocks = transfer.destinations[place].part.blocks
        num_context_tokens: int | None = len(request.sequence.token_ids)
        members = state.members
        if transfer.then is Then.KEEP:
            num_context_tokens = len(command.chain) * GRANULE_TOKENS
        elif state.is_range:
            members = command.members
            num_context_tokens = blocks.stop * self._context.block_size
            if transfer.is_hand_over:
                num_context_tokens = self._intake.check_prompt(command).num_context_tokens
            self._hold_range(request, command, blocks)
        elif transfer.is_move:
            num_context_tokens = None
        if members:
            self._ask(request, members, blocks.start * self._context.block_size)
        if transfer.computes:
            return
        expected: Expected = {
            "capability": transfer.capability,
            "block_ids": request.sequence.block_table,
            "num_context_tokens": num_context_tokens,
            "num_present_blocks": request.num_reused_tokens // request.block_size,
            "blocks": blocks if blocks.start or state.is_range else None,
            "source_addresses": self._context.addresses.of(transfer.source_ids),
            "destination": place,
            "draws": not state.is_range and transfer.then is not Then.KEEP,
        }
        if transfer.is_move:
            expected["hold"] = lambda blocks: self._hold(request, blocks)
        mover.arrivals.expect(request.request_id, request.epoch, **expected)

    def _loaded(self, request: LocalRequest, load: KvLoad) -> None:
        """Cache granules that were loaded from the offload tier, or fail. A released request is ignored."""
        if request.is_released:
            return
        request.load = None
        key = request.state.key
        failed = None if load.aborted is None else CopyFailed(key, None, load.aborted)
        self._context.hear(request, failed or CopyLanded(key, 0, 0, 0.0))

    def _hold_range(self, request: LocalRequest, command: ExpectCopy, blocks: IndexRange) -> None:
        """Register a range, for which this instance answers once the KV has landed."""
        transfer = command.transfer
        (home_address,) = self._context.addresses.of([command.home_id or transfer.destination_ids[0]])
        is_lost = transfer.computes
        self._context.mover.parts.hold(
            request.request_id,
            request.epoch,
            capability=transfer.capability,
            block_ids=request.sequence.block_table,
            home_address=home_address,
            member=blocks.start // blocks.size,
            lost=self._lost_ranges.tokens_of(request, blocks.size * request.block_size) if is_lost else None,
        )

    def _ask(self, request: LocalRequest, members: tuple[PartMember, ...], num_tokens: int) -> None:
        """Let the request's steps ask the holders of the first ``num_tokens``."""
        request.sequence.elsewhere = self._context.mover.parts.open(
            request.request_id, request.epoch, members=self._context.addresses.holders(members), num_tokens=num_tokens
        )

    def _hold(self, request: LocalRequest, blocks: IndexRange) -> bool:
        """Hold frames for coming blocks of layers with a window; return False if there is no room."""
        try:
            self._context.windows.extend(request.held, request.sequence.block_table, blocks)
        except OutOfFrames:
            return False
        return True

    def landed(self, request: LocalRequest, outcome: LandedTransfer) -> None:
        """Use the KV that has landed: decode, answer for a range, or cache granules. Ignored if no copy is expected.

        A wrong transcript or first token fails the copy.
        """
        transfer = request.state.incoming
        if transfer is None or request.phase is not SeqPhase.EXPECTED:
            return
        metrics, num_tokens = self._context.metrics, 0
        is_cached = transfer.then is Then.KEEP
        if is_cached:
            metrics.fetched_bytes.inc(outcome.num_bytes)
            metrics.fetched_tokens.inc(len(request.chain) * GRANULE_TOKENS - request.num_reused_tokens)
        elif request.state.is_range:
            self._context.mover.parts.landed(request.request_id, request.epoch)
        else:
            try:
                self._check(request, outcome)
            except ProtocolError as error:
                self.failed(request, str(error))
                return
            num_tokens = len(request.sequence.token_ids)
        metrics.transfer_bytes.labels("in").inc(outcome.num_bytes)
        landed = CopyLanded(request.state.key, num_tokens, outcome.num_bytes, outcome.duration_s)
        self._context.hear(request, landed)
        if request.state.is_decoding and outcome.token_id is not None:
            request.sequence.token_ids.append(outcome.token_id)
            self._growth.tell([request])

    def _check(self, request: LocalRequest, outcome: LandedTransfer) -> None:
        """Take over the transcript, if any. Raises ProtocolError if it is wrong, or if the next token did not come."""
        if outcome.transcript:
            self._take_transcript(request, outcome.transcript)
            self._context.gateways.open(request)
            request.trace = trace_of(self._context.tracing, request.generation, self._context.instance_id)
        if outcome.token_id is None or outcome.token_index != request.sequence.num_output_tokens:
            raise ProtocolError(f"the first token came with index {outcome.token_index}")

    def _take_transcript(self, request: LocalRequest, packed: bytes) -> None:
        """Take over the transcript that came with the KV. Raises ProtocolError if it does not fit the request."""
        generation, token_ids = unpack_transcript(packed)
        if (generation.request_id, generation.epoch) != request.state.key:
            raise ProtocolError(f"the transcript belongs to request {generation.request_id}, epoch {generation.epoch}")
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
        """Report a copy that did not arrive completely. Does nothing if the request expects none."""
        if request.phase is not SeqPhase.EXPECTED:
            return
        self._context.metrics.failed_transfers.labels("in").inc()
        log.info("copy did not arrive", request_id=request.request_id, epoch=request.epoch, reason=reason)
        request.end_trace(FAILED)
        self._context.hear(request, CopyFailed(request.state.key, None, reason))
