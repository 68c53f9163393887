"""Groups of a fixed size that simulated instances form for each long prompt: PecSched's, and its baselines'."""

from __future__ import annotations

import itertools
import random
from collections import defaultdict
from dataclasses import replace

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from pdmesh.core.commands import Outcome
from pdmesh.errors import ConfigError
from pdmesh.model import InstanceId
from pdmesh.policy.bundles import make_bundle
from pdmesh.policy.config import PolicyConfig
from pdmesh_lab.sim.mesh import study_core
from pdmesh_lab.sim.result import SimResult
from pdmesh_lab.sim.simulator import SimConfig, Simulator
from pdmesh_lab.sim.workload import Arrival, Synthetic, synthetic
from pdmesh_testing.examples import examples
from pdmesh_testing.sim import TINY_LAYOUT, UNEVEN_MODEL, tiny_mesh

POLICY = PolicyConfig(
    chunk_tokens=64,
    latency=UNEVEN_MODEL,
    long_prompt_tokens=128,
    prefill_step_s=0.3,
    slo_tpot_s=1.0,
    link_bytes_per_s=1e12,
    sequence_parallel="parallel",
)
IN_GROUPS = (
    "fcfs",
    "pdmesh",
    "short-first",
    "reservation",
    "pecsched",
    "pecsched-no-preemption",
    "pecsched-no-disaggregation",
    "pecsched-no-colocation",
)
LONG = Arrival(arrival_s=0.0, num_prompt_tokens=2048, num_output_tokens=3)


def run(
    arrivals: list[Arrival],
    bundle: str,
    *,
    mixed: int = 4,
    decode: int = 0,
    policy: PolicyConfig = POLICY,
    group_size: int = 4,
    reserved: int = 0,
    config: SimConfig | None = None,
) -> SimResult:
    shape = tiny_mesh({"mixed": mixed, "decode": decode}, num_kv_tokens=16_384)
    shape = replace(shape, kv_layout=replace(TINY_LAYOUT, num_layers=8), joins_groups=True)
    core = study_core(bundle, replace(policy, group_size=group_size, reserved_instances=reserved), 0)
    config = config or SimConfig(port_bytes_per_s=1e12)
    return Simulator(core, shape.instances(UNEVEN_MODEL), arrivals, config).run()


def computed_by(result: SimResult, index: int) -> dict[InstanceId, int]:
    """Who computed how many of its tokens."""
    request_id, found = result.requests[index].request.request_id, defaultdict[InstanceId, int](int)
    for instance in result.instances:
        for step in instance.steps:
            for chunk in step.chunks:
                if chunk.request_id == request_id:
                    found[instance.instance_id] += chunk.num_tokens
    return dict(found)


def span_s(result: SimResult, index: int) -> tuple[float, float]:
    """From its first step to its last."""
    request_id = result.requests[index].request.request_id
    steps = [s for i in result.instances for s in i.steps if any(c.request_id == request_id for c in s.chunks)]
    return min(step.start_s for step in steps), max(step.end_s for step in steps)


@pytest.mark.parametrize("bundle", IN_GROUPS)
@pytest.mark.parametrize("schedule", ["parallel", "pipelined"])
def test_a_group_computes_a_long_prompt_together_and_its_leader_decodes(bundle: str, schedule: str) -> None:
    policy = replace(POLICY, sequence_parallel=schedule)
    alone_s = run([LONG], bundle, policy=replace(policy, max_group_members=1), group_size=1).requests[0].ttft_s
    result = run([LONG], bundle, policy=policy)
    (request,) = result.requests
    assert request.outcome is Outcome.FINISHED
    assert request.prefill_id == request.decode_id
    computed = computed_by(result, 0)
    assert len(computed) == 4
    assert sum(computed.values()) == 2048
    assert alone_s is not None
    assert request.ttft_s is not None
    assert alone_s / request.ttft_s > 3.0


def test_without_a_size_the_same_prompt_is_computed_alone() -> None:
    assert len(computed_by(run([LONG], "fcfs", group_size=1), 0)) == 1


def test_where_there_are_fewer_instances_all_of_them_are_the_group() -> None:
    assert len(computed_by(run([LONG], "pecsched", mixed=3), 0)) == 3


def test_instances_that_cannot_compute_together_compute_it_alone() -> None:
    shape = tiny_mesh({"mixed": 4}, num_kv_tokens=16_384)
    core = study_core("pecsched", replace(POLICY, group_size=4), 0)
    result = Simulator(core, shape.instances(UNEVEN_MODEL), [LONG]).run()
    assert len(computed_by(result, 0)) == 1


def test_a_steps_waiting_for_the_others_of_its_parallel_step_is_no_computing() -> None:
    """A parallel step waits in each layer, so it ends that much later, which teaches the latency model nothing."""
    near, far = (
        run([LONG], "pecsched"),
        run([LONG], "pecsched", config=SimConfig(port_bytes_per_s=1e12, parallel_step_s=0.125)),
    )
    num_steps = len(far.instances[0].steps)
    assert (far.requests[0].ttft_s or 0) - (near.requests[0].ttft_s or 0) > 0.1 * 0.125 * num_steps
    steps = [step for instance in far.instances for step in instance.steps if step.chunks]
    assert sum(step.waited_s for step in steps) >= 0.125 * len(steps) / 2
    assert sum(step.duration_s for step in steps) == pytest.approx(
        sum(step.duration_s for instance in near.instances for step in instance.steps if step.chunks), rel=0.02
    )


def test_the_next_prompts_group_is_formed_when_enough_are_free_again() -> None:
    result = run([LONG, replace(LONG, arrival_s=0.01), replace(LONG, arrival_s=0.02)], "fcfs", mixed=5)
    for first, second in itertools.pairwise(range(3)):
        assert span_s(result, first)[1] <= span_s(result, second)[0]
        assert len(computed_by(result, second)) == 4
    two = run([LONG, replace(LONG, arrival_s=0.01)], "fcfs", mixed=8)
    assert not set(computed_by(two, 0)) & set(computed_by(two, 1))
    assert span_s(two, 1)[0] < span_s(two, 0)[1]


def test_first_come_first_served_convoys_behind_a_group_and_pecsched_does_not() -> None:
    short = replace(LONG, arrival_s=0.4, num_prompt_tokens=16)
    ttft_s = {bundle: run([LONG, short], bundle).requests[1].ttft_s or 0.0 for bundle in IN_GROUPS}
    long_s = run([LONG], "fcfs").requests[0].ttft_s or 0.0
    assert ttft_s["fcfs"] > long_s - 0.4
    assert ttft_s["pecsched"] < 0.2, "it interrupts a step of the group between two layers"
    assert ttft_s["pecsched-no-preemption"] > long_s - 0.5


def test_a_priority_for_short_ones_starts_no_group_where_anybody_has_work() -> None:
    short = [Arrival(arrival_s=0.1 * n, num_prompt_tokens=16, num_output_tokens=20) for n in range(20)]
    result = run([*short[:2], replace(LONG, arrival_s=0.15), *short[2:]], "short-first")
    assert span_s(result, 2)[0] >= max(result.requests[index].token_times_s[-1] for index in range(21) if index != 2)


def test_a_reserved_pool_is_not_for_short_prompts_and_the_rest_not_for_long_ones() -> None:
    short = [Arrival(arrival_s=0.1 * n, num_prompt_tokens=16, num_output_tokens=2) for n in range(20)]
    result = run([LONG, *short], "reservation", mixed=4, group_size=2, reserved=2)
    pool = {InstanceId("mixed-000"), InstanceId("mixed-001")}
    assert set(computed_by(result, 0)) == pool
    assert not pool & set().union(*(computed_by(result, index) for index in range(1, 21)))
    with pytest.raises(ConfigError, match=r"policy\.reserved_instances is 2: must be at least policy\.group_size, 4"):
        make_bundle("reservation", replace(POLICY, group_size=4, reserved_instances=2))


def test_a_group_goes_on_beside_decodes_of_its_members() -> None:
    """Without disaggregation short prompts decode on members, at the pace that they may."""
    policy = replace(POLICY, slo_tpot_s=0.15)
    short = [Arrival(arrival_s=0.2 + 0.1 * n, num_prompt_tokens=16, num_output_tokens=20) for n in range(8)]
    result = run([LONG, *short], "pecsched-no-disaggregation", policy=policy)
    alone = run([LONG], "pecsched-no-disaggregation", policy=policy)
    assert any(step.num_decodes and step.chunks for instance in result.instances for step in instance.steps)
    assert (result.requests[0].ttft_s or 0) < 2 * (alone.requests[0].ttft_s or 0)
    for request in result.requests[1:]:
        pace_s = (request.token_times_s[-1] - request.token_times_s[0]) / (len(request.token_times_s) - 1)
        assert pace_s < 0.25


@settings(deadline=None, max_examples=examples(40))
@given(
    seed=st.integers(0, 10_000),
    bundle=st.sampled_from(IN_GROUPS),
    group_size=st.sampled_from([2, 3, 4]),
    schedule=st.sampled_from(["parallel", "pipelined"]),
    control_delay_s=st.sampled_from([0.0, 0.003]),
)
def test_every_request_ends_and_no_instance_is_in_two_groups(
    seed: int, bundle: str, group_size: int, schedule: str, control_delay_s: float
) -> None:
    """Room for two groups and a little more, with more to do than they can at once; the core's state balance."""
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
    result = run(
        synthetic(shape, random.Random(seed)),
        bundle,
        mixed=2 * group_size + 1,
        group_size=group_size,
        decode=1,
        policy=replace(POLICY, sequence_parallel=schedule),
        config=SimConfig(port_bytes_per_s=1e7, control_delay_s=control_delay_s, events_between_checks=20),
    )
    assert {request.outcome for request in result.requests} == {Outcome.FINISHED}
    busy: dict[InstanceId, list[tuple[float, float]]] = defaultdict(list)
    for index, request in enumerate(result.requests):
        computed = computed_by(result, index)
        assert sum(computed.values()) == request.request.num_prompt_tokens
        if request.request.num_prompt_tokens < 128:
            assert len(computed) == 1
            continue
        assert len(computed) <= group_size
        for name in computed:
            steps = next(i.steps for i in result.instances if i.instance_id == name)
            own = [s for s in steps if any(c.request_id == request.request.request_id for c in s.chunks)]
            busy[name].append((own[0].start_s, own[-1].end_s))
    for spans in busy.values():
        for (_, end_s), (start_s, _) in itertools.pairwise(sorted(spans)):
            assert end_s <= start_s
