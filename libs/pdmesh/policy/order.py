"""Prefill orders.

The *work* of a request is predicted: the seconds that computing the prompt alone takes. The *slack* is the time left at
the deadline if the rest of the prompt ran from now on. The *relative slack* is the slack divided by the whole work.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import frexp, inf, ldexp

from pdmesh.model import Request
from pdmesh.policy.prediction import Prediction
from pdmesh.policy.views import Rank


class ByPlace:
    """Base of orders that time does not change."""

    def keys(self, ranks: Sequence[Rank], now_s: float) -> Sequence[tuple[float, ...]]:
        return [(rank.place,) for rank in ranks]

    def keeps_key_until_s(self, rank: Rank) -> float:
        return inf


@dataclass(frozen=True)
class Fcfs(ByPlace):
    """First come, first served: the core's tie-break, by arrival and then by id, is the whole order."""

    def rank(self, request: Request, num_done_tokens: int, placed_s: float | None, num_reused_tokens: int = 0) -> Rank:
        return Rank()


@dataclass(frozen=True)
class ByPriority(ByPlace):
    """Order by the request's priority, lower first, as in vLLM."""

    def rank(self, request: Request, num_done_tokens: int, placed_s: float | None, num_reused_tokens: int = 0) -> Rank:
        return Rank(request.priority)


@dataclass(frozen=True)
class ShortestFirst(ByPlace):
    """SJF: the least work left first. Long requests can starve."""

    prediction: Prediction

    def rank(self, request: Request, num_done_tokens: int, placed_s: float | None, num_reused_tokens: int = 0) -> Rank:
        return Rank(rounded(self.prediction.remaining_s(request, num_done_tokens)))


@dataclass(frozen=True)
class EarliestDeadline(ByPlace):
    """EDF: the earliest deadline first."""

    prediction: Prediction

    def rank(self, request: Request, num_done_tokens: int, placed_s: float | None, num_reused_tokens: int = 0) -> Rank:
        return Rank(rounded(self.prediction.due_s(request, num_reused_tokens)))


@dataclass(frozen=True)
class GuardedShortestFirst:
    """Shortest first, but requests with less relative slack than ``spare_slack`` precede all others, as in LARS.

    Work is compared by powers of four, and within one power by deadline. Preempting a prompt for one of half its work
    gains little, and leaves half-computed long prompts on instances that new ones could have used.

    While every request has slack to spare, this order has the shortest mean wait, and a short request never waits for a
    long one. A long request that was put off too often becomes urgent while it can still be in time. Under overload
    every request is urgent, and the order equals LARS: relative slack falls without bound while a request waits, so no
    request starves.

    Requests of equal work form one bucket. A bucket is as urgent as its most urgent request, and orders its requests by
    deadline. Under strict LARS, equal requests would take turns and all end late.

    A long prompt that can still keep a target of its own is due at that target. Any other long prompt is due so that it
    gets at least ``min_share`` of an instance's time from when the instance took it. Earlier waiting was for other long
    prompts. If it counted, short prompts would have to make up for it and be late, too.
    """

    prediction: Prediction
    spare_slack: float
    min_share: float

    def rank(self, request: Request, num_done_tokens: int, placed_s: float | None, num_reused_tokens: int = 0) -> Rank:
        prediction = self.prediction
        work_s = prediction.work_s(request, num_reused_tokens)
        due_s = prediction.due_s(request, num_reused_tokens)
        since_s = request.arrival_s if placed_s is None else placed_s
        if prediction.is_long(request, num_reused_tokens):
            can_keep_own = prediction.has_target(request) and due_s - since_s >= (1 + self.spare_slack) * work_s
            if not can_keep_own:
                due_s = since_s + prediction.slo_ttft_s + work_s / self.min_share
        latest_s = due_s - prediction.remaining_s(request, num_done_tokens)
        return Rank(rounded(due_s), work_class_s(work_s), latest_s)

    def keys(self, ranks: Sequence[Rank], now_s: float) -> Sequence[tuple[float, ...]]:
        if len(ranks) == 1:
            return [self._key(ranks[0], ranks[0].latest_start_s, now_s)]
        starts_s = {work_s: latest_s for _, work_s, latest_s in ranks}
        if len(starts_s) < len(ranks):
            for _, work_s, latest_s in ranks:
                starts_s[work_s] = min(starts_s[work_s], latest_s)
        return [self._key(rank, starts_s[rank.bucket], now_s) for rank in ranks]

    def _key(self, rank: Rank, start_s: float, now_s: float) -> tuple[float, ...]:
        """Return the key of a request; the most urgent one of the same bucket must start by ``start_s``."""
        due_s, work_s, _ = rank
        slack = (start_s - now_s) / work_s
        # The margin has the effect of comparing the rounded slack.
        urgent = slack < self.spare_slack - 5e-10
        return (0.0, round(slack, 9), work_s, due_s) if urgent else (1.0, _scale(work_s), due_s)

    def keeps_key_until_s(self, rank: Rank) -> float:
        """Return the time until which the request cannot become urgent, a little early for rounding errors."""
        return rank.latest_start_s - self.spare_slack * rank.bucket - 1e-3


def work_class_s(work_s: float) -> float:
    """Round work to one of eight classes in each doubling."""
    mantissa, exponent = frexp(max(work_s, 1e-6))
    return ldexp(round(mantissa * 16), exponent - 4)


def _scale(work_s: float) -> float:
    """Return the exponent of the largest power of four below ``work_s``."""
    return (frexp(work_s)[1] - 1) // 2


def rounded(value: float) -> float:
    """Round to a nanosecond, so that values that differ by rounding errors tie and fall to arrival and id."""
    return round(value, 9)
