"""The bound of Tetris's table: nobody takes less work, and nobody has fewer late ones on one server."""

from __future__ import annotations

import random
from itertools import combinations
from pathlib import Path
from types import ModuleType

import pytest

from pdmesh.policy.latency import TETRIS_A100_LLAMA_3_8B
from pdmesh.policy.sequence_parallel import ElasticPlanner
from pdmesh_lab.studies.first_tokens import PromptArrival
from pdmesh_testing.scripts import load_script

LATENCY = TETRIS_A100_LLAMA_3_8B


@pytest.fixture(scope="module")
def bound() -> ModuleType:
    path = Path(__file__).parents[2] / "benchmarks" / "tetris_bound.py"
    return load_script(path)


def fewest_late(prompts: list[PromptArrival], work_s: float, limit_s: float) -> int:
    """By trying who is left out."""
    for late in range(len(prompts) + 1):
        for left_out in combinations(range(len(prompts)), late):
            end_s, is_possible = 0.0, True
            for index, (arrival_s, num_tokens) in enumerate(prompts):
                if index not in left_out:
                    end_s = max(end_s, arrival_s) + num_tokens * work_s
                    is_possible &= end_s <= arrival_s + limit_s
            if is_possible:
                return late
    raise AssertionError("with nobody left in, nobody is late")


@pytest.mark.parametrize("seed", range(60))
def test_the_fewest_late_are_those_of_every_choice(bound: ModuleType, seed: int) -> None:
    rng = random.Random(seed)
    now_s, prompts = 0.0, list[PromptArrival]()
    for _ in range(9):
        now_s += rng.expovariate(0.5)
        prompts.append(PromptArrival(now_s, rng.randint(1, 12)))
    limit_s = rng.uniform(6, 25)
    assert bound.num_late(prompts, lambda num_tokens: 0.5 * num_tokens, limit_s) == fewest_late(prompts, 0.5, limit_s)


@pytest.mark.parametrize("seed", range(40))
def test_no_plan_takes_less_than_the_least_work(bound: ModuleType, seed: int) -> None:
    rng = random.Random(seed)
    least_work_s = bound.least_work(LATENCY)
    num_tokens = rng.randint(100, 200_000)
    pool = [(rng.choice((0.0, rng.expovariate(0.3))), f"p{index:02d}") for index in range(16)]
    plan = ElasticPlanner(LATENCY).plan(num_tokens, 0, (), pool, price=rng.choice((0.0, 0.1, 3.0)))  # type: ignore[arg-type]
    work_s = sum(len(chunk.members) * (chunk.end_s - chunk.start_s) for chunk in plan)
    assert least_work_s(num_tokens) <= work_s * (1 + 1e-9)
    alone = [size * (model.a_s + num_tokens * (model.b_s + model.d_s * num_tokens)) for size, model in LATENCY.items()]
    assert 0.9 * min(alone) <= least_work_s(num_tokens) <= min(alone) * (1 + 1e-9), "it is not far below what there is"
