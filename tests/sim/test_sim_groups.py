"""Prompts that simulated instances compute in turn."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

import pytest

from pdmesh.model import InstanceId
from pdmesh.policy.config import PolicyConfig
from pdmesh.policy.latency import LinearLatencyModel
from pdmesh_lab.sim.mesh import study_core
from pdmesh_lab.sim.result import SimResult, StepSpan
from pdmesh_lab.sim.simulator import SimConfig, Simulator
from pdmesh_lab.sim.workload import Arrival
from pdmesh_testing.sim import TINY_LAYOUT, UNEVEN_MODEL, a_workload, tiny_mesh

NUM_LAYERS = 8
POLICY = PolicyConfig(latency=UNEVEN_MODEL, long_prompt_tokens=200, prefill_step_s=0.3, slo_tpot_s=1.0)
FAST, SLOW = 1e12, 2e5  # bytes a second; a token has 512 bytes


def run(
    arrivals: Sequence[Arrival],
    *,
    num_prefill: int = 2,
    members: int = 4,
    bytes_per_s: float = FAST,
    role: str = "prefill",
    bundle: str = "pdmesh",
    schedule: str = "pipelined",
    policy: PolicyConfig = POLICY,
) -> SimResult:
    pools = {"mixed": num_prefill} if role == "mixed" else {"prefill": num_prefill, "decode": 1}
    shape = tiny_mesh(pools, num_kv_tokens=16_384)  # type: ignore[arg-type]
    shape = replace(shape, kv_layout=replace(TINY_LAYOUT, num_layers=NUM_LAYERS), joins_groups=True)
    policy = replace(policy, max_group_members=members, link_bytes_per_s=bytes_per_s, sequence_parallel=schedule)
    core = study_core(bundle, policy, 0)
    return Simulator(core, shape.instances(UNEVEN_MODEL), arrivals, SimConfig(port_bytes_per_s=bytes_per_s)).run()


def chunks_of(result: SimResult, index: int) -> list[tuple[InstanceId, StepSpan, int]]:
    """Its steps in the order of its tokens, each with its instance and where its chunk begins."""
    request_id = result.requests[index].request.request_id
    found = [
        (instance.instance_id, step, chunk.start)
        for instance in result.instances
        for step in instance.steps
        for chunk in step.chunks
        if chunk.request_id == request_id
    ]
    return sorted(found, key=lambda entry: entry[2])


def check_turns(result: SimResult, index: int) -> None:
    """No step has ended before its own time has passed, and a layer's after the chunk before was computed."""
    for (_, before, _), (_, step, _) in itertools.pairwise(chunks_of(result, index)):
        assert step.end_s >= step.start_s + step.duration_s - 1e-9
        assert step.end_s >= before.end_s + step.duration_s / NUM_LAYERS - 1e-9


LONG = Arrival(arrival_s=0.0, num_prompt_tokens=4096, num_output_tokens=4)


@pytest.mark.parametrize("role", ["prefill", "mixed"])
@pytest.mark.parametrize("num_prefill", [2, 4])
def test_several_instances_bring_the_first_token_forward(num_prefill: int, role: str) -> None:
    alone = run([LONG], num_prefill=num_prefill, members=1, role=role).requests[0].ttft_s
    together = run([LONG], num_prefill=num_prefill, role=role)
    ttft_s = together.requests[0].ttft_s
    assert alone is not None
    assert ttft_s is not None
    assert alone / ttft_s > 0.75 * num_prefill
    steps = chunks_of(together, 0)
    assert len({name for name, _, _ in steps}) == num_prefill
    check_turns(together, 0)
    assert steps[-1][1].end_s == pytest.approx(ttft_s)
    assert steps[-1][0] == together.requests[0].prefill_id


@pytest.mark.parametrize(("num_prefill", "size"), [(2, 2), (3, 2), (4, 4)])
def test_tetris_has_groups_of_1_2_4_members(num_prefill: int, size: int) -> None:
    alone = run([LONG], num_prefill=num_prefill, members=1, bundle="tetris").requests[0].ttft_s
    together = run([LONG], num_prefill=num_prefill, bundle="tetris")
    ttft_s = together.requests[0].ttft_s
    assert alone is not None
    assert ttft_s is not None
    assert alone / ttft_s > 0.75 * size
    assert len({name for name, _, _ in chunks_of(together, 0)}) == size
    check_turns(together, 0)


def test_a_step_ends_a_layers_time_after_the_chunk_before_or_when_it_is_computed() -> None:
    """With nothing else to do and links that take no time, exactly then."""
    steps = chunks_of(run([LONG]), 0)
    for (_, before, _), (_, step, _) in itertools.pairwise(steps[2:]):
        due_s = max(step.start_s + step.duration_s, before.end_s + step.duration_s / NUM_LAYERS)
        assert step.end_s == pytest.approx(due_s, abs=1e-6)
    assert any(step.waited_s > 0 for _, step, _ in steps)


def test_kv_that_comes_slowly_is_waited_for() -> None:
    fast, slow = run([LONG]), run([LONG], bytes_per_s=SLOW)
    assert sum(step.waited_s for _, step, _ in chunks_of(slow, 0)) > sum(
        step.waited_s for _, step, _ in chunks_of(fast, 0)
    )
    check_turns(slow, 0)


def test_short_prompts_go_first_on_each_member_and_nothing_is_left_behind() -> None:
    """The core's state is checked at the end of every run."""
    short = [Arrival(arrival_s=0.2 + 0.3 * n, num_prompt_tokens=30, num_output_tokens=3) for n in range(12)]
    result = run([LONG, *short])
    check_turns(result, 0)
    long, *others = result.requests
    assert long.num_preemptions > 0
    assert all(len(each.token_times_s) == 3 for each in others)
    assert max(each.ttft_s or 0.0 for each in others) < 0.5
    assert max(step.nested_s for instance in result.instances for step in instance.steps) > 0


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("bytes_per_s", [FAST, SLOW])
def test_random_workloads_are_served_whole(seed: int, bytes_per_s: float) -> None:
    arrivals = a_workload(seed, num_requests=80, requests_per_s=3.0)
    result = run(arrivals, num_prefill=3, bytes_per_s=bytes_per_s)
    grouped = 0
    for index, request in enumerate(result.requests):
        assert len(request.token_times_s) == request.num_output_tokens
        steps = chunks_of(result, index)
        if len({name for name, _, _ in steps}) > 1:
            grouped += 1
            check_turns(result, index)
            end = 0
            for _, step, start in steps:
                assert start == end
                end += next(c.num_tokens for c in step.chunks if c.request_id == request.request.request_id)
            assert end == request.request.num_prompt_tokens
    assert grouped


@pytest.mark.parametrize(("size", "gain"), [(2, 1.9), (4, 3.7), (8, 6.7)])
def test_members_have_a_chunk_each_before_anybody_has_a_second(size: int, gain: float) -> None:
    """Who has two begins the second after the first, and all who come after it wait for that: also for the leader's."""
    model = LinearLatencyModel(a_s=4e-3, b_s=4e-4, c_s=1.5e-8, d_s=7.5e-9)
    layout = replace(TINY_LAYOUT, num_layers=16, block_size=16)

    def prompt(num_prefill: int) -> SimResult:
        shape = replace(tiny_mesh({"prefill": num_prefill, "decode": 1}), kv_layout=layout, num_kv_tokens=65_536)
        core = study_core("pdmesh", PolicyConfig(latency=model, max_group_members=num_prefill), 0)
        arrival = Arrival(arrival_s=0.0, num_prompt_tokens=16_384, num_output_tokens=1)
        return Simulator(core, replace(shape, joins_groups=True).instances(model), [arrival]).run()

    alone_s, together = prompt(1).requests[0].ttft_s, prompt(size)
    ttft_s, names = together.requests[0].ttft_s, [name for name, _, _ in chunks_of(together, 0)]
    assert len(set(names[:size])) == len(set(names[size : 2 * size])) == size
    assert alone_s is not None
    assert ttft_s is not None
    assert alone_s / ttft_s > gain


# --- all at once ---


def parallel_steps_of(result: SimResult) -> list[list[tuple[InstanceId, StepSpan, int]]]:
    """The steps of each parallel step of the first prompt, which its leader ends."""
    parallel_steps: list[list[tuple[InstanceId, StepSpan, int]]] = [[]]
    for entry in chunks_of(result, 0)[1:]:  # the leader's first chunk is before there is a group
        parallel_steps[-1].append(entry)
        if entry[0] == result.requests[0].prefill_id:
            parallel_steps.append([])
    assert not parallel_steps.pop()
    return parallel_steps


@pytest.mark.parametrize("role", ["prefill", "mixed"])
@pytest.mark.parametrize("num_prefill", [2, 3, 4])
def test_a_parallel_step_computes_at_once_and_nobody_waits(num_prefill: int, role: str) -> None:
    alone = run([LONG], num_prefill=num_prefill, members=1, role=role).requests[0].ttft_s
    result = run([LONG], num_prefill=num_prefill, role=role, schedule="parallel")
    ttft_s = result.requests[0].ttft_s
    assert alone is not None
    assert ttft_s is not None
    assert alone / ttft_s > 0.85 * num_prefill
    parallel_steps = parallel_steps_of(result)
    assert max(len(parallel) for parallel in parallel_steps) == num_prefill
    for parallel in parallel_steps[2:]:  # the first ones begin while the leader is still busy with its own
        ends_s = [step.end_s for _, step, _ in parallel]
        assert ends_s == sorted(ends_s)
    steps = [step for parallel in parallel_steps[:-1] for _, step, _ in parallel]
    assert sum(step.waited_s for step in steps) < 0.02 * sum(step.end_s - step.start_s for step in steps)


def test_a_parallel_step_waits_for_its_slowest_link() -> None:
    fast, slow = run([LONG], schedule="parallel"), run([LONG], schedule="parallel", bytes_per_s=SLOW)
    waited_s = [sum(step.waited_s for _, step, _ in chunks_of(result, 0)) for result in (fast, slow)]
    assert waited_s[0] < 0.1 * waited_s[1]
    for _, parallel in zip(range(99), parallel_steps_of(slow), strict=False):
        ends_s = [step.end_s for _, step, _ in parallel]
        assert ends_s == sorted(ends_s)


def test_short_prompts_interrupt_each_member_of_a_gang() -> None:
    short = [Arrival(arrival_s=0.2 + 0.3 * n, num_prompt_tokens=30, num_output_tokens=3) for n in range(12)]
    result = run([LONG, *short], schedule="parallel")
    long, *others = result.requests
    assert long.num_preemptions > 0
    assert all(len(each.token_times_s) == 3 for each in others)
    assert max(each.ttft_s or 0.0 for each in others) < 0.5
