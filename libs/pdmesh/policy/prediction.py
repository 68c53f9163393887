"""Predicted work and deadlines of prompts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import inf

from pdmesh.model import Request
from pdmesh.policy.latency import ChunkShape, LatencyModel, StepShape

#: Tokens between two entries of the table; times in between are interpolated.
TABLE_STEP_TOKENS = 1024


class RemainingTime:
    """Table of the time to prefill, by tokens (Medha, Algorithm 3).

    The table has the total time for every 1024 tokens, from simulating the chunks that the packing would cut for one
    prompt alone. The table grows with the longest prompt that is looked up.
    """

    def __init__(self, model: LatencyModel, chunk_tokens: Callable[[int, int], int], num_stages: int = 1) -> None:
        """``chunk_tokens(start, num_left)`` returns the size of the chunk that is cut at ``start``, never 0.

        Each chunk passes ``num_stages``, and the next one begins when it leaves the first stage.
        """
        self._model = model
        self._num_stages = num_stages
        self._chunk_tokens = chunk_tokens
        self._totals_s = [0.0]
        # State of the simulation, whose chunks never end after the table's last entry.
        self._num_computed_tokens = 0
        self._elapsed_s = 0.0

    def total_s(self, num_tokens: int) -> float:
        index, rest = divmod(num_tokens, TABLE_STEP_TOKENS)
        self._grow(index + 2)
        low_s = self._totals_s[index]
        return low_s + (self._totals_s[index + 1] - low_s) * rest / TABLE_STEP_TOKENS

    def remaining_s(self, num_tokens: int, num_done_tokens: int) -> float:
        return self.total_s(num_tokens) - self.total_s(num_done_tokens)

    def _grow(self, num_entries: int) -> None:
        while len(self._totals_s) < num_entries:
            start, end = self._num_computed_tokens, len(self._totals_s) * TABLE_STEP_TOKENS
            whole = self._chunk_tokens(start, 2**63)
            if start + whole <= end:
                self._num_computed_tokens += whole
                self._elapsed_s += self._chunk_s(start, whole)
            if start + whole >= end:
                self._totals_s.append(self._elapsed_s if start + whole == end else self._cut_short_s(start, end))

    def _cut_short_s(self, start: int, end: int) -> float:
        return self._elapsed_s + self._chunk_s(start, end - start)

    def _chunk_s(self, start: int, num_tokens: int) -> float:
        return self._model.step_s(StepShape((ChunkShape(num_tokens, start),), 0, 0)) / self._num_stages


@dataclass(frozen=True, slots=True)
class Prediction:
    """Predictions for orders and packings. Times are on the clock of ``arrival_s``."""

    remaining: RemainingTime
    slo_ttft_s: float
    slo_ttft_stretch: float
    long_prompt_tokens: int

    def is_long(self, request: Request, num_reused_tokens: int = 0) -> bool:
        """Whether a prompt has ``long_prompt_tokens`` or more without its ``num_reused_tokens`` cached tokens."""
        return request.num_prompt_tokens - num_reused_tokens >= self.long_prompt_tokens

    def work_s(self, request: Request, num_reused_tokens: int = 0) -> float:
        """Return the predicted seconds to compute the whole prompt without its ``num_reused_tokens`` cached tokens."""
        return self.remaining.remaining_s(request.num_prompt_tokens, num_reused_tokens)

    def remaining_s(self, request: Request, num_done_tokens: int) -> float:
        return self.remaining.remaining_s(request.num_prompt_tokens, num_done_tokens)

    def due_s(self, request: Request, num_reused_tokens: int = 0) -> float:
        """Return when the first token is due: by the request's own target, or by the work to be done until then.

        The work includes prompts that the client sent earlier with the same call (``num_tokens_before``).
        """
        if request.slo_ttft_s is not None and self.has_target(request):
            return request.arrival_s + request.slo_ttft_s
        due_s = request.arrival_s + self.slo_ttft_s + self.slo_ttft_stretch * self.work_s(request, num_reused_tokens)
        if request.num_tokens_before:
            # The choices of one call are one piece of work: the last one is not late before the first one is due.
            share = request.num_tokens_before / request.num_prompt_tokens
            due_s += self.slo_ttft_stretch * self.work_s(request) * share
        return due_s

    @staticmethod
    def has_target(request: Request) -> bool:
        """Whether the request has a TTFT target of its own."""
        return request.slo_ttft_s is not None and 0 < request.slo_ttft_s < inf

    def relative_slack(self, request: Request, num_done_tokens: int, now_s: float, num_reused_tokens: int = 0) -> float:
        """Return (time to the deadline - remaining work) / whole work."""
        slack_s = self.due_s(request, num_reused_tokens) - now_s - self.remaining_s(request, num_done_tokens)
        return slack_s / max(self.work_s(request, num_reused_tokens), 1e-9)
