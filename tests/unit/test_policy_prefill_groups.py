"""How the members of a group share a prompt."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from pdmesh.policy.latency import PROFILES, ChunkShape, LinearLatencyModel, StepShape
from pdmesh.policy.links import EqualLinks
from pdmesh.policy.prefill_groups import GroupPolicy, Schedule

BLOCK = 16


def a_group_policy(
    schedule: Schedule = Schedule.PARALLEL, *, latency: LinearLatencyModel = PROFILES["a100-llama3-8b"]
) -> GroupPolicy:
    return GroupPolicy(
        latency=latency,
        max_members=8,
        improvement_rate=0.1,
        links=EqualLinks(1e9),
        min_step_s=0.1,
        step_overhead=0.05,
        schedule=schedule,
    )


def step_s(group_policy: GroupPolicy, num_tokens: int, start: int) -> float:
    return group_policy.latency.step_s(StepShape((ChunkShape(num_tokens, start),), 0, 0)) if num_tokens else 0.0


BEGIN_S = st.lists(st.floats(0.0, 2.0), min_size=1, max_size=8)
STARTS = st.integers(0, 4000).map(lambda blocks: blocks * BLOCK)


def ends_of(group_policy: GroupPolicy, slices: list[int], start: int, begin_s: list[float]) -> list[float]:
    """When each is computed; of an empty one, when it would begin."""
    ends_s: list[float] = []
    for each_s, num in zip(begin_s, slices, strict=True):
        ends_s.append(each_s + step_s(group_policy, num, start))
        start += num
    return ends_s


@given(start=STARTS, num_tokens=st.integers(1, 20_000), begin_s=BEGIN_S)
def test_the_last_slices_are_all_that_is_left_and_end_together(
    start: int, num_tokens: int, begin_s: list[float]
) -> None:
    group_policy = a_group_policy()
    slices = group_policy.last_slices(start, num_tokens, begin_s, BLOCK)
    assert (len(slices), sum(slices)) == (len(begin_s), num_tokens)
    assert all(num % BLOCK == 0 <= num for num in slices[:-1])
    assert slices[-1] > 0
    ends_s = ends_of(group_policy, slices, start, begin_s)
    block_s = 2 * step_s(group_policy, BLOCK, start + num_tokens)
    computing = [end_s for end_s, num in zip(ends_s[:-1], slices[:-1], strict=True) if num]
    assert all(abs(end_s - max(computing)) < block_s for end_s in computing)
    if slices[-1] > BLOCK and computing:  # else it has what must be, however late it is
        assert ends_s[-1] > max(computing) - block_s
        assert ends_s[-1] < max(computing) + 2 * block_s


@given(start=STARTS, num_tokens=st.integers(1, 600), begin_s=BEGIN_S, lag_s=st.floats(0.0, 0.2))
def test_slices_that_others_follow_wait_for_nobody(
    start: int, num_tokens: int, begin_s: list[float], lag_s: float
) -> None:
    group_policy, num_tokens = a_group_policy(), num_tokens * BLOCK
    most = 4 * num_tokens
    slices = group_policy.slices(start, num_tokens, begin_s, BLOCK, lag_s, most)
    assert len(slices) == len(begin_s)
    assert all(num % BLOCK == 0 <= num for num in slices)
    assert slices[-1] > 0
    assert num_tokens <= sum(slices) <= most
    ends_s = ends_of(group_policy, slices, start, begin_s)
    block_s, token_s = 2 * step_s(group_policy, BLOCK, start + most), step_s(group_policy, 1, start + most)
    computing = [end_s for end_s, num in zip(ends_s, slices, strict=True) if num]
    if sum(slices) < most and slices[-1] > BLOCK:  # else the last one has what is left, or what must be
        for before_s, end_s in pairwise(computing):
            assert before_s + lag_s - token_s <= end_s < before_s + lag_s + block_s


def test_later_slices_are_shorter() -> None:
    slices = a_group_policy().last_slices(0, 32_768, [0.0] * 4, BLOCK)
    assert slices == sorted(slices, reverse=True)
    assert slices[0] > 1.1 * slices[-1]


def test_the_first_chunk_before_a_parallel_step_is_short_as_everybody_waits_for_it() -> None:
    in_turn, at_once = (
        a_group_policy(each).first_chunk_tokens(50_000, 2, 8192) for each in (Schedule.PIPELINED, Schedule.PARALLEL)
    )
    assert at_once < in_turn
    assert step_s(a_group_policy(), at_once, 0) <= 2 * a_group_policy().latency.a_s


def test_in_turn_there_are_no_more_members_than_layers() -> None:
    assert [a_group_policy(schedule).most_members(4) for schedule in Schedule] == [4, 8]
