"""The work of one step, made from a plan and the residents."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from pdmesh.engine.base import LayerHook, SequenceSlice
from pdmesh.kv.blocks import BlockGuard
from pdmesh.kv.exchange import KvExchange
from pdmesh.kv.gate import Gate
from pdmesh.kv.offload.copies import KvLoad
from pdmesh.kv.pages import Blocks
from pdmesh.kv_layout import num_blocks_for
from pdmesh.plans import ChunkPlan, StepPlan
from pdmesh.policy.pacing import ChunkPace
from pdmesh.worker.sequences import LocalRequest


@dataclass(frozen=True, slots=True)
class BatchChunk:
    """A chunk that is about to be computed, and its request on this instance.

    ``number``: index among the chunks of the request.
    ``exchange``: set if the chunk began as a group's.
    ``load``: set if earlier KV was on its way from the offload tier when the chunk began.
    """

    request: LocalRequest
    plan: ChunkPlan
    number: int
    exchange: KvExchange | None = None
    load: KvLoad | None = None

    @property
    def gates(self) -> list[Gate]:
        """Gates at which the chunk may wait, in each layer, for earlier KV."""
        gates: list[Gate] = []
        if self.load is not None:
            gates.append(self.load)
        if self.exchange is not None and self.plan.start > 0:
            gates.append(self.exchange.gate)
        return gates

    @property
    def aborted(self) -> str | None:
        """Reason why awaited KV will not come; None while it may still come."""
        return next((gate.aborted for gate in self.gates if gate.aborted is not None), None)

    def slice(self) -> SequenceSlice:
        return SequenceSlice(
            sequence=self.request.sequence,
            start=self.plan.start,
            num_tokens=self.plan.num_tokens,
            sample=self.plan.is_last,
            prompt_logprobs=self.request.sequence.params.prompt_logprobs is not None,
        )

    def completed_blocks(self, block_size: int) -> tuple[int, int]:
        """Return (first, count) of the blocks that this chunk fills; a last chunk's partial block counts as full."""
        first = self.plan.start // block_size
        end = self.plan.start + self.plan.num_tokens
        last = -(-end // block_size) if self.plan.is_last else end // block_size
        return first, last - first

    def begun_blocks(self, block_size: int) -> tuple[int, int]:
        """Return (first, count) of the blocks into which this chunk writes first."""
        first = num_blocks_for(self.plan.start, block_size)
        return first, num_blocks_for(self.plan.start + self.plan.num_tokens, block_size) - first


@dataclass(frozen=True, slots=True)
class BatchDecode:
    """A decode that is about to be computed: the next token, and further ones if the ``draft`` is right."""

    request: LocalRequest
    draft: tuple[int, ...] = ()

    def slice(self) -> SequenceSlice:
        return SequenceSlice(
            sequence=self.request.sequence,
            start=len(self.request.sequence.token_ids) - 1,
            num_tokens=self.num_tokens,
            sample=True,
            draft=self.draft,
        )

    @property
    def num_tokens(self) -> int:
        """Number of tokens to compute: the last one, and the draft."""
        return 1 + len(self.draft)


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """The work that the engine executes next. ``chunks`` come first in ``slices``, then ``decodes``.

    ``plan`` is None for a step of the instance's own. ``guards`` are copies that must end before the batch is computed.
    """

    plan: StepPlan | None
    chunks: tuple[BatchChunk, ...]
    decodes: tuple[BatchDecode, ...]
    guards: tuple[BlockGuard, ...] = ()

    @property
    def slices(self) -> list[SequenceSlice]:
        return [chunk.slice() for chunk in self.chunks] + [decode.slice() for decode in self.decodes]

    @property
    def num_decode_tokens(self) -> int:
        """Number of tokens to compute for decodes; a drafted token costs as much as a decode."""
        return sum([decode.num_tokens for decode in self.decodes])

    @property
    def num_decode_context_tokens(self) -> int:
        """Sum of the context lengths of these tokens; valid until new tokens are appended."""
        return sum([len(decode.request.sequence.token_ids) * decode.num_tokens for decode in self.decodes])

    @property
    def pace(self) -> ChunkPace:
        """Pace at which other members need the KV of the batch's group chunk, if any."""
        if self.plan is None or not self.plan.in_parallel:
            return ChunkPace.IN_TURN
        return ChunkPace.AT_ONCE if self.plan.at_once else ChunkPace.IN_PARALLEL

    @property
    def waiting(self) -> list[BatchChunk]:
        """Chunks that may wait for KV that other members of a group compute, or that is being loaded."""
        return [chunk for chunk in self.chunks if chunk.gates]

    @property
    def may_begin_again(self) -> bool:
        """Whether chunks may be computed again, because a row of the batch needs answers of other instances."""
        rows: list[BatchChunk | BatchDecode] = [*self.chunks, *self.decodes]
        return bool(self.chunks) and any(row.request.sequence.elsewhere is not None for row in rows)

    def on_layer(self, block_size: int, ended: Collection[BatchChunk]) -> LayerHook | None:
        """Return a hook that reports complete blocks of a layer to senders and groups, on the engine's thread.

        The hook skips chunks that have ``ended`` by then, since they are computed without the earlier KV. Returns None
        if no sender and no group needs the chunks.
        """
        moving: list[tuple[BatchChunk, int, int]] = []
        for chunk in self.chunks:
            first, count = chunk.completed_blocks(block_size)
            if count and (chunk.request.sender is not None or chunk.exchange is not None):
                moving.append((chunk, first, count))
        if not moving:
            return None
        pace = self.pace

        def layer_done(layer: int) -> None:
            for chunk, first, count in moving:
                if chunk in ended:
                    continue
                request, number = chunk.request, chunk.number
                if chunk.exchange is not None and not chunk.plan.is_last:
                    # The exchange also informs the sender.
                    chunk.exchange.publish(Blocks(number, layer, first, count), pace)
                elif request.sender is not None:
                    request.sender.blocks_ready(chunk=number, layer=layer, first_block=first, num_blocks=count)

        return layer_done
