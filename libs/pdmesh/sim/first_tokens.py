"""First tokens by a planner alone: prompts are spread as they come, and instances do what they are given in order.

No steps, no decodes, no preemption, and every chunk takes what Eq. 1 says: what Tetris's own simulator does, which
finds the best improvement rates (§6). `pdmesh.sim.simulator` is the one that drives the scheduling core.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import NamedTuple

from pdmesh.model import InstanceId
from pdmesh.policy.improvement import ImprovementTable
from pdmesh.policy.sequence_parallel import SequenceParallelPlanner


class Prompt(NamedTuple):
    """One that comes ``arrival_s`` after the first."""

    arrival_s: float
    num_tokens: int


def poisson(lengths: Sequence[int], requests_per_s: float, num_requests: int, seed: int) -> list[Prompt]:
    """Prompts of lengths drawn from ``lengths``, at random times."""
    rng = random.Random(seed)
    prompts: list[Prompt] = []
    now_s = 0.0
    for _ in range(num_requests):
        prompts.append(Prompt(now_s, rng.choice(lengths)))
        now_s += rng.expovariate(requests_per_s)
    return prompts


def first_tokens(
    prompts: Sequence[Prompt], num_instances: int, planner_at: Callable[[float], SequenceParallelPlanner]
) -> list[float]:
    """Each prompt's time to first token; ``planner_at`` is asked at every arrival who plans it."""
    frees_s = {InstanceId(f"prefill-{index:03d}"): 0.0 for index in range(num_instances)}
    ttfts_s: list[float] = []
    for now_s, num_tokens in prompts:
        pool = [(max(0.0, free_s - now_s), name) for name, free_s in frees_s.items()]
        plan = planner_at(now_s).plan(num_tokens, 0, (), pool)
        for chunk in plan:
            for name in chunk.members:
                frees_s[name] = now_s + chunk.end_s
        ttfts_s.append(plan[-1].end_s)
    return ttfts_s


def improvement_table(
    planners: Sequence[tuple[float, SequenceParallelPlanner]],
    num_instances: int,
    lengths: Sequence[int],
    requests_per_s: Sequence[float],
    *,
    num_requests: int = 400,
    seed: int = 0,
) -> ImprovementTable:
    """For each of ``requests_per_s`` the improvement rate, each with its planner, of the least mean TTFT.

    All see the same prompts. Of equal ones the first is taken.
    """
    rows: list[tuple[float, float]] = []
    for arrivals_per_s in sorted(requests_per_s):
        prompts = poisson(lengths, arrivals_per_s, num_requests, seed)
        totals_s = {rate: sum(first_tokens(prompts, num_instances, _always(planner))) for rate, planner in planners}
        rows.append((arrivals_per_s, min(totals_s, key=totals_s.__getitem__)))
    return ImprovementTable(tuple(rows))


def _always(planner: SequenceParallelPlanner) -> Callable[[float], SequenceParallelPlanner]:
    return lambda _: planner
