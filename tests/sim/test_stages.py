"""Instances of several stages, simulated under the core: chunks follow each other through them, decodes are divided."""

from __future__ import annotations

import random
from bisect import bisect_left, bisect_right
from dataclasses import replace
from itertools import pairwise

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from pdmesh.kv_layout import KvLayout
from pdmesh.policy.config import PolicyConfig
from pdmesh.policy.latency import LinearLatencyModel, StepShape
from pdmesh_lab.sim.faults import Death
from pdmesh_lab.sim.mesh import MeshShape, study_core
from pdmesh_lab.sim.result import SimResult
from pdmesh_lab.sim.simulator import SimConfig, Simulator
from pdmesh_lab.sim.workload import Arrival, Synthetic, synthetic
from pdmesh_testing.examples import examples

#: 16K tokens take 8.6 s alone.
STEPS = LinearLatencyModel(
    a_s=0.004, b_s=4e-4, c_s=1.5e-8, d_s=7.5e-9, decode_a_s=0.004, decode_s=4e-4, decode_context_s=1e-8
)
LAYOUT = KvLayout(num_layers=16, num_kv_heads=2, head_dim=16, block_size=16, dtype="bfloat16")
MESH = MeshShape(num_prefill=1, num_decode=1, num_mixed=0, kv_layout=LAYOUT, num_kv_tokens=1 << 17)


def simulated(
    mesh: MeshShape, arrivals: list[Arrival], *, bundle: str = "pdmesh", config: SimConfig | None = None
) -> SimResult:
    core = study_core(bundle, PolicyConfig(latency=STEPS), seed=0)
    return Simulator(core, mesh.instances(STEPS), arrivals, config).run()


def alone(num_prompt_tokens: int, num_output_tokens: int = 1) -> list[Arrival]:
    return [Arrival(arrival_s=0.0, num_prompt_tokens=num_prompt_tokens, num_output_tokens=num_output_tokens)]


@pytest.mark.parametrize(("num_stages", "target"), [(2, 1.85), (4, 3.6), (8, 7.0)])
def test_a_long_prompt_passes_stages_nearly_as_many_times_as_fast(num_stages: int, target: float) -> None:
    one, several = (
        simulated(replace(MESH, prefill_stages=n), alone(16384)).requests[0].token_times_s[0] for n in (1, num_stages)
    )
    assert target <= one / several < num_stages


def test_a_prompt_of_one_chunk_passes_all_stages_one_after_the_other() -> None:
    run = simulated(replace(MESH, prefill_stages=4), alone(16), bundle="fcfs").requests[0]
    assert run.token_times_s[0] == pytest.approx(STEPS.a_s + 16 * STEPS.b_s + 16 * 16 * STEPS.d_s)


def test_a_short_prompt_enters_between_two_chunks_of_a_long_one() -> None:
    arrivals = [*alone(100_000), Arrival(arrival_s=1.0, num_prompt_tokens=100, num_output_tokens=1)]
    long, short = simulated(replace(MESH, prefill_stages=4), arrivals).requests
    assert long.token_times_s[0] > 20
    assert short.token_times_s[0] < 2.0


def test_a_lone_decode_takes_no_less_and_many_are_dealt_out() -> None:
    """Eight decodes pass four stages two at a time: a round of all takes as long as a step of two."""
    mesh = replace(MESH, decode_stages=4)
    for num_requests, num_decodes in ((1, 1), (8, 2)):
        arrivals = alone(64, 200) * num_requests
        last = simulated(mesh, arrivals).requests[-1].token_times_s
        step_s = STEPS.step_s(StepShape((), num_decodes, num_decodes * 200))
        assert (last[-1] - last[-51]) / 50 == pytest.approx(step_s, rel=0.02)


@pytest.mark.parametrize("num_stages", [2, 3])
@pytest.mark.parametrize("bundle", ["fcfs", "medha", "pdmesh"])
@given(seed=st.integers(0, 1 << 16))
@settings(deadline=None, max_examples=examples(8))
def test_no_resident_waits_longer_than_three_rounds_beside_a_long_prompt(
    bundle: str, num_stages: int, seed: int
) -> None:
    """The last residents before the prompt may end in the middle of a round of planned steps."""
    rng = random.Random(seed)
    times_s = [rng.uniform(0, 1.0) for _ in range(6)] + [rng.uniform(3.2, 10.0) for _ in range(6)]
    arrivals = [
        Arrival(arrival_s=time_s, num_prompt_tokens=rng.randint(1, 200), num_output_tokens=rng.randint(2, 40))
        for time_s in times_s
    ]
    arrivals += [Arrival(arrival_s=3.0, num_prompt_tokens=60_000, num_output_tokens=4)]
    arrivals.sort(key=lambda arrival: arrival.arrival_s)
    mesh = replace(MESH, num_prefill=0, num_decode=0, num_mixed=1, prefill_stages=num_stages)
    result = simulated(mesh, arrivals, bundle=bundle)
    starts_s = [step.start_s for step in result.instances[0].steps]
    for run in result.requests:
        for before_s, after_s in pairwise(run.token_times_s):
            num_steps = bisect_left(starts_s, after_s) - bisect_right(starts_s, before_s)
            assert num_steps <= 3 * num_stages, f"{num_steps} steps between two tokens"


@pytest.mark.parametrize("num_mixed", [0, 2])
@pytest.mark.parametrize("bundle", ["fcfs", "medha", "pecsched", "pdmesh"])
def test_all_requests_get_all_of_their_tokens_once_also_when_instances_die(bundle: str, num_mixed: int) -> None:
    num_split = 0 if num_mixed else 2
    mesh = replace(
        MESH, num_prefill=num_split, num_decode=num_split, num_mixed=num_mixed, prefill_stages=3, decode_stages=2
    )
    shape = Synthetic(
        num_requests=60, requests_per_s=6, long_share=0.1, long_range=(4000, 20_000), median_output_tokens=20
    )
    arrivals = synthetic(shape, random.Random(1))
    names = [profile.instance_id for profile, _ in mesh.instances(STEPS)]
    deaths = [Death(name, 2.0 + 2 * index, 1.0) for index, name in enumerate(names)]
    result = simulated(mesh, arrivals, bundle=bundle, config=SimConfig(deaths=deaths, events_between_checks=50))
    for run, arrival in zip(result.requests, arrivals, strict=True):
        assert len(run.token_times_s) == arrival.num_output_tokens
        assert list(run.token_times_s) == sorted(run.token_times_s)
    for instance in result.instances:
        ends_s = [step.end_s for step in instance.steps]
        starts_s = [step.start_s for step in instance.steps]
        assert all(start >= end - 1e-9 for end, start in zip(ends_s, starts_s[1:], strict=False))
