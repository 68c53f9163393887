"""Interruption: which prompts may run at once, between two layers of a running step, instead of after it."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from pdmesh.policy.latency import ChunkShape, LatencyModel, StepShape


class StepInFlight(NamedTuple):
    """A step plan that an instance runs or will run."""

    longest_tokens: int  # to compute, of the longest prompt of which it has a chunk; 0: it has none
    shape: StepShape
    num_stages: int = 1  # that it passes: the next step begins as it leaves the first


@dataclass(frozen=True, slots=True)
class ShortInterruptsLong:
    """A short prompt interrupts long ones if it would otherwise wait for longer than it takes itself.

    Steps with decodes are not interrupted: they are as short as the decodes need, and would be delayed.
    """

    latency: LatencyModel
    long_prompt_tokens: int

    def max_tokens(self, in_flight: Sequence[StepInFlight]) -> int:
        """Return how many tokens a prompt may have to compute that may interrupt these steps; 0 if none may."""
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
