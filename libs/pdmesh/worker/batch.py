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
from pdmesh.model import num_blocks_for
from pdmesh.plans import ChunkPlan, StepPlan
from pdmesh.policy.pacing import ChunkPace
from pdmesh.worker.sequences import LocalRequest


@dataclass(frozen=True, slots=True)
class BatchChunk:
    """A chunk that is about to be computed, with what the instance holds of its request."""

    request: LocalRequest
    plan: ChunkPlan
    number: int  # of the request's chunks
    exchange: KvExchange | None = None  # set if it began as a group's
    load: KvLoad | None = None  # set if KV before it was on its way from the offload tier as it began

    @property
    def gates(self) -> list[Gate]:
        """Where it may have to wait, in each layer, for the KV before it."""
        gates: list[Gate] = []
        if self.load is not None:
            gates.append(self.load)
        if self.exchange is not None and self.plan.start > 0:
            gates.append(self.exchange.gate)
        return gates

    @property
    def aborted(self) -> str | None:
        """Why nothing of that comes any more; None as long as it may."""
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
        """Return (first, count) of the blocks that this chunk is the first to write into."""
        first = num_blocks_for(self.plan.start, block_size)
        return first, num_blocks_for(self.plan.start + self.plan.num_tokens, block_size) - first


@dataclass(frozen=True, slots=True)
class BatchDecode:
    """A resident's next token that is about to be drawn, and those after it that its ``draft`` gets right."""

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
        """Tokens that are computed: the last one, and the draft."""
        return 1 + len(self.draft)


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """The work that the engine executes next. ``chunks`` come first in ``slices``, then ``decodes``."""

    plan: StepPlan | None  # None: a decode step of the instance's own
    chunks: tuple[BatchChunk, ...]
    decodes: tuple[BatchDecode, ...]
    guards: tuple[BlockGuard, ...] = ()  # copies that must have ended before it is computed

    @property
    def slices(self) -> list[SequenceSlice]:
        return [chunk.slice() for chunk in self.chunks] + [decode.slice() for decode in self.decodes]

    @property
    def num_decode_tokens(self) -> int:
        """Tokens that are computed of decodes: each costs what a decode does."""
        return sum([decode.num_tokens for decode in self.decodes])

    @property
    def num_decode_context_tokens(self) -> int:
        """Sum of the tokens that each of these attends to; valid until new tokens are appended."""
        return sum([len(decode.request.sequence.token_ids) * decode.num_tokens for decode in self.decodes])

    @property
    def pace(self) -> ChunkPace:
        """Pace at which other members need the KV of the batch's group chunk, if it has one."""
        if self.plan is None or not self.plan.in_parallel:
            return ChunkPace.IN_TURN
        return ChunkPace.AT_ONCE if self.plan.at_once else ChunkPace.IN_PARALLEL

    @property
    def waiting(self) -> list[BatchChunk]:
        """Chunks that may have to wait for KV: other members of their groups compute it, or it is being loaded."""
        return [chunk for chunk in self.chunks if chunk.gates]

    @property
    def may_begin_again(self) -> bool:
        """Whether chunks may be computed again, because other instances give no answer about a row beside them."""
        rows: list[BatchChunk | BatchDecode] = [*self.chunks, *self.decodes]
        return bool(self.chunks) and any(row.request.sequence.elsewhere is not None for row in rows)

    def on_layer(self, block_size: int, ended: Collection[BatchChunk]) -> LayerHook | None:
        """Return a hook that tells senders and groups, on the engine's thread, which blocks of a layer are complete.

        The hook leaves out chunks that have ``ended`` by then: they go on without the KV before them.
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
                if chunk.exchange is not None and not chunk.plan.is_last:  # which tells the sender, too
                    chunk.exchange.publish(Blocks(number, layer, first, count), pace)
                elif request.sender is not None:
                    request.sender.blocks_ready(chunk=number, layer=layer, first_block=first, num_blocks=count)

        return layer_done
