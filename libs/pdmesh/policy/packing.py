"""Packings."""

from __future__ import annotations

from dataclasses import dataclass

from pdmesh.model import Request, Role
from pdmesh.policy.base import Draft, InstanceView
from pdmesh.policy.latency import ChunkShape, LatencyModel, StepShape
from pdmesh.policy.prediction import Prediction

#: Adaptive chunks are multiples of this, but for a prompt's last. A step with no chunk yet takes one in any case.
CHUNK_UNIT_TOKENS = 32


@dataclass(frozen=True, slots=True)
class StaticChunks:
    """Steps of at most ``chunk_tokens`` prompt tokens, filled in order; a prompt is cut where the step is full."""

    chunk_tokens: int

    def num_tokens(self, instance: InstanceView, draft: Draft, request: Request, start: int) -> int:
        return min(request.num_prompt_tokens - start, self.chunk_tokens - draft.num_tokens)

    def chunk_alone(self, start: int, num_left: int) -> int:
        """The chunk of a prompt that has steps to itself."""
        return min(num_left, self.chunk_tokens)


@dataclass(frozen=True, slots=True)
class ChunkSizer:
    """The largest chunk that keeps a step within a time budget (the binary search of Medha, Algorithm 2)."""

    model: LatencyModel
    max_tokens: int

    def largest(self, beside: StepShape, start: int, num_left: int, budget_s: float) -> int:
        """At most ``num_left`` tokens at ``start``, in a step that has ``beside``; 0 if not even a unit fits."""

        def fits(num_tokens: int) -> bool:
            chunks = (*beside.chunks, ChunkShape(num_tokens, start))
            step_s = self.model.step_s(StepShape(chunks, beside.num_decodes, beside.num_decode_context_tokens))
            return step_s <= budget_s + 1e-9  # nanoseconds are rounding errors

        if num_left <= self.max_tokens and fits(num_left):
            return num_left
        low, high = 0, min(num_left, self.max_tokens) // CHUNK_UNIT_TOKENS + 1
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if fits(middle * CHUNK_UNIT_TOKENS) else (low, middle)
        return low * CHUNK_UNIT_TOKENS


@dataclass(frozen=True, slots=True, kw_only=True)
class AdaptiveChunks:
    """Steps that fill a time budget (Medha, Algorithms 1 and 2).

    Chunks shrink as the tokens before them grow. A step has at most one long prompt. A long prompt with slack leaves
    up to ``max_shared`` of the step to others, if there are any (*space sharing*). A step with no chunk yet takes one
    unit whatever the time, so that a prompt goes on beside any number of decodes.
    """

    sizer: ChunkSizer
    prediction: Prediction
    prefill_step_s: float
    mixed_step_s: float
    long_prompt_tokens: int
    max_shared: float

    def num_tokens(self, instance: InstanceView, draft: Draft, request: Request, start: int) -> int:
        is_long = request.num_prompt_tokens >= self.long_prompt_tokens
        if is_long and draft.longest_prompt_tokens >= self.long_prompt_tokens:
            return 0
        decodes = instance.role is not Role.PREFILL or instance.num_decoding > 0
        budget_s = self.mixed_step_s if decodes else self.prefill_step_s
        if is_long and draft.shared:
            slack = self.prediction.relative_slack(request, start, draft.now_s)
            budget_s *= 1 - min(self.max_shared, max(0.0, slack))
        beside = StepShape(tuple(draft.shapes), instance.num_decoding, instance.num_resident_tokens)
        num_left = request.num_prompt_tokens - start
        num_tokens = self.sizer.largest(beside, start, num_left, budget_s)
        return num_tokens if num_tokens or draft.chunks else min(num_left, CHUNK_UNIT_TOKENS)
