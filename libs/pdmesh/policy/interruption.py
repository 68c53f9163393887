"""Interruption: who may run at once, between two layers of a step that is running, instead of after it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from pdmesh.model import Request
from pdmesh.policy.latency import ChunkShape, LatencyModel, StepShape


@dataclass(frozen=True, slots=True)
class StepInFlight:
    """A step plan that an instance runs or will run."""

    requests: tuple[Request, ...]  # whose chunks it has
    shape: StepShape


class Interruption(Protocol):
    """Which of the requests that are more urgent than all that an instance has in flight are worth an interruption."""

    def may(self, request: Request, in_flight: Sequence[StepInFlight]) -> bool: ...


@dataclass(frozen=True, slots=True)
class ShortInterruptsLong:
    """A short prompt interrupts long ones if it would otherwise wait for longer than it takes itself.

    Steps with decodes are left in peace: they are as short as the decodes need them, and to interrupt one is to hold
    its decodes up.
    """

    latency: LatencyModel
    long_prompt_tokens: int

    def may(self, request: Request, in_flight: Sequence[StepInFlight]) -> bool:
        if request.num_prompt_tokens >= self.long_prompt_tokens:
            return False
        if any(step.shape.num_decodes for step in in_flight):
            return False
        if not any(self._is_long(other) for step in in_flight for other in step.requests):
            return False
        alone = StepShape((ChunkShape(request.num_prompt_tokens, 0),), 0, 0)
        wait_s = sum(self.latency.step_s(step.shape) for step in in_flight)
        return wait_s > self.latency.step_s(alone)

    def _is_long(self, request: Request) -> bool:
        return request.num_prompt_tokens >= self.long_prompt_tokens
