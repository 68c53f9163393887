"""Interruption: which prompts may run at once, between two layers of a running step, instead of after it."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from pdmesh.policy.latency import ChunkShape, LatencyModel, StepShape


class StepInFlight(NamedTuple):
    """A step plan that an instance runs or will run.

    ``longest_tokens``: tokens to compute of the longest prompt with a chunk in the step; 0: no chunks.
    ``num_stages``: number of stages; the next step begins when this one leaves the first stage.
    """

    longest_tokens: int
    shape: StepShape
    num_stages: int = 1


@dataclass(frozen=True, slots=True)
class ShortInterruptsLong:
    """Rule by which a short prompt interrupts long ones if waiting for them takes longer than the short prompt.

    Steps with decodes are not interrupted, because this would delay the decodes. Such steps are short anyway.
    """

    latency: LatencyModel
    long_prompt_tokens: int

    def max_tokens(self, in_flight: Sequence[StepInFlight]) -> int:
        """Return the most tokens to compute of a prompt that may interrupt these steps; 0 if none may."""
        if any(step.shape.num_decodes for step in in_flight):
            return 0
        if max([step.longest_tokens for step in in_flight], default=0) < self.long_prompt_tokens:
            return 0
        wait_s = sum(self.latency.step_s(step.shape) / step.num_stages for step in in_flight)
        if self._alone_s(self.long_prompt_tokens - 1) < wait_s:
            return self.long_prompt_tokens - 1
        return bisect_left(range(1, self.long_prompt_tokens), wait_s, key=self._alone_s)

    def _alone_s(self, num_tokens: int) -> float:
        return self.latency.step_s(StepShape((ChunkShape(num_tokens, 0),), 0, 0))
