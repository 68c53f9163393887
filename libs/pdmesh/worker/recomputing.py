"""Lost ranges of spread contexts that this instance computes again.

The instance on which the context decodes sends the tokens. The tokens are computed like chunks of a prompt, beside the
decodes here, and attend to the earlier ranges on other instances. After the last chunk this instance holds the range.
"""

from __future__ import annotations

import array
from time import perf_counter

from pdmesh.engine.base import EngineSequence
from pdmesh.instance.effects import CopyFailed, CopyLanded
from pdmesh.instance.lost_ranges import LostRanges
from pdmesh.kv.parts import LostTokens
from pdmesh.wire.messages import unpack_token_ids
from pdmesh.worker.batch import BatchChunk
from pdmesh.worker.context import InstanceContext
from pdmesh.worker.sequences import LocalRequest


class RecomputedRanges:
    """The lost ranges that an instance computes again, or whose tokens have not come yet."""

    def __init__(self, context: InstanceContext, ranges: LostRanges) -> None:
        self._context = context
        self._ranges = ranges

    def tokens_of(self, request: LocalRequest, num_tokens: int) -> LostTokens:
        """Return the receiver for the ``num_tokens`` of a range."""
        return LostTokens(
            4 * num_tokens,
            on_all=lambda tokens, num_prompt_tokens: self._begin(request, tokens, num_prompt_tokens),
            on_failure=lambda reason: self._fail(request, reason),
        )

    def _begin(self, request: LocalRequest, tokens: bytes, num_prompt_tokens: int) -> None:
        """Compute the tokens from the next step on. A released request is ignored."""
        if request.is_released:
            return
        first = request.sequence.num_remote_tokens
        request.sequence = EngineSequence(
            request_id=request.request_id,
            params=request.sequence.params,
            token_ids=array.array("i", bytes(4 * first)) + unpack_token_ids(tokens),
            num_prompt_tokens=num_prompt_tokens,
            block_table=request.sequence.block_table,
            elsewhere=request.sequence.elsewhere,
        )
        request.began_s = perf_counter()
        self._ranges.begin(request.state, first, len(request.sequence.token_ids))
        self._context.wake()

    def ended(self, chunk: BatchChunk, *, is_computed: bool) -> None:
        """Handle the end of a chunk. If it was not computed, fail the copy.

        After the last one, begin to answer for the range.
        """
        request = chunk.request
        if not is_computed:
            self._fail(request, "a shard holder of an earlier range does not answer")
            return
        self._context.metrics.recomputed_tokens.inc(chunk.plan.num_tokens)
        if not self._ranges.end_chunk(request.state, chunk.plan):
            return
        num_tokens, first = len(request.sequence.token_ids), request.sequence.num_remote_tokens
        request.sequence.elsewhere = None
        request.sequence.token_ids = array.array("i")
        parts = self._context.mover.parts
        parts.close(request.request_id, request.epoch)
        parts.landed(request.request_id, request.epoch)
        duration_s = perf_counter() - request.began_s
        self._context.hear(request, CopyLanded(request.state.key, num_tokens, 4 * (num_tokens - first), duration_s))

    def _fail(self, request: LocalRequest, reason: str) -> None:
        if not request.is_released:
            self._context.hear(request, CopyFailed(request.state.key, None, reason))
