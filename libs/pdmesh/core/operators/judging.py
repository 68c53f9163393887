"""Whether a change made things worse: requests that came after it are compared with those that ended before it.

What counts is the share that met their targets, where they have any, and how long they waited: to be placed, and for
room to decode where they were computed ahead of it. Requests that were started again are left out: what they went
through may have begun before.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from math import erfc, sqrt
from statistics import fmean

from pdmesh.model import Request

#: As many requests tell, and so do as many seconds.
NUM_TO_JUDGE = 30
JUDGE_S = 30.0

#: A share of requests in time that is lower by so much, and not by chance, is worse.
LEAST_LOSS = 0.03
CHANCE = 0.05

#: Waiting that is longer by this factor and by so much is worse.
WAIT_FACTOR = 1.5
LEAST_WAIT_S = 0.25

#: A change that was taken back is not made again by itself for so long.
COOL_DOWN_S = 120.0

#: Of those that ended, that are remembered.
MAX_REMEMBERED = 2048


@dataclass(frozen=True, slots=True)
class Ended:
    """A request that finished, or was refused, in its first epoch."""

    arrival_s: float
    ended_s: float
    wait_s: float | None  # None: it was never placed
    met: bool | None  # all its targets; None if it has none


@dataclass(frozen=True, slots=True)
class Standing:
    """How requests fared, over some time."""

    num_requests: int
    num_judged: int  # that have targets
    num_met: int
    wait_s: float | None  # mean; None without a request

    @classmethod
    def of(cls, ended: Sequence[Ended]) -> Standing:
        judged = [each.met for each in ended if each.met is not None]
        waits_s = [each.wait_s for each in ended if each.wait_s is not None]
        return cls(len(ended), len(judged), sum(judged), fmean(waits_s) if waits_s else None)

    @property
    def share(self) -> float:
        return self.num_met / self.num_judged if self.num_judged else 1.0


class Judge:
    """Remembers how requests fared."""

    def __init__(self) -> None:
        self._ended: deque[Ended] = deque(maxlen=MAX_REMEMBERED)

    def finished(
        self, request: Request, wait_s: float | None, first_s: float | None, num_output_tokens: int, now_s: float
    ) -> None:
        """A request ended that waited for ``wait_s``; None: it was not placed here. Times are the core's clock."""
        if request.epoch > 0 or wait_s is None or first_s is None:
            return
        # As `pdmesh.metrics` defines them, which the core does not import.
        ttft_s = first_s - request.arrival_s
        tpot_s = (now_s - first_s) / (num_output_tokens - 1) if num_output_tokens > 1 else 0.0
        targets = [(request.slo_ttft_s, ttft_s), (request.slo_tpot_s, tpot_s)]
        kept = [value_s <= target_s for target_s, value_s in targets if target_s is not None]
        self._ended.append(Ended(request.arrival_s, now_s, wait_s, all(kept) if kept else None))

    def refused(self, request: Request, now_s: float) -> None:
        """A request was not taken, or waited in vain."""
        if request.epoch == 0 and (request.slo_ttft_s is not None or request.slo_tpot_s is not None):
            self._ended.append(Ended(request.arrival_s, now_s, None, met=False))

    def before(self, now_s: float) -> Standing:
        """Return the standing of the last ended requests: of a judgement's time, or as many as one needs."""
        recent = [each for each in self._ended if each.ended_s >= now_s - JUDGE_S]
        return Standing.of(recent if len(recent) >= NUM_TO_JUDGE else list(self._ended)[-NUM_TO_JUDGE:])

    def after(self, since_s: float) -> Standing:
        """Return the standing of requests that arrived and ended since."""
        return Standing.of([each for each in self._ended if each.arrival_s >= since_s])


def has_enough_data(after: Standing, since_s: float, now_s: float) -> bool:
    """Whether there is enough to judge by."""
    return after.num_requests >= NUM_TO_JUDGE or now_s >= since_s + JUDGE_S


def why_worse(before: Standing, after: Standing, longest_wait_s: float) -> str | None:
    """Return in what things got worse; None if in nothing. ``longest_wait_s``: of requests waiting now."""
    loss = before.share - after.share
    if before.num_judged and after.num_judged and loss > LEAST_LOSS:
        chance = chance_of(before, after)
        if chance < CHANCE:
            return (
                f"{after.share:.0%} of {after.num_judged} requests met their targets, {before.share:.0%} of "
                f"{before.num_judged} before (p = {chance:.2g})"
            )
    wait_s = max(after.wait_s or 0.0, longest_wait_s)
    if before.wait_s is not None and wait_s > WAIT_FACTOR * before.wait_s + LEAST_WAIT_S:
        return f"requests wait {wait_s:.2g} s, {before.wait_s:.2g} s before"
    return None


def chance_of(before: Standing, after: Standing) -> float:
    """Return the chance that equal shares look so different: the one-sided test of two proportions, pooled."""
    total = before.num_judged + after.num_judged
    pooled = (before.num_met + after.num_met) / total
    spread = sqrt(pooled * (1 - pooled) * (1 / before.num_judged + 1 / after.num_judged))
    if spread == 0.0:
        return 1.0
    return 0.5 * erfc((before.share - after.share) / spread / sqrt(2))
