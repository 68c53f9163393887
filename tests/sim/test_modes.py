"""Closed loops of clients, and batching modes on a simulated instance."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import groupby, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdmesh.policy.config import PolicyConfig
from pdmesh.policy.latency import PROFILES
from pdmesh_lab.sim.mesh import study_core
from pdmesh_lab.sim.result import SimResult
from pdmesh_lab.sim.simulator import SimConfig, Simulator
from pdmesh_lab.sim.workload import Arrival, ClosedLoop
from pdmesh_testing.examples import examples
from pdmesh_testing.sim import PHASES_PAY_MODEL, tiny_mesh, without_targets


def run(
    batching: str,
    *,
    clients: tuple[tuple[int, int], ...] = ((32, 32),),
    number: int = 600,
    think_s: float = 0.0,
    control_delay_s: float = 0.0,
) -> SimResult:
    rng = random.Random(1)
    arrivals = [
        Arrival(
            arrival_s=0.0,
            num_prompt_tokens=rng.randint(1, 128),
            num_output_tokens=1 + int(rng.expovariate(1 / 60)),
            max_tokens=1000,
        )
        for _ in range(number)
    ]
    policy = without_targets(batching)
    mesh = tiny_mesh({"mixed": 1}, num_kv_tokens=1 << 20, max_num_seqs=64)
    loop = ClosedLoop(num_clients=((0, clients[0][1]), *clients[1:]), think_s=think_s)
    config = SimConfig(control_delay_s=control_delay_s)
    core = study_core("pdmesh", policy, 0)
    return Simulator(core, mesh.instances(PHASES_PAY_MODEL), arrivals, config, closed_loop=loop).run()


def most_at_once(result: SimResult, from_s: float, until_s: float) -> int:
    spans = [(run.request.arrival_s, run.token_times_s[-1]) for run in result.requests]
    times = [at_s for span in spans for at_s in span if from_s <= at_s <= until_s]
    return max(sum(begin_s <= at_s < end_s for begin_s, end_s in spans) for at_s in times)


def test_a_closed_loop_keeps_so_many_requests_open_and_serves_all() -> None:
    result = run("mb", number=200)
    assert len(result.requests) == 200
    assert all(len(run.token_times_s) == run.num_output_tokens for run in result.requests)
    assert most_at_once(result, 0.0, 1e9) == 32


def test_clients_come_and_go_with_the_requests() -> None:
    result = run("mb", clients=((0, 8), (100, 24), (250, 4)), number=400)
    arrivals = [run.request.arrival_s for run in result.requests]
    assert most_at_once(result, 0.0, arrivals[90]) == 8
    assert most_at_once(result, arrivals[180], arrivals[240]) == 24
    assert most_at_once(result, arrivals[350], 1e9) == 4


def test_a_client_thinks_between_two_requests() -> None:
    result = run("mb", clients=((0, 1),), number=20, think_s=2.0)
    ends = [run.token_times_s[-1] for run in result.requests]
    begins = [run.request.arrival_s for run in result.requests][1:]
    assert [begin - end for begin, end in zip(begins, ends, strict=False)] == pytest.approx([2.0] * 19)


@pytest.mark.parametrize("control_delay_s", [0.0, 0.003])
def test_exclusive_steps_are_prefill_or_decode_and_residents_stand_still_in_a_prefill_phase(
    control_delay_s: float,
) -> None:
    result = run("eb", control_delay_s=control_delay_s)
    steps = result.instances[0].steps
    assert sum(bool(step.chunks) for step in steps) > 10
    assert not any(step.chunks and step.num_decodes for step in steps)
    phases = [bool(step.chunks) for step in steps]
    assert sum(before != after for before, after in pairwise(phases)) < len(steps)


@pytest.mark.parametrize("control_delay_s", [0.0, 0.001])
def test_a_phase_fills_the_seats_of_all_that_ended_with_one_step(control_delay_s: float) -> None:
    """Each is reported by itself, and so is who comes in its place: a phase does not begin with the first of them."""
    outputs = random.Random(3).choices((20, 90), k=1200)
    arrivals = [
        Arrival(arrival_s=0.0, num_prompt_tokens=40, num_output_tokens=output, max_tokens=1000) for output in outputs
    ]
    policy = replace(without_targets("eb"), eb_threshold=1 / 32)
    core, mesh = study_core("pdmesh", policy, 0), tiny_mesh({"mixed": 1}, num_kv_tokens=1 << 20, max_num_seqs=64)
    config, loop = SimConfig(control_delay_s=control_delay_s), ClosedLoop(num_clients=((0, 32),))
    result = Simulator(core, mesh.instances(PHASES_PAY_MODEL), arrivals, config, closed_loop=loop).run()
    ends_s = sorted(run.token_times_s[-1] for run in result.requests)
    num_phases = 0
    for phase, decodes in pairwise(result.instances[0].steps):
        if phase.chunks and not decodes.chunks and ends_s[100] < phase.start_s < ends_s[-100]:
            too_late = sum(phase.start_s - 1e-9 < end_s <= phase.start_s for end_s in ends_s)
            assert decodes.num_decodes == 32 - too_late
            num_phases += 1
    assert num_phases > 50


def test_a_long_history_beside_a_very_small_target_of_a_resident_goes_on() -> None:
    """Not even its smallest chunk keeps a phase within that target: it is computed beside the decodes."""
    model = replace(PHASES_PAY_MODEL, c_s=2e-6)  # a smallest chunk after 2,000 tokens takes 0.13 s
    rng = random.Random(4)
    arrivals = [
        Arrival(
            arrival_s=0.0,
            num_prompt_tokens=3000 if index == 600 else rng.randint(1, 64),
            num_output_tokens=1 + int(rng.expovariate(1 / 60)),
            max_tokens=1000,
            slo_tpot_s=0.1,
        )
        for index in range(1500)
    ]
    policy = replace(without_targets("ebplus"), latency=model, max_stall_s=0.1)
    core, mesh = study_core("pdmesh", policy, 0), tiny_mesh({"mixed": 1}, num_kv_tokens=1 << 20, max_num_seqs=64)
    loop = ClosedLoop(num_clients=((0, 32),))
    result = Simulator(core, mesh.instances(model), arrivals, closed_loop=loop).run()
    while_others_s = sorted(run.token_times_s[-1] for run in result.requests)[-100]
    assert result.requests[600].token_times_s[0] < while_others_s


def test_ebplus_finds_that_phases_are_faster_and_learns_lengths_that_nobody_told_it() -> None:
    ends = {mode: run(mode, number=2000).requests for mode in ("mb", "ebplus")}
    mixed_s, both_s = (max(run.token_times_s[-1] for run in runs) for runs in ends.values())
    assert both_s < 0.97 * mixed_s


def test_the_same_requests_give_the_same_run() -> None:
    first, second = run("ebplus", number=800), run("ebplus", number=800)
    assert [list(run.token_times_s) for run in first.requests] == [list(run.token_times_s) for run in second.requests]


def test_long_prompts_and_steps_without_room_for_prompts_do_not_halve_what_ebplus_does() -> None:
    """An A100 with steps of 50 ms, of which decodes leave a third: mixed steps have 200 tokens of prompts of 1,500."""
    rng = random.Random(5)
    arrivals = [
        Arrival(
            arrival_s=0.0,
            num_prompt_tokens=12_000 if index % 100 == 50 else rng.randint(1, 3000),
            num_output_tokens=1 + int(rng.expovariate(1 / 100)),
            max_tokens=1000,
        )
        for index in range(500)
    ]
    mesh = tiny_mesh({"mixed": 1}, num_kv_tokens=1 << 20, max_num_seqs=256)
    model = PROFILES["a100-llama3-8b"]

    def end_s(batching: str, max_stall_s: float | None = None) -> float:
        policy = PolicyConfig(latency=model, batching=batching)
        policy = policy if max_stall_s is None else replace(policy, max_stall_s=max_stall_s)
        core = study_core("pdmesh", policy, 0)
        loop = ClosedLoop(num_clients=((0, 48),))
        result = Simulator(core, mesh.instances(model), arrivals, closed_loop=loop).run()
        ends_s = sorted(run.token_times_s[-1] for run in result.requests)
        return ends_s[450] - ends_s[100]  # without what nobody has learnt yet, and the last few

    mixed_s, phases_s = end_s("mb"), end_s("eb")
    assert end_s("ebplus", max_stall_s=5.0) < 1.05 * phases_s, "with phases as long as those of eb"
    limited_s = end_s("ebplus")
    assert limited_s < 0.7 * mixed_s
    assert limited_s < 1.15 * phases_s, "what it costs that no phase takes longer than a fifth of a second"


@settings(max_examples=examples(12), deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 1 << 16),
    clients=st.integers(16, 64),
    mean_prompt=st.sampled_from([64, 300, 900]),
    max_stall_s=st.sampled_from([0.03, 0.08, 0.2]),
    target_s=st.sampled_from([None, 0.05, 0.3]),
    control_delay_s=st.sampled_from([0.0, 0.002]),
)
def test_no_prefill_phase_of_ebplus_stalls_residents_for_longer_than_its_limit(
    seed: int,
    clients: int,
    mean_prompt: int,
    max_stall_s: float,
    target_s: float | None,
    control_delay_s: float,
) -> None:
    """Whatever prompts come: a long one is computed in parts, and a resident's own target is a limit too."""
    rng = random.Random(seed)
    arrivals = [
        Arrival(
            arrival_s=0.0,
            num_prompt_tokens=min(4000, 1 + int(rng.expovariate(1 / mean_prompt))),
            num_output_tokens=1 + int(rng.expovariate(1 / 60)),
            max_tokens=1000,
            slo_tpot_s=target_s if rng.random() < 0.2 else None,
        )
        for _ in range(400)
    ]
    policy = replace(without_targets("ebplus"), max_stall_s=max_stall_s)
    mesh = tiny_mesh({"mixed": 1}, num_kv_tokens=1 << 20, max_num_seqs=64)
    core = study_core("pdmesh", policy, 0)
    config = SimConfig(control_delay_s=control_delay_s)
    loop = ClosedLoop(num_clients=((0, clients),))
    result = Simulator(core, mesh.instances(PHASES_PAY_MODEL), arrivals, config, closed_loop=loop).run()
    assert all(len(run.token_times_s) == run.num_output_tokens for run in result.requests)
    for began_s, ended_s, device_s in prefill_phases(result):
        stalled = [
            run.request.slo_tpot_s or max_stall_s
            for run in result.requests
            if run.token_times_s[0] < began_s - 0.1 and run.token_times_s[-1] > ended_s
        ]
        assert device_s <= min(stalled, default=math.inf) + 1e-9


def prefill_phases(result: SimResult) -> Iterator[tuple[float, float, float]]:
    """When each began and ended, and the time of its steps."""
    for is_phase, steps in groupby(result.instances[0].steps, key=lambda step: step.num_decodes == 0):
        if is_phase:
            phase = list(steps)
            yield phase[0].start_s, phase[-1].end_s, math.fsum(step.end_s - step.start_s for step in phase)
