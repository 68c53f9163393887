"""Plans for long prompts: Tetris's worked examples, laws of every plan, and ours held to the reference."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdmesh.model import InstanceId
from pdmesh.policy.latency import TETRIS_A100_LLAMA_3_8B, LinearLatencyModel, StepShape
from pdmesh.policy.sequence_parallel import (
    ElasticPlanner,
    FreeAt,
    PlannedChunk,
    SequenceParallelPlanner,
    tokens_within,
)
from pdmesh_lab.studies.planners import ChunkwisePlanner

LATENCY = TETRIS_A100_LLAMA_3_8B


def pool(*frees_s: float) -> list[FreeAt]:
    return [(free_s, InstanceId(f"p{index:03}")) for index, free_s in enumerate(frees_s)]


def of_size(size: int) -> ElasticPlanner:
    """Plan for groups of one size alone."""
    return ElasticPlanner({size: LATENCY[size]})


def after(queues: list[FreeAt], plan: tuple[PlannedChunk, ...]) -> list[FreeAt]:
    """The queues once a plan is dispatched."""
    ends = {name: chunk.end_s for chunk in plan for name in chunk.members}
    return [(ends.get(name, free_s), name) for free_s, name in queues]


@pytest.mark.parametrize("weights_s", [0.0, 6e-3])
@pytest.mark.parametrize(("c_s", "d_s"), [(0.0, 0.0), (3e-9, 1e-9)])
@given(history=st.integers(0, 100_000), budget_s=st.floats(0.0, 0.2))
def test_the_longest_chunk_within_a_budget(
    weights_s: float, c_s: float, d_s: float, history: int, budget_s: float
) -> None:
    model = LinearLatencyModel(a_s=1e-3, b_s=5e-5, c_s=c_s, d_s=d_s, weights_s=weights_s)
    found = tokens_within(model, history, budget_s)
    step_s = model.with_chunk_s(StepShape((), 0, 0), history)
    assert found == 0 or step_s(found) <= budget_s + 1e-9
    assert step_s(found + 1) > budget_s - 1e-9


@pytest.mark.parametrize(
    ("first_size", "second_size", "first_s", "second_s"),
    [
        (16, 8, 1.53, 1.84),
        (8, 8, 1.58, 1.31),
    ],
)
def test_a_long_and_a_shorter_prompt_on_16_busy_instances(
    first_size: int, second_size: int, first_s: float, second_s: float
) -> None:
    queues = pool(*[1.0] * 16)
    first = of_size(first_size).plan(32768, 0, (), queues)
    second = of_size(second_size).plan(16384, 0, (), after(queues, first))
    assert first[-1].end_s == pytest.approx(first_s, abs=0.07 * (first_s - 1))
    assert second[-1].end_s == pytest.approx(second_s, abs=0.07 * (second_s - 1))  # as well as the table is fitted


def check(plan: tuple[PlannedChunk, ...], num_left: int, queues: list[FreeAt], held: tuple[InstanceId, ...]) -> None:
    free = {name: free_s for free_s, name in queues}
    assert sum(chunk.num_tokens for chunk in plan) == num_left
    end_s = 0.0
    members: set[InstanceId] = set(held)
    for chunk in plan:
        assert chunk.num_tokens > 0
        assert members <= set(chunk.members), "a group leaves out who holds what came before"
        assert len(set(chunk.members)) == len(chunk.members)
        assert chunk.start_s >= max(free[name] for name in chunk.members) - 1e-9
        assert chunk.start_s >= end_s - 1e-9
        assert chunk.end_s > chunk.start_s
        members, end_s = set(chunk.members), chunk.end_s


queues_s = st.lists(st.floats(0, 8), min_size=1, max_size=24)


@given(frees_s=queues_s, num_tokens=st.integers(1, 200_000), rate=st.floats(0, 0.75), data=st.data())
def test_plans_of_every_planner_keep_the_laws_and_ours_is_never_later(
    frees_s: list[float], num_tokens: int, rate: float, data: st.DataObject
) -> None:
    queues = pool(*frees_s)
    num_done = data.draw(st.integers(0, num_tokens - 1))
    num_held = data.draw(st.sampled_from([size for size in (1, 2, 4, 8, 16) if size <= len(queues)])) if num_done else 0
    held = tuple(name for _, name in random.Random(num_done).sample(queues, num_held))
    ends_s: dict[str, float] = {}
    planners: dict[str, SequenceParallelPlanner] = {
        "reference": ChunkwisePlanner(LATENCY, rate),
        "ours": ElasticPlanner(LATENCY, rate),
        "one chunk": ChunkwisePlanner(LATENCY, rate, single_chunk=True),
    }
    for name, planner in planners.items():
        plan = planner.plan(num_tokens, num_done, held, queues)
        check(plan, num_tokens - num_done, queues, held)
        ends_s[name] = plan[-1].end_s
    assert ends_s["ours"] <= ends_s["reference"] + 1e-9
    assert ends_s["reference"] <= ends_s["one chunk"] + 1e-9


@pytest.mark.parametrize("seed", range(20))
def test_no_chain_of_sizes_is_better_than_ours(seed: int) -> None:
    rng = random.Random(seed)
    queues = pool(*(rng.expovariate(1.0) for _ in range(16)))
    num_tokens = rng.randrange(1000, 150_000)
    ours = ElasticPlanner(LATENCY).plan(num_tokens, 0, (), queues)[-1].end_s
    line = sorted(queues)
    frees_s = {size: line[size - 1][0] for size in LATENCY}
    for length in range(1, 6):
        for chain in itertools.combinations(sorted(LATENCY), length):
            done = 0
            for size, following in itertools.pairwise(chain):
                model, budget_s = LATENCY[size], frees_s[following] - frees_s[size]
                low, high = 0, num_tokens - done - 1
                while low < high:  # the longest chunk that ends when the next group is free, by bisection
                    middle = (low + high + 1) // 2
                    took_s = model.a_s + middle * (model.b_s + model.c_s * done + model.d_s * middle)
                    low, high = (middle, high) if took_s <= budget_s else (low, middle - 1)
                done += low
            model, left = LATENCY[chain[-1]], num_tokens - done
            end_s = frees_s[chain[-1]] + model.a_s + left * (model.b_s + model.c_s * done + model.d_s * left)
            assert ours <= end_s + 1e-3, chain


def test_a_size_that_gains_too_little_is_left_to_others() -> None:
    queues = pool(*[0.0] * 16)
    assert len(ElasticPlanner(LATENCY, 0.0).plan(32768, 0, (), queues)[-1].members) == 16
    assert len(ElasticPlanner(LATENCY, 0.3).plan(32768, 0, (), queues)[-1].members) < 16
    assert len(ElasticPlanner(LATENCY, 0.0).plan(128, 0, (), queues)[-1].members) <= 2


def test_idle_instances_begin_while_the_others_of_a_larger_group_are_busy() -> None:
    plan = ElasticPlanner(LATENCY).plan(100_000, 0, (), pool(0, 0, 0, 0, 3, 3, 3, 3))
    assert [len(chunk.members) for chunk in plan] == [4, 8]
    assert plan[0].start_s == 0
    # The paper's search never asks for more than a single chunk would take, and here that is four.
    reference = ChunkwisePlanner(LATENCY).plan(100_000, 0, (), pool(0, 0, 0, 0, 3, 3, 3, 3))
    assert [len(chunk.members) for chunk in reference] == [4]


def test_a_pool_without_a_size_that_is_known_is_named() -> None:
    with pytest.raises(ValueError, match="no group of 3 to 3 instances"):
        ElasticPlanner({2: LATENCY[2]}).plan(100, 10, ("p000", "p001", "p002"), pool(0, 0, 0))  # type: ignore[arg-type]


def test_ours_is_never_later_than_the_reference_with_128_instances() -> None:
    a_s, b_s, c_s, d_s, *_ = LATENCY[1].coefficients
    latency = {
        size: LinearLatencyModel(a_s=a_s + 0.002 * size, b_s=b_s / size, c_s=c_s / size, d_s=d_s / size)
        for size in (1, 2, 4, 8, 16, 32, 64, 128)
    }
    rng = random.Random(7)
    for _ in range(200):
        queues = pool(*(rng.choice((rng.uniform(0, 5), rng.expovariate(2.0), 0.0)) for _ in range(128)))
        num_tokens = rng.randrange(4096, 1_000_000)
        ours = ElasticPlanner(latency, 0.05).plan(num_tokens, 0, (), queues)
        reference = ChunkwisePlanner(latency, 0.05).plan(num_tokens, 0, (), queues)
        assert ours[-1].end_s <= reference[-1].end_s + 1e-9
