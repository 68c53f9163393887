"""Where a prompt is computed of which some KV is kept: by the predicted cost, not by where most of it is.

A prefix is never weighed apart from the queue: every prompt shares a system prompt, whose holder would drown.
"""

from __future__ import annotations

from dataclasses import dataclass

from pdmesh.model import Request
from pdmesh.policy.links import LinkRates
from pdmesh.policy.prediction import RemainingTime
from pdmesh.policy.views import InstanceView

#: A fetch takes so much longer than its bytes: both sides are told of it, and say that it is done.
FETCH_OVERHEAD_S = 0.02


@dataclass(frozen=True, slots=True)
class ReuseCost:
    """The time to the first token, and what the instance's own time is worth to others: ``price`` for each second."""

    remaining: RemainingTime
    links: LinkRates
    price: float = 1.0

    def cost_s(self, request: Request, num_reused_tokens: int, ready_s: float, bring_s: float = 0.0) -> float:
        """Return the cost on an instance that is ready in ``ready_s`` and then keeps so much of the prompt.

        It takes ``bring_s`` to bring what is not there yet, while the instance computes other prompts.
        """
        return max(ready_s, bring_s) + self.price * bring_s + (1 + self.price) * self.work_s(request, num_reused_tokens)

    def pays(self, request: Request, num_kept_tokens: int, num_reused_tokens: int, bring_s: float) -> bool:
        """Whether bringing what is not kept takes less time than computing it."""
        return self.work_s(request, num_kept_tokens) - self.work_s(request, num_reused_tokens) > bring_s

    def work_s(self, request: Request, num_reused_tokens: int) -> float:
        """Return the time that computing the rest takes alone."""
        return self.remaining.remaining_s(request.num_prompt_tokens, num_reused_tokens)

    def fetch_s(self, source: InstanceView, destination: InstanceView, num_bytes: int) -> float:
        """Return the time until so much KV that one instance keeps is on another."""
        return FETCH_OVERHEAD_S + num_bytes / self.links.bytes_per_s(source, destination)
