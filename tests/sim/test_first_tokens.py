"""First tokens by a planner alone: queues are kept, and the table has the best of what was tried."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from pdmesh.policy.latency import TETRIS_A100_LLAMA_3_8B, ChunkShape, StepShape
from pdmesh.policy.sequence_parallel import ElasticPlanner, SequenceParallelPlanner
from pdmesh_lab.studies.first_tokens import (
    PromptArrival,
    first_tokens,
    first_tokens_by_price,
    improvement_table,
    poisson,
)
from pdmesh_lab.studies.planners import ChunkwisePlanner, FixedPlanner

LATENCY = TETRIS_A100_LLAMA_3_8B


def by(planner: SequenceParallelPlanner) -> Callable[[float], SequenceParallelPlanner]:
    return lambda _: planner


def test_prompts_wait_for_what_instances_were_given_before() -> None:
    one = first_tokens([PromptArrival(0.0, 8192)], 1, by(FixedPlanner(LATENCY)))[0]
    prompts = [PromptArrival(0.0, 8192), PromptArrival(0.1, 8192), PromptArrival(100.0, 8192)]
    assert first_tokens(prompts, 1, by(FixedPlanner(LATENCY))) == pytest.approx([one, 2 * one - 0.1, one])


def test_fixed_groups_serve_side_by_side() -> None:
    ttfts_s = first_tokens([PromptArrival(0.0, 32_768)] * 3, 16, by(FixedPlanner(LATENCY, 8)))
    assert ttfts_s == pytest.approx([ttfts_s[0], ttfts_s[0], 2 * ttfts_s[0]])


def test_a_planner_that_chooses_sizes_serves_many_lengths_sooner_than_fixed_groups() -> None:
    prompts = poisson([4_000, 16_000, 90_000], 3.0, 200, seed=1)
    fixed = first_tokens(prompts, 16, by(FixedPlanner(LATENCY, 8)))
    assert sum(first_tokens(prompts, 16, by(ElasticPlanner(LATENCY, 0.3)))) < 0.8 * sum(fixed)


def test_the_table_has_the_rate_of_the_least_mean_for_each_load() -> None:
    lengths = [4_000, 20_000, 60_000]
    planners = [(rate, ChunkwisePlanner(LATENCY, rate)) for rate in (0.05, 0.3, 0.7)]
    table = improvement_table(planners, 16, lengths, [4.0, 0.5], num_requests=100, seed=3)
    assert [per_s for per_s, _ in table.rows] == [0.5, 4.0]
    for per_s, best in table.rows:
        prompts = poisson(lengths, per_s, 100, seed=3)
        totals_s = {rate: sum(first_tokens(prompts, 16, by(planner))) for rate, planner in planners}
        assert totals_s[best] == min(totals_s.values())
    assert table.nearest(0.5) < table.nearest(4.0)


def alone_s(num_tokens: int) -> float:
    return LATENCY[1].step_s(StepShape((ChunkShape(num_tokens, 0),), 0, 0))


def by_price(prompts: list[PromptArrival], num_instances: int, target_s: float = float("inf")) -> list[float]:
    return first_tokens_by_price(prompts, num_instances, ElasticPlanner(LATENCY), alone_s, target_s)


def test_a_prompt_that_nobody_comes_after_takes_the_group_with_the_earliest_end() -> None:
    earliest_s = ElasticPlanner(LATENCY).plan(64_000, 0, (), [(0.0, f"p{index:02d}") for index in range(16)])[-1].end_s  # type: ignore[misc]
    assert by_price([PromptArrival(0.0, 64_000)], 16) == [earliest_s]


def test_who_waits_makes_instances_dear_so_that_each_takes_fewer() -> None:
    burst = [PromptArrival(0.0, 32_000)] * 16
    found = by_price(burst, 16)
    greedy = first_tokens(burst, 16, by(ElasticPlanner(LATENCY)))
    assert sum(found) < 0.75 * sum(greedy)
    assert found[0] < max(found), "the first one waits for nobody"


def test_no_improvement_rate_serves_as_well_as_prices_at_any_load() -> None:
    lengths = [4_000, 16_000, 90_000]
    for per_s in (0.5, 2.0, 4.0):
        prompts = poisson(lengths, per_s, 300, seed=5)
        rates = [sum(first_tokens(prompts, 16, by(ElasticPlanner(LATENCY, rate)))) for rate in (0.05, 0.2, 0.5, 0.7)]
        assert sum(by_price(prompts, 16)) <= 1.01 * min(rates)


def test_who_would_be_late_lets_those_pass_who_can_be_in_time_and_is_served_all_the_same() -> None:
    one_s = by_price([PromptArrival(0.0, 32_000)], 1)[0]
    prompts = [PromptArrival(0.0, 32_000), PromptArrival(0.1, 64_000), PromptArrival(0.2, 8_000)]
    in_order = by_price(prompts, 1)
    passed = by_price(prompts, 1, target_s=2 * one_s)
    assert passed[0] == in_order[0] == one_s
    assert passed[2] < 2 * one_s < in_order[2]
    assert passed[1] == pytest.approx(in_order[2] + 0.1), "the line is as long as before"
