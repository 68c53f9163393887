"""Groups of simulated instances that compute a long prompt together."""

from __future__ import annotations

import random
from dataclasses import replace

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from pdmesh.core.commands import Outcome
from pdmesh.model import InstanceId, Role
from pdmesh.policy.base import PolicyConfig
from pdmesh.policy.bundles import BUNDLES
from pdmesh.policy.latency import sequence_parallel
from pdmesh.sim.result import SimResult
from pdmesh.sim.workload import Arrival, Synthetic, synthetic
from pdmesh.testing.sim import BINARY_MODEL, simulate

GROUP_MODEL = sequence_parallel(BINARY_MODEL, 4, 2**-4)  # 1/2 s a step and 1/256 s a token
POLICY = PolicyConfig(
    chunk_tokens=16,
    latency=BINARY_MODEL,
    group_latency=GROUP_MODEL,
    group_chunk_tokens=256,
    long_prompt_tokens=128,
    prefill_step_s=1.0,
    slo_tpot_s=1.0,
)


def run(arrivals: list[Arrival], bundle: str, mixed: int = 4, group_size: int = 4, decode: int = 0) -> SimResult:
    return simulate(
        arrivals,
        mixed=mixed,
        decode=decode,
        bundle=bundle,
        policy=POLICY,
        group_size=group_size,
        group_model=GROUP_MODEL,
        num_kv_tokens=512,
    )


def test_a_long_prompt_takes_the_time_and_the_room_of_the_group() -> None:
    """1,024 tokens fit no instance of 512. Four chunks of 256 tokens take 1.5 s each; the leader then decodes."""
    result = run([Arrival(arrival_s=0.0, num_prompt_tokens=1024, num_output_tokens=3)], "fcfs")
    (request,) = result.requests
    assert request.outcome is Outcome.FINISHED
    assert request.token_times_s[0] == 6.0
    step_s = BINARY_MODEL.decode_a_s + BINARY_MODEL.decode_s
    assert list(request.token_times_s) == [6.0, 6.0 + step_s, 6.0 + 2 * step_s]
    assert request.prefill_id == request.decode_id == InstanceId("mixed-000")
    for instance in result.instances:
        assert [(step.start_s, step.end_s) for step in instance.steps if step.chunks] == [
            (0.0, 1.5),
            (1.5, 3.0),
            (3.0, 4.5),
            (4.5, 6.0),
        ]


def test_a_group_begins_when_its_last_member_has_come() -> None:
    short = Arrival(arrival_s=0.0, num_prompt_tokens=16, num_output_tokens=1)
    long = Arrival(arrival_s=0.125, num_prompt_tokens=256, num_output_tokens=1)
    result = run([short, long], "fcfs")
    assert [list(request.token_times_s) for request in result.requests] == [[0.5], [2.0]]


def test_without_groups_the_same_prompt_is_computed_alone() -> None:
    long = Arrival(arrival_s=0.0, num_prompt_tokens=256, num_output_tokens=1)
    result = run([long], "fcfs", group_size=0)
    assert sum(bool(instance.steps) for instance in result.instances) == 1


@settings(deadline=None, max_examples=60)
@given(seed=st.integers(0, 10_000), bundle=st.sampled_from(sorted(BUNDLES)), group_size=st.sampled_from([2, 3, 4]))
def test_every_request_ends_and_all_members_run_the_same_group_steps(seed: int, bundle: str, group_size: int) -> None:
    """Two groups and instances of their own, more than they can take at once."""
    shape = Synthetic(
        num_requests=30,
        requests_per_s=3.0,
        median_prompt_tokens=20,
        max_prompt_tokens=60,
        median_output_tokens=6,
        max_output_tokens=20,
        long_share=0.25,
        long_range=(128, 900),
    )
    arrivals = synthetic(shape, random.Random(seed))
    result = run(arrivals, bundle, mixed=2 * group_size + 1, group_size=group_size, decode=1)
    assert {request.outcome for request in result.requests} == {Outcome.FINISHED}
    long_ids = {r.request.request_id for r in result.requests if r.request.num_prompt_tokens >= 128}
    timelines = [
        [
            (step.start_s, step.end_s, [chunk for chunk in step.chunks if chunk.request_id in long_ids])
            for step in instance.steps
            if any(chunk.request_id in long_ids for chunk in step.chunks)
        ]
        for instance in result.instances
        if instance.role is Role.MIXED
    ]
    for first in (0, group_size):
        assert all(timeline == timelines[first] for timeline in timelines[first : first + group_size])
    assert not any(timelines[2 * group_size :])
    for request in result.requests:
        chunks = [
            c for i in result.instances for s in i.steps for c in s.chunks if c.request_id == request.request.request_id
        ]
        computed = {(chunk.start, chunk.num_tokens) for chunk in chunks}
        assert sum(num_tokens for _, num_tokens in computed) == request.request.num_prompt_tokens


@pytest.mark.parametrize("bundle", ["pecsched", "pdmesh"])
def test_a_short_prompt_does_not_wait_for_a_group(bundle: str) -> None:
    long = Arrival(arrival_s=0.0, num_prompt_tokens=1500, num_output_tokens=1)
    short = replace(long, arrival_s=0.25, num_prompt_tokens=16)
    result = run([long, short], bundle)
    assert result.requests[1].token_times_s[0] < result.requests[0].token_times_s[0]
    fcfs = run([long, short], "fcfs")
    assert result.requests[1].token_times_s[0] < fcfs.requests[1].token_times_s[0]
