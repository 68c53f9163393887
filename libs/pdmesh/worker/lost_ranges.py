"""Ranges of spread contexts that were lost, and are computed again here, for the context to decode on elsewhere.

The tokens come from where the context decodes. They are computed as chunks of a prompt would be, beside the decodes
that are here, and attend to the ranges before them where those are. Who has a range computed is then its member.
"""

from __future__ import annotations

import array
from collections import deque
from time import perf_counter

import structlog

from pdmesh.core.commands import PlaceDecode
from pdmesh.core.events import DecodeReserved
from pdmesh.engine.base import EngineSequence
from pdmesh.errors import PdmeshError
from pdmesh.instance.copy_state import range_at
from pdmesh.instance.effects import CopyLanded
from pdmesh.instance.sequence_phases import SeqPhase
from pdmesh.kv.parts import LostTokens
from pdmesh.plans import ChunkPlan
from pdmesh.wire.messages import unpack_token_ids
from pdmesh.worker.batch import BatchChunk
from pdmesh.worker.context import InstanceContext
from pdmesh.worker.intake import Intake
from pdmesh.worker.leaving_kv import LeavingCopies
from pdmesh.worker.sequences import LocalRequest

log = structlog.get_logger()

#: Tokens in a step. Members answer so many rows at once, in fp32: 128 rows of 32 heads of 128 are 2 MiB.
CHUNK_TOKENS = 128


class LostRanges:
    """Those whose tokens have come, oldest first, and those whose tokens are to come."""

    def __init__(self, context: InstanceContext, *, copies: LeavingCopies) -> None:
        self._context = context
        self._copies = copies
        self._due: deque[LocalRequest] = deque()
        self._began_s: dict[LocalRequest, float] = {}

    def expect(self, command: PlaceDecode, intake: Intake) -> None:
        """Make room for a range of a context that decodes elsewhere."""
        transfer = command.transfer
        blocks = transfer.destinations[0].part.blocks
        try:
            (home_address,) = self._context.addresses.of([command.home_id or transfer.destination_ids[0]])
            members = self._context.addresses.holders(command.members)
            part = range_at(transfer, command.instance_id)
            request = intake.take_unknown(command, command.num_blocks, (), 0, SeqPhase.EXPECTED, part=part)
        except PdmeshError as error:
            intake.refuse(command, error, transfer.transfer_id)
            return
        parts, num_tokens = self._context.mover.parts, blocks.size * request.block_size
        parts.hold(
            request.request_id,
            request.epoch,
            capability=transfer.capability,
            block_ids=request.sequence.block_table,
            home_address=home_address,
            member=blocks.start // blocks.size,
            lost=LostTokens(
                4 * num_tokens,
                on_all=lambda tokens, num_prompt_tokens: self._begin(request, tokens, num_prompt_tokens),
                on_failure=lambda reason: self._fail(request, reason),
            ),
        )
        if members:
            request.sequence.elsewhere = parts.open(
                request.request_id, request.epoch, members=members, num_tokens=blocks.start * request.block_size
            )
        self._context.report(
            DecodeReserved(self._context.instance_id, request.request_id, request.epoch, transfer.transfer_id)
        )

    def _begin(self, request: LocalRequest, tokens: bytes, num_prompt_tokens: int) -> None:
        """Compute them from the next step on."""
        if request.is_released:
            return
        first = request.sequence.num_elsewhere_tokens
        request.sequence = EngineSequence(
            request_id=request.request_id,
            params=request.sequence.params,
            token_ids=array.array("i", bytes(4 * first)) + unpack_token_ids(tokens),
            num_prompt_tokens=num_prompt_tokens,
            block_table=request.sequence.block_table,
            elsewhere=request.sequence.elsewhere,
        )
        request.state.compute(first)
        self._began_s[request] = perf_counter()
        self._due.append(request)
        self._context.wake()

    # --- steps ---

    @property
    def has_chunk(self) -> bool:
        """Whether a step could compute some of one."""
        while self._due and self._due[0].is_released:
            self._began_s.pop(self._due.popleft(), None)
        return bool(self._due) and not self._due[0].in_step

    def next_chunk(self) -> BatchChunk:
        """Make the next tokens part of the step that begins now."""
        request = self._due[0]
        start, end = request.num_computed_tokens, len(request.sequence.token_ids)
        num_tokens = min(CHUNK_TOKENS, end - start)
        request.num_chunks += 1
        request.num_steps += 1
        plan = ChunkPlan(
            request_id=request.request_id, epoch=request.epoch, start=start, num_tokens=num_tokens, is_last=False
        )
        return BatchChunk(request, plan, request.num_chunks - 1)

    def ended(self, chunk: BatchChunk, *, is_computed: bool) -> None:
        """A step has ended that was to compute these; with the last of them answer who asks for the range."""
        request = chunk.request
        if not is_computed:
            self._end(request)
            self._fail(request, "another instance that holds KV before it does not answer")
            return
        request.state.compute(request.num_computed_tokens + chunk.plan.num_tokens)
        self._context.metrics.recomputed_tokens.inc(chunk.plan.num_tokens)
        num_tokens = len(request.sequence.token_ids)
        if request.num_computed_tokens < num_tokens:
            return
        duration_s = perf_counter() - self._end(request)
        first = request.sequence.num_elsewhere_tokens
        request.sequence.elsewhere = None
        request.sequence.token_ids = array.array("i")
        parts = self._context.mover.parts
        parts.close(request.request_id, request.epoch)
        parts.landed(request.request_id, request.epoch)
        landed = CopyLanded(request.state.key, num_tokens, 4 * (num_tokens - first), duration_s)
        self._copies.hear(request, landed)

    def _fail(self, request: LocalRequest, reason: str) -> None:
        if not request.is_released:
            self._context.endings.fail_to_receive(request, request.state.received_by, reason)

    def _end(self, request: LocalRequest) -> float:
        """Return when it began, seconds."""
        self._due.remove(request)
        return self._began_s.pop(request)
