"""Placements with which others are compared."""

from __future__ import annotations

from dataclasses import dataclass

from pdmesh.model import Request
from pdmesh.policy.views import InstanceView


@dataclass(frozen=True, slots=True)
class Reservation:
    """A static pool: the first ``num_reserved`` instances that joined are for long prompts, the others for short ones.

    With 0 there is no pool. Each prompt goes to the instance with the fewest queued tokens.
    """

    long_prompt_tokens: int
    num_reserved: int = 0

    def key(self, instance: InstanceView) -> tuple[float, ...]:
        return (instance.num_queued_tokens,)

    def takes(self, request: Request, instance: InstanceView, num_reused_tokens: int = 0) -> bool:
        is_long = request.num_prompt_tokens - num_reused_tokens >= self.long_prompt_tokens
        return not self.num_reserved or is_long == (instance.number <= self.num_reserved)
