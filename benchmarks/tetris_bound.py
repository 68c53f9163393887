"""How much load any planner at all can serve in time, for `tetris_table.py`: a bound, and not a plan.

Whatever is planned, a prompt takes its least work, in instance-seconds (`least_work_s`), and all instances together
give no more than one that is as fast as all of them. On that one it is known which prompts have to be late, so that
the fewest are (`num_late`): nobody who plans for real instances, even if he knew what will come, has fewer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache
from itertools import combinations, pairwise
from typing import NamedTuple

from pdmesh.policy.latency import LinearLatencyModel
from pdmesh.policy.sequence_parallel import GroupLatency
from pdmesh_lab.studies.first_tokens import PromptArrival


class _Cost(NamedTuple):
    """Instance-seconds of one size's token at a place ``x`` of the prompt: ``level + slope * x``."""

    level: float
    slope: float

    def at(self, x: float) -> float:
        return self.level + self.slope * x

    def over(self, low: float, high: float) -> float:
        return (high - low) * (self.level + self.slope * (low + high) / 2)


def least_work(latency: GroupLatency) -> Callable[[int], float]:
    """The least instance-seconds that a prompt of so many tokens takes, in whatever chunks and groups.

    Of every set of sizes: the constant of each once, and for each token what it costs in the size that is best for it
    (which a chain could not even have in this order). Raises ValueError where chunks cost more than their tokens.
    """
    for model in latency.values():
        if not math.isclose(model.c_s, 2 * model.d_s, rel_tol=1e-3):
            raise ValueError(f"a prompt in chunks takes another time for its tokens than one in one: {model}")
    sets = [each for length in range(1, len(latency) + 1) for each in combinations(latency.items(), length)]
    parts = [
        (sum(size * model.a_s for size, model in each), [_cost(size, model) for size, model in each]) for each in sets
    ]

    @cache
    def of_tokens(num_tokens: int) -> float:
        return min(constant + _least(costs, num_tokens) for constant, costs in parts)

    return of_tokens


def _cost(size: int, model: LinearLatencyModel) -> _Cost:
    # A thousandth of the square is within what the fit has for c, so nothing is taken for more than it costs.
    return _Cost(size * model.b_s, size * min(model.c_s, 2 * model.d_s))


def _least(costs: Sequence[_Cost], num_tokens: int) -> float:
    """The integral of the least of these over a prompt."""
    crossings = {0.0, float(num_tokens)}
    for first, second in combinations(costs, 2):
        if first.slope != second.slope:
            crossings.add(min(max((second.level - first.level) / (first.slope - second.slope), 0.0), float(num_tokens)))
    total = 0.0
    for low, high in pairwise(sorted(crossings)):
        total += min(costs, key=lambda cost: cost.at((low + high) / 2)).over(low, high)
    return total


def num_late(prompts: Sequence[PromptArrival], work_s: Callable[[int], float], limit_s: float) -> int:
    """The fewest who can be late where one server does everything, with ``work_s`` for so many tokens.

    Every prompt has the same time, so the order of deadlines is that of arrivals. Then one by one: if one would be
    late, the one is left out without whom the others end soonest (Kise, Ibaraki and Mine, 1978).
    """
    late = 0
    kept: list[tuple[float, float]] = []  # since the server was last idle: arrivals, work
    end_s = 0.0
    for arrival_s, num_tokens in prompts:
        if arrival_s >= end_s:
            kept.clear()
        kept.append((arrival_s, work_s(num_tokens)))
        end_s = max(end_s, arrival_s) + kept[-1][1]
        if end_s > arrival_s + limit_s:
            late += 1
            index, end_s = _left_out(kept)
            del kept[index]
    return late


def _left_out(kept: Sequence[tuple[float, float]]) -> tuple[int, float]:
    """Without whom the others end soonest, and when that is."""
    ends_s = [0.0]
    for arrival_s, took_s in kept:
        ends_s.append(max(ends_s[-1], arrival_s) + took_s)
    best, best_s = 0, math.inf
    # Those behind: what they take, and when they end at the soonest, whoever is before them.
    behind_s, soonest_s = 0.0, -math.inf
    for index in range(len(kept) - 1, -1, -1):
        end_s = max(ends_s[index] + behind_s, soonest_s)
        if end_s < best_s:
            best, best_s = index, end_s
        arrival_s, took_s = kept[index]
        behind_s += took_s
        soonest_s = max(soonest_s, arrival_s + behind_s)
    return best, best_s
