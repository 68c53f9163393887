"""The simulator: one story by hand, and laws of every run."""

from __future__ import annotations

import itertools
import json
import random
from collections import Counter
from dataclasses import asdict, replace
from itertools import permutations

import pytest

from pdmesh.core.commands import Outcome
from pdmesh.kv_layout import KvLayout
from pdmesh.model import Role
from pdmesh.policy.bundles import BUNDLE_NAMES
from pdmesh.policy.config import PolicyConfig
from pdmesh.policy.latency import LinearLatencyModel
from pdmesh_lab.sim.mesh import MeshShape, host_name, study_core
from pdmesh_lab.sim.perfetto import chrome_trace
from pdmesh_lab.sim.result import SimResult, StepSpan
from pdmesh_lab.sim.simulator import SimConfig, Simulator
from pdmesh_lab.sim.workload import Arrival, Synthetic, synthetic
from pdmesh_testing.sim import BINARY_MODEL, InstanceCounts, simulate

MESHES: list[InstanceCounts] = [
    {"prefill": 1, "decode": 1},
    {"prefill": 2, "decode": 3},
    {"mixed": 2},
    {"prefill": 2, "mixed": 1},
]


def a_workload(seed: int, num_requests: int = 60) -> list[Arrival]:
    """More than a tiny mesh can take at once; one prompt in eight is long."""
    shape = Synthetic(
        num_requests=num_requests,
        requests_per_s=1.5,
        median_prompt_tokens=20,
        median_output_tokens=6,
        max_prompt_tokens=60,
        max_output_tokens=40,
        long_share=0.125,
        long_range=(200, 500),
    )
    return synthetic(shape, random.Random(seed))


def as_bytes(result: SimResult) -> bytes:
    requests = [
        [run.request.request_id, run.outcome, run.started_s, list(run.token_times_s), run.num_preemptions]
        for run in result.requests
    ]
    return json.dumps([requests, chrome_trace({"run": result})]).encode()


@pytest.mark.parametrize("max_decode_steps", [1, 3, 128])
def test_a_story_by_hand(max_decode_steps: int) -> None:
    """Two requests on one prefill and one decode instance.

    ======  =====================================================================================================
    0       r0 (16 tokens) begins; its first layer, 1,024 bytes, moves at 1,024 B/s
    0.25    r1 (8 tokens) arrives and is planned behind it
    0.5     r0 is computed: its first token; 512 + 1,024 bytes are left. r1 begins. They share the ports from here
    0.875   r1 is computed; 320 + 512 bytes are left of it, at 512 B/s
    2.5     r1 lands and decodes alone: 9/64 s a step. r0 has 512 bytes left, now at 1,024 B/s
    3.0     r0 lands during r1's fourth step, which ends at 2.5 + 36/64
    3.0625  both decode: 10/64 s. r1 has its last token
    3.21875 r0 alone: 9/64 s
    ======  =====================================================================================================
    """
    arrivals = [
        Arrival(arrival_s=0.0, num_prompt_tokens=16, num_output_tokens=3),
        Arrival(arrival_s=0.25, num_prompt_tokens=8, num_output_tokens=6),
    ]
    config = SimConfig(port_bytes_per_s=1024, max_decode_steps=max_decode_steps)
    result = simulate(arrivals, prefill=1, decode=1, config=config)
    r0, r1 = result.requests
    assert list(r0.token_times_s) == [0.5, 3.21875, 3.359375]
    assert list(r1.token_times_s) == [0.875, 2.640625, 2.78125, 2.921875, 3.0625, 3.21875]
    assert (r0.started_s, r1.started_s) == (0.0, 0.5)
    assert (r0.ttft_s, r1.ttft_s) == (0.5, 0.625)
    assert (r0.exposed_s, r1.exposed_s) == (2.5, 1.625)
    assert (r0.jct_s, r1.jct_s) == (3.359375, 2.96875)
    assert [run.num_preemptions for run in result.requests] == [0, 0]
    prefill, decode = result.instances
    assert [(step.start_s, step.end_s) for step in prefill.steps] == [(0.0, 0.5), (0.5, 0.875)]
    assert decode.steps == [
        StepSpan(2.5, 3.0625, (), 1, 4),
        StepSpan(3.0625, 3.21875, (), 2, 1),
        StepSpan(3.21875, 3.359375, (), 1, 1),
    ]


def test_a_mixed_instance_decodes_beside_chunks() -> None:
    arrivals = [
        Arrival(arrival_s=0.0, num_prompt_tokens=16, num_output_tokens=2),
        Arrival(arrival_s=0.25, num_prompt_tokens=16, num_output_tokens=1),
    ]
    r0, r1 = simulate(arrivals, mixed=1).requests
    assert list(r0.token_times_s) == [0.5, 1.015625]  # its decode rides on r1's chunk: 1/64 s more
    assert list(r1.token_times_s) == [1.015625]
    assert r0.exposed_s is None


#: `pdmesh` interrupts a prompt of 32 tokens or more; steps of up to 1.25 s.
WITH_INTERRUPTIONS = PolicyConfig(latency=BINARY_MODEL, long_prompt_tokens=32, prefill_step_s=1.25)


def test_an_urgent_step_runs_between_two_layers() -> None:
    """r0's only step is to take 1.25 s in two layers; r1 comes in the first of them and runs between the two."""
    arrivals = [
        Arrival(arrival_s=0.0, num_prompt_tokens=64, num_output_tokens=1),
        Arrival(arrival_s=0.5, num_prompt_tokens=8, num_output_tokens=1),
        Arrival(arrival_s=1.25, num_prompt_tokens=8, num_output_tokens=1),  # in the last layer: after r0
    ]
    result = simulate(arrivals, prefill=1, decode=1, bundle="pdmesh", policy=WITH_INTERRUPTIONS)
    assert [list(run.token_times_s) for run in result.requests] == [[1.625], [1.0], [2.0]]
    assert [run.started_s for run in result.requests] == [0.0, 0.625, 1.625]
    assert [run.num_preemptions for run in result.requests] == [1, 0, 0]
    spans = [(step.start_s, step.end_s, step.duration_s) for step in result.instances[0].steps]
    assert spans == [(0.625, 1.0, 0.375), (0.0, 1.625, 1.25), (1.625, 2.0, 0.375)]


def test_an_urgent_step_does_not_interrupt_decodes() -> None:
    """r0 decodes beside r1's chunk, so that r2 must wait for it, and in steps of its own until r1 comes."""
    arrivals = [
        Arrival(arrival_s=0.0, num_prompt_tokens=8, num_output_tokens=9),
        Arrival(arrival_s=0.4, num_prompt_tokens=64, num_output_tokens=1),
        Arrival(arrival_s=0.6, num_prompt_tokens=8, num_output_tokens=1),
    ]
    policy = replace(WITH_INTERRUPTIONS, slo_tpot_s=2.0)
    result = simulate(arrivals, mixed=1, bundle="pdmesh", policy=policy)
    assert all(step.nested_s == 0 for step in result.instances[0].steps)
    r0, r1, r2 = result.requests
    assert list(r0.token_times_s)[:2] == [0.375, 0.515625]
    assert list(r1.token_times_s) == [1.78125]
    assert r2.started_s == 1.78125


def test_control_messages_take_time() -> None:
    arrivals = [Arrival(arrival_s=0.0, num_prompt_tokens=16, num_output_tokens=1)]
    (run,) = simulate(arrivals, mixed=1, config=SimConfig(control_delay_s=0.5)).requests
    assert run.outcome is Outcome.FINISHED
    assert list(run.token_times_s) == [1.0]  # the plan reaches the instance at 0.5


def test_what_fits_nowhere_is_rejected() -> None:
    arrivals = [Arrival(arrival_s=0.0, num_prompt_tokens=5000, num_output_tokens=1)]
    (run,) = simulate(arrivals, mixed=1).requests
    assert run.outcome is Outcome.REJECTED
    assert run.ttft_s is None
    assert run.queueing_s is None


def test_an_empty_workload_ends_at_once() -> None:
    assert simulate([], mixed=1).requests == []


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("bundle", [*BUNDLE_NAMES, "pdmesh with interruptions"])
def test_laws(mesh: InstanceCounts, bundle: str) -> None:
    arrivals = a_workload(seed=1)
    name, interrupts, _ = bundle.partition(" ")
    config = SimConfig(events_between_checks=1, port_bytes_per_s=1e4)
    policy = replace(WITH_INTERRUPTIONS, chunk_tokens=16) if interrupts else PolicyConfig(chunk_tokens=16)
    result = simulate(arrivals, bundle=name, policy=policy, **mesh, config=config)
    has_interruptions = any(step.nested_s for instance in result.instances for step in instance.steps)
    assert has_interruptions == bool(interrupts) or "decode" not in mesh

    # Every request ends once, with all of its tokens, in order of time.
    assert [run.request.arrival_s for run in result.requests] == [arrival.arrival_s for arrival in arrivals]
    for run, arrival in zip(result.requests, arrivals, strict=True):
        times_s = list(run.token_times_s)
        assert run.outcome is Outcome.FINISHED
        assert len(times_s) == arrival.num_output_tokens
        assert times_s == sorted(times_s)

        # No first token before its prompt could be computed, alone and in one piece.
        assert run.started_s is not None
        assert run.started_s >= arrival.arrival_s
        alone_s = BINARY_MODEL.a_s + BINARY_MODEL.b_s * arrival.num_prompt_tokens
        assert times_s[0] - run.started_s >= alone_s - 1e-9

        # KV that was handed over did not land before it was computed. A decode can move later, too.
        is_elsewhere = run.decode_id not in (None, run.prefill_id)
        assert (run.exposed_s is not None) == is_elsewhere or run.num_moves
        assert run.exposed_s is None or run.exposed_s > 0

    # Tokens are conserved: each prompt token is computed once, each output token but the first decoded once.
    computed = Counter[str]()
    num_decoded = 0
    for instance in result.instances:
        for step in instance.steps:
            num_decoded += step.num_decodes * step.num_steps
            for chunk in step.chunks:
                assert chunk.start == computed[chunk.request_id]
                computed[chunk.request_id] += chunk.num_tokens
    assert computed == Counter({r.request.request_id: r.request.num_prompt_tokens for r in result.requests})
    assert num_decoded == sum(arrival.num_output_tokens - 1 for arrival in arrivals)

    # An instance does one thing at a time, an urgent step inside another, and nothing only if nobody decodes there.
    for instance in result.instances:
        idle_from_s = 0.0
        inside: list[StepSpan] = []
        for step in sorted(instance.steps, key=lambda step: (step.start_s, -step.end_s)):
            if step.start_s < idle_from_s:
                assert step.end_s <= idle_from_s
                inside.append(step)
                continue
            if step.start_s > idle_from_s:
                for run in result.requests:
                    if run.decode_id == instance.instance_id and not run.num_moves:
                        assert not (run.token_times_s[1] <= idle_from_s < run.token_times_s[-1])
            idle_from_s = step.end_s
        assert sum(step.duration_s for step in inside) == pytest.approx(sum(step.nested_s for step in instance.steps))
        assert all(before.end_s <= after.start_s for before, after in itertools.pairwise(inside))


@pytest.mark.parametrize("bundle", BUNDLE_NAMES)
def test_no_instance_idles_while_a_request_waits(bundle: str) -> None:
    """With room for all, every prefill instance is busy as long as a request is not placed."""
    result = simulate(a_workload(seed=2), prefill=2, decode=2, bundle=bundle, num_kv_tokens=100_000, max_num_seqs=100)
    for instance in result.instances:
        if instance.role is Role.PREFILL:
            ends_s = [0.0, *(step.end_s for step in instance.steps)]
            for idle_from_s, step in zip(ends_s, instance.steps, strict=False):
                for run in result.requests:
                    assert run.placed_s is not None
                    assert min(step.start_s, run.placed_s) <= max(idle_from_s, run.request.arrival_s)


def test_a_preempted_prompt_does_not_keep_others_from_moving() -> None:
    """One transfer backend; short prompts keep a long one waiting half-way. Their KV moves in no time nevertheless.

    When the last of them is computed the long one goes on, and with it its transfer, whose first offer was earlier.
    """
    arrivals = [Arrival(arrival_s=0.0, num_prompt_tokens=500, num_output_tokens=2)]
    arrivals += [Arrival(arrival_s=2.25 + i / 2, num_prompt_tokens=16, num_output_tokens=2) for i in range(40)]
    result = simulate(arrivals, prefill=1, decode=1, bundle="sjf", num_transfer_backends=1)
    long, *short = result.requests
    assert long.num_preemptions > 0
    assert all(run.exposed_s is not None and run.exposed_s < 1.0 for run in short[:-1])


@pytest.mark.parametrize("bundle", BUNDLE_NAMES)
def test_the_same_seed_gives_the_same_bytes(bundle: str) -> None:
    once, again = (
        as_bytes(simulate(a_workload(3), prefill=2, decode=2, mixed=1, bundle=bundle, seed=5)) for _ in range(2)
    )
    assert once == again


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_decode_steps_taken_together_change_nothing(mesh: InstanceCounts) -> None:
    together, apart = (
        as_bytes(simulate(a_workload(4), **mesh, config=SimConfig(max_decode_steps=number))) for number in (128, 1)
    )
    assert together == apart


def test_plain_values_only() -> None:
    """A workload can be written as JSON and read again."""
    arrivals = a_workload(6, num_requests=5)
    assert [Arrival(**row) for row in json.loads(json.dumps([asdict(a) for a in arrivals]))] == arrivals


def test_kv_stays_on_its_host_where_the_link_to_another_is_slow() -> None:
    """The core learns the rates as it does from live instances."""
    shape = MeshShape(
        num_prefill=2,
        num_decode=2,
        num_mixed=0,
        kv_layout=KvLayout(num_layers=16, num_kv_heads=8, head_dim=64, block_size=16, dtype="bfloat16"),
        num_kv_tokens=400_000,
        num_hosts=2,
    )
    policy = PolicyConfig(latency=LinearLatencyModel(a_s=0.003, b_s=1e-4, c_s=0.0, d_s=0.0, decode_s=0.01))
    arrivals = synthetic(Synthetic(num_requests=100, requests_per_s=4.0), random.Random(1))

    def share_inside(bytes_per_s: float) -> float:
        links = dict.fromkeys(permutations([host_name(0), host_name(1)], 2), bytes_per_s)
        core = study_core("pdmesh", policy, 0)
        config = SimConfig(host_link_bytes_per_s=links)
        runs = Simulator(core, shape.instances(policy.latency), arrivals, config).run().requests
        ends = [(run.prefill_id, run.decode_id) for run in runs if run.prefill_id and run.decode_id]
        return sum(prefill[-1] == decode[-1] for prefill, decode in ends) / len(ends)

    assert share_inside(25e9) < 0.7
    assert share_inside(1e8) > 0.8
