"""Placement of prompts with cached prefixes, by predicted cost and not by the longest cached prefix.

A cached prefix is always weighed together with the queue. Otherwise the holder of a system prompt, which all prompts
share, would get all of them.
"""

from __future__ import annotations

from dataclasses import dataclass

from pdmesh.model import Request
from pdmesh.policy.links import LinkRates
from pdmesh.policy.prediction import RemainingTime
from pdmesh.policy.views import InstanceView

#: Seconds of a fetch beside its bytes: commands to both sides, and their reports at the end.
FETCH_OVERHEAD_S = 0.02


@dataclass(frozen=True, slots=True)
class ReuseCost:
    """Cost of computing a prompt: the time to the first token, and ``price`` for each second of the instance's time."""

    remaining: RemainingTime
    links: LinkRates
    price: float = 1.0

    def cost_s(self, request: Request, num_reused_tokens: int, ready_s: float, bring_s: float = 0.0) -> float:
        """Return the seconds to the first token, plus ``price`` for each second of fetching and computing.

        The instance is free in ``ready_s``. The first ``num_reused_tokens`` are not computed. Fetching the missing ones
        takes ``bring_s``, while the instance computes other prompts.
        """
        return max(ready_s, bring_s) + self.price * bring_s + (1 + self.price) * self.work_s(request, num_reused_tokens)

    def pays(self, request: Request, num_cached_tokens: int, num_reused_tokens: int, bring_s: float) -> bool:
        """Whether fetching tokens ``num_cached_tokens`` to ``num_reused_tokens`` is faster than computing them."""
        return self.work_s(request, num_cached_tokens) - self.work_s(request, num_reused_tokens) > bring_s

    def work_s(self, request: Request, num_reused_tokens: int) -> float:
        """Return the seconds to compute the rest of the prompt alone."""
        return self.remaining.remaining_s(request.num_prompt_tokens, num_reused_tokens)

    def fetch_s(self, source: InstanceView, destination: InstanceView, num_bytes: int) -> float:
        """Return the seconds to copy ``num_bytes`` of cached KV between two instances."""
        return FETCH_OVERHEAD_S + num_bytes / self.links.bytes_per_s(source, destination)
