"""Packings: which chunks go into a step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import ceil, inf, sqrt

from pdmesh.model import Request, Role
from pdmesh.policy.batching_theory import StepLimit
from pdmesh.policy.latency import ChunkShape, LinearLatencyModel, StepShape
from pdmesh.policy.prediction import Prediction
from pdmesh.policy.views import InstanceView, PartialStep

#: Unit of adaptive chunks, except a prompt's last one. A step without chunks takes one unit whatever the time budget.
CHUNK_UNIT_TOKENS = 32

#: Most steps for each stage into which a prompt alone is cut, however small a step's constant time is.
_MAX_STEPS_PER_STAGE = 16

#: Excess over a time budget that counts as a rounding error.
ROUNDING_S = 1e-9

#: The first chunk of a prompt, as small as it can be.
_A_UNIT = (ChunkShape(CHUNK_UNIT_TOKENS, 0),)

#: A step with nothing in it.
NOTHING = StepShape((), 0, 0)

#: The targets of decodes that have none of their own.
NO_TARGETS = frozenset([None])


@dataclass(frozen=True, slots=True)
class StaticChunks:
    """Steps of at most ``chunk_tokens`` prompt tokens, filled in order; a prompt is cut where the step is full."""

    chunk_tokens: int

    def num_tokens(
        self,
        instance: InstanceView,
        step: PartialStep,
        request: Request,
        start: int,
        *,
        num_reused_tokens: int = 0,
        least_other_tokens: int = 0,
    ) -> int:
        return min(request.num_prompt_tokens - start, self.chunk_tokens - step.num_tokens)

    def step_limit(self, instance: InstanceView) -> StepLimit:
        return StepLimit(num_tokens=self.chunk_tokens)

    def takes_local(self, instance: InstanceView) -> bool:
        return False

    def local_s(self, instance: InstanceView, num_tokens: int, start: int = 0) -> float:
        return inf

    def chunk_alone(self, start: int, num_left: int) -> int:
        """Return the next chunk's size of a prompt that has steps to itself."""
        return min(num_left, self.chunk_tokens)


@dataclass(frozen=True, slots=True)
class ChunkSizer:
    """Search for the largest chunk that keeps a step within a time budget (Medha, Algorithm 2)."""

    model: LinearLatencyModel
    max_tokens: int

    def largest(self, beside: StepShape, start: int, num_left: int, budget_s: float) -> int:
        """Return the size of the largest chunk at ``start`` that fits ``beside``; 0 if not even a unit fits."""

        step_s = self.model.with_chunk_s(beside, start)
        limit_s = budget_s + ROUNDING_S
        if num_left <= self.max_tokens and step_s(num_left) <= limit_s:
            return num_left
        low, high = 0, min(num_left, self.max_tokens) // CHUNK_UNIT_TOKENS + 1
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if step_s(middle * CHUNK_UNIT_TOKENS) <= limit_s else (low, middle)
        return low * CHUNK_UNIT_TOKENS

    def filling_s(self, num_tokens: int, num_history_tokens: int, num_stages: int) -> float:
        """Return the duration of each step with which ``num_tokens`` pass ``num_stages`` soonest.

        n steps take (n + stages - 1) · (a + work / n) / stages. With more steps, stages are idle for a shorter time at
        the beginning and the end, but pay a step's constant more often. No step is so short that reading the weights
        takes most of its time.
        """
        constant_s = self.model.a_s
        work_s = self.model.step_s(StepShape((ChunkShape(num_tokens, num_history_tokens),), 0, 0)) - constant_s
        shortest_s = work_s / (_MAX_STEPS_PER_STAGE * num_stages)
        best_s = sqrt(max(0.0, work_s * constant_s) / (num_stages - 1))
        return constant_s + max(shortest_s, best_s, self.model.weights_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class AdaptiveChunks:
    """Steps that fill a time budget (Medha, Algorithms 1 and 2).

    Chunks shrink as the tokens before them grow. A step has at most one long prompt, and other chunks beside its chunk
    if these gain more than the prompts before them lose. A long prompt with slack leaves up to ``max_shared`` of the
    step to short prompts, if some wait (*space sharing*). A step without chunks takes one unit whatever the time, so
    that a prompt progresses beside any number of decodes.

    Beside decodes the budget is their smallest TPOT target; decodes without a target have ``slo_tpot_s``. On an
    instance that only decodes, the budget is always ``local_step_share`` of this target. On an instance of several
    stages, each step has a share of the decodes, and the next step begins when one leaves the first stage.
    ``prefill_step_s`` limits this interval there. A prompt alone on such an instance is cut to keep all stages busy.

    ``fills_steps``: whether chunks join in the order while the step has room, whatever the others lose (Algorithm 1).
    ``sizer_of_device_class``: sizers for instances of known device classes; others use ``sizer``.
    """

    sizer: ChunkSizer
    prediction: Prediction
    prefill_step_s: float
    slo_tpot_s: float
    max_shared: float
    local_step_share: float
    fills_steps: bool = False
    sizer_of_device_class: Mapping[str, ChunkSizer] = field(default_factory=dict[str, ChunkSizer])

    def num_tokens(
        self,
        instance: InstanceView,
        step: PartialStep,
        request: Request,
        start: int,
        *,
        num_reused_tokens: int = 0,
        least_other_tokens: int = 0,
    ) -> int:
        long_tokens = self.prediction.long_prompt_tokens
        is_long, has_long = self.prediction.is_long(request, num_reused_tokens), step.longest_tokens >= long_tokens
        if is_long and has_long:
            return 0
        sizer, budget_s = self._sizer(instance), self._budget_s(instance)
        if instance.num_stages > 1 and not least_other_tokens:
            num_work_tokens = request.num_prompt_tokens - num_reused_tokens
            budget_s = min(budget_s, sizer.filling_s(num_work_tokens, num_reused_tokens, instance.num_stages))
        if is_long and 0 < least_other_tokens < long_tokens:
            slack = self.prediction.relative_slack(request, start, step.now_s, num_reused_tokens)
            budget_s *= 1 - min(self.max_shared, max(0.0, slack))
        num_left = request.num_prompt_tokens - start
        num_tokens = sizer.largest(_beside(instance, step), start, num_left, budget_s)
        if not step.chunks:
            return num_tokens or min(num_left, CHUNK_UNIT_TOKENS)
        is_judged = num_tokens and (is_long or has_long) and not self.fills_steps
        if is_judged and not self._gains(instance, step, ChunkShape(num_tokens, start), budget_s):
            return 0
        return num_tokens

    def _gains(self, instance: InstanceView, step: PartialStep, chunk: ChunkShape, next_step_s: float) -> bool:
        """Whether a chunk in the step saves its prompt more time than it costs the prompts that have chunks there.

        Without a place in the step, the chunk has a step of its own after this one. It also waits for ``next_step_s``
        if a prompt of this step has more chunks, which come first in the order. The time of the decodes is not saved,
        because they want their steps in any case.
        """
        model = self._sizer(instance).model
        before, decodes = _beside(instance, step), _beside(instance, PartialStep())
        before_s, together_s = (
            model.step_s(before),
            model.with_chunk_s(before, chunk.num_history_tokens)(chunk.num_tokens),
        )
        alone_s = model.with_chunk_s(decodes, chunk.num_history_tokens)(chunk.num_tokens) - model.step_s(decodes)
        wait_s = before_s if all(each.is_last for each in step.chunks) else before_s + next_step_s
        saved_s = wait_s + alone_s - together_s
        return saved_s >= len(step.chunks) * (together_s - before_s)

    def step_limit(self, instance: InstanceView) -> StepLimit:
        is_decode = instance.role is Role.DECODE
        return StepLimit(self._tpot_s(instance) * (self.local_step_share if is_decode else 1), self.sizer.max_tokens)

    def takes_local(self, instance: InstanceView) -> bool:
        budget_s = self.local_step_share * self._tpot_s(instance)
        step = StepShape(_A_UNIT, instance.num_decoding, instance.num_resident_tokens).shared_by(instance.num_stages)
        sizer = self._sizer(instance)
        return sizer.max_tokens >= CHUNK_UNIT_TOKENS and sizer.model.step_s(step) <= budget_s + ROUNDING_S

    def local_s(self, instance: InstanceView, num_tokens: int, start: int = 0) -> float:
        budget_s = self.local_step_share * self._tpot_s(instance)
        beside = _beside(instance, PartialStep())
        sizer, half = self._sizer(instance), start + num_tokens // 2
        chunk_tokens = sizer.largest(beside, half, num_tokens, budget_s)
        if not chunk_tokens:
            return inf
        num_steps = ceil((num_tokens + instance.num_queued_tokens) / chunk_tokens)
        step_s = sizer.model.with_chunk_s(beside, half)(chunk_tokens)
        return (num_steps + instance.num_stages - 1) * step_s / instance.num_stages

    def _sizer(self, instance: InstanceView) -> ChunkSizer:
        return self.sizer_of_device_class.get(instance.device_class, self.sizer)

    def _budget_s(self, instance: InstanceView) -> float:
        if instance.role is Role.DECODE:
            return self.local_step_share * self._tpot_s(instance)
        return self._tpot_s(instance) if instance.num_decoding else self.prefill_step_s * instance.num_stages

    def _tpot_s(self, instance: InstanceView) -> float:
        if instance.slo_tpots_s <= NO_TARGETS:
            return self.slo_tpot_s
        return min([self.slo_tpot_s if slo_s is None else slo_s for slo_s in instance.slo_tpots_s])


def _beside(instance: InstanceView, step: PartialStep) -> StepShape:
    beside = StepShape(tuple(step.shapes), instance.num_decoding, instance.num_resident_tokens)
    return beside.shared_by(instance.num_stages)
