"""Prefill orders of papers, and their baselines (`pdmesh.policy.order` defines the terms)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from pdmesh.model import Request
from pdmesh.policy.order import rounded, work_class_s
from pdmesh.policy.prediction import Prediction
from pdmesh.policy.views import Rank


class _ByPlace:
    """Order that time does not change. Python cannot inherit from the product's, which mypyc may have compiled."""

    def keys(self, ranks: Sequence[Rank], now_s: float) -> Sequence[tuple[float, ...]]:
        return [(rank.place,) for rank in ranks]

    def keeps_key_until_s(self, rank: Rank) -> float:
        return inf


@dataclass(frozen=True)
class FcfsOfEachKind(_ByPlace):
    """First come, first served, where neither short nor long prompts wait behind the other kind."""

    long_prompt_tokens: int

    def rank(self, request: Request, num_done_tokens: int, placed_s: float | None, num_reused_tokens: int = 0) -> Rank:
        return Rank(bucket=float(request.num_prompt_tokens >= self.long_prompt_tokens))


@dataclass(frozen=True)
class LeastSlack(_ByPlace):
    """LRS, least remaining slack: the earliest latest start of the remaining work.

    Time takes the same from every slack.
    """

    prediction: Prediction

    def rank(self, request: Request, num_done_tokens: int, placed_s: float | None, num_reused_tokens: int = 0) -> Rank:
        return Rank(rounded(_latest_start_s(self.prediction, request, num_done_tokens)))


@dataclass(frozen=True)
class LeastRelativeSlack:
    """LARS, length-aware relative slack (Medha §4.1), strictly: the smallest first.

    Slack is relative to the whole work, which is rounded to a class, at most 6 % off. Each class is a bucket.
    """

    prediction: Prediction

    def rank(self, request: Request, num_done_tokens: int, placed_s: float | None, num_reused_tokens: int = 0) -> Rank:
        latest_s = rounded(_latest_start_s(self.prediction, request, num_done_tokens))
        return Rank(latest_s, work_class_s(self.prediction.work_s(request)), latest_s)

    def keys(self, ranks: Sequence[Rank], now_s: float) -> Sequence[tuple[float, ...]]:
        return [(round((latest_s - now_s) / work_s, 9),) for _, work_s, latest_s in ranks]

    def keeps_key_until_s(self, rank: Rank) -> float:
        return -inf


@dataclass(frozen=True)
class ShortFirst(_ByPlace):
    """Short prompts before long ones, each kind first come, first served. Long ones can starve.

    This is PecSched's preemption (§5.1), and its baseline "priority". Without ``preempts``, no prompt overtakes a long
    one that has been placed (its ablation /PE).
    """

    long_prompt_tokens: int
    preempts: bool = True

    def rank(self, request: Request, num_done_tokens: int, placed_s: float | None, num_reused_tokens: int = 0) -> Rank:
        if request.num_prompt_tokens < self.long_prompt_tokens:
            return Rank(1.0, 1.0)
        place = 0.0 if placed_s is not None and not self.preempts else 2.0
        return Rank(place, place)


def _latest_start_s(prediction: Prediction, request: Request, num_done_tokens: int) -> float:
    return prediction.due_s(request) - prediction.remaining_s(request, num_done_tokens)
