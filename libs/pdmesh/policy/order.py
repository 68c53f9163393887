"""Prefill orders.

The work of a request is predicted: the seconds its prompt, or what is left of it, takes alone. Its *slack* is the time
that would be left at its deadline if it ran from now on, its *relative slack* that time over its whole work.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import frexp, inf, ldexp

from pdmesh.model import Request
from pdmesh.policy.prediction import Prediction
from pdmesh.policy.views import Rank


class _ByPlace:
    """An order that time does not change."""

    def keys(self, ranks: Sequence[Rank], now_s: float) -> Sequence[tuple[float, ...]]:
        return [(rank.place,) for rank in ranks]

    def keeps_key_until_s(self, rank: Rank) -> float:
        return inf


@dataclass(frozen=True)
class Fcfs(_ByPlace):
    """First come, first served: the core's own tie-break, by arrival and then by id, is the whole order."""

    def rank(self, request: Request, num_done_tokens: int, placed_s: float | None) -> Rank:
        return Rank()


@dataclass(frozen=True)
class FcfsOfEachKind(_ByPlace):
    """First come, first served, where neither short nor long prompts wait behind the other kind."""

    long_prompt_tokens: int

    def rank(self, request: Request, num_done_tokens: int, placed_s: float | None) -> Rank:
        return Rank(lane=float(request.num_prompt_tokens >= self.long_prompt_tokens))


@dataclass(frozen=True)
class ByPriority(_ByPlace):
    """The request's own priority, lower first, as in vLLM."""

    def rank(self, request: Request, num_done_tokens: int, placed_s: float | None) -> Rank:
        return Rank(request.priority)


@dataclass(frozen=True)
class ShortestFirst(_ByPlace):
    """SJF: the least work left first. Long requests can starve."""

    prediction: Prediction

    def rank(self, request: Request, num_done_tokens: int, placed_s: float | None) -> Rank:
        return Rank(_rounded(self.prediction.remaining_s(request, num_done_tokens)))


@dataclass(frozen=True)
class EarliestDeadline(_ByPlace):
    """EDF."""

    prediction: Prediction

    def rank(self, request: Request, num_done_tokens: int, placed_s: float | None) -> Rank:
        return Rank(_rounded(self.prediction.due_s(request)))


@dataclass(frozen=True)
class LeastSlack(_ByPlace):
    """LRS, least remaining slack: the earliest latest start of what is left. Time takes the same from every slack."""

    prediction: Prediction

    def rank(self, request: Request, num_done_tokens: int, placed_s: float | None) -> Rank:
        return Rank(_rounded(_latest_start_s(self.prediction, request, num_done_tokens)))


@dataclass(frozen=True)
class LeastRelativeSlack:
    """LARS, length-aware relative slack (Medha §4.1), strictly: the smallest first.

    The whole work that slack is relative to is rounded to a class, at most 6 % off; a class is a lane.
    """

    prediction: Prediction

    def rank(self, request: Request, num_done_tokens: int, placed_s: float | None) -> Rank:
        latest_s = _rounded(_latest_start_s(self.prediction, request, num_done_tokens))
        return Rank(latest_s, _work_class_s(self.prediction.work_s(request)), latest_s)

    def keys(self, ranks: Sequence[Rank], now_s: float) -> Sequence[tuple[float, ...]]:
        return [(round((latest_s - now_s) / work_s, 9),) for _, work_s, latest_s in ranks]

    def keeps_key_until_s(self, rank: Rank) -> float:
        return -inf


@dataclass(frozen=True)
class ShortFirst(_ByPlace):
    """Short prompts before long ones, each kind first come, first served. Long ones can starve.

    This is PecSched's preemption (§5.1), and its baseline "priority". Without ``preempts`` a long prompt that has been
    placed is not passed over any more (its ablation /PE).
    """

    long_prompt_tokens: int
    preempts: bool = True

    def rank(self, request: Request, num_done_tokens: int, placed_s: float | None) -> Rank:
        if request.num_prompt_tokens < self.long_prompt_tokens:
            return Rank(1.0, 1.0)
        place = 0.0 if placed_s is not None and not self.preempts else 2.0
        return Rank(place, place)


@dataclass(frozen=True)
class GuardedShortestFirst:
    """The shortest first; but those with less relative slack than ``spare_slack`` before all others, as in LARS.

    Shortest counts by powers of four, and inside one by deadline: to preempt a prompt by one of half its work gains
    little, and piles up half-done long prompts where new ones could have found an instance without.

    While everyone has slack to spare this has the shortest mean wait, and a short request never waits for a long one.
    A long request that was put off too often becomes urgent while it can still be in time. Under overload everyone is
    urgent, and the order is that of LARS: relative slack falls without bound while a request waits, so none starves.
    Requests of equal work are one lane: it is as urgent as the most urgent of them, and inside it they come by
    deadline, so that equals do not take turns and all end late, as under strict LARS.

    A long prompt with a target of its own gets what it needs to keep it. Any other is due so that it gets at least
    ``min_share`` of an instance's time, from when the instance took it; so is one that was too late by then. What it
    waited before was for other long ones: it is no debt of the short ones, who would else all be late together with it.
    """

    prediction: Prediction
    spare_slack: float
    min_share: float

    def rank(self, request: Request, num_done_tokens: int, placed_s: float | None) -> Rank:
        prediction = self.prediction
        work_s, due_s = prediction.work_s(request), prediction.due_s(request)
        since_s = request.arrival_s if placed_s is None else placed_s
        if prediction.is_long(request):
            can_keep_own = prediction.has_target(request) and due_s - since_s >= (1 + self.spare_slack) * work_s
            if not can_keep_own:
                due_s = since_s + prediction.slo_ttft_s + work_s / self.min_share
        latest_s = due_s - prediction.remaining_s(request, num_done_tokens)
        return Rank(_rounded(due_s), _work_class_s(work_s), latest_s)

    def keys(self, ranks: Sequence[Rank], now_s: float) -> Sequence[tuple[float, ...]]:
        starts_s = {work_s: latest_s for _, work_s, latest_s in ranks}  # of the most urgent in each lane
        if len(starts_s) < len(ranks):
            for _, work_s, latest_s in ranks:
                starts_s[work_s] = min(starts_s[work_s], latest_s)
        spare = self.spare_slack - 5e-10  # as if all were rounded
        keys: list[tuple[float, ...]] = []
        for due_s, work_s, _ in ranks:
            slack = (starts_s[work_s] - now_s) / work_s
            urgent = slack < spare
            keys.append((0.0, round(slack, 9), work_s, due_s) if urgent else (1.0, _scale(work_s), due_s))
        return keys

    def keeps_key_until_s(self, rank: Rank) -> float:
        """Until it may be urgent: a little early, for rounding errors."""
        return rank.latest_start_s - self.spare_slack * rank.lane - 1e-3


def _latest_start_s(prediction: Prediction, request: Request, num_done_tokens: int) -> float:
    return prediction.due_s(request) - prediction.remaining_s(request, num_done_tokens)


def _work_class_s(work_s: float) -> float:
    """Rounded to one of eight classes in each doubling."""
    mantissa, exponent = frexp(max(work_s, 1e-6))
    return ldexp(round(mantissa * 16), exponent - 4)


def _scale(work_s: float) -> float:
    """The power of four below."""
    return (frexp(work_s)[1] - 1) // 2


def _rounded(value: float) -> float:
    """To a nanosecond: what differs by rounding errors alone is equal, and falls to arrival and id."""
    return round(value, 9)
