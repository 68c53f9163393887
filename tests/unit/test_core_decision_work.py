"""What a decision costs follows from what changed, not from how many instances there are: counted in calls."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from pdmesh.core.commands import RunStep
from pdmesh.core.config import CoreConfig
from pdmesh.core.events import InstanceJoined, RequestArrived
from pdmesh.core.operator_events import BundleChangeRequested
from pdmesh.model import Role
from pdmesh.policy.config import PolicyConfig
from pdmesh_testing.calls import num_calls
from pdmesh_testing.core import CoreBench, a_request, of
from pdmesh_testing.modelled import modelled_profile

LARGE, SMALL = 128, 32


def a_bench(num_instances: int, policy: PolicyConfig, num_seats: int) -> CoreBench:
    profiles = [
        modelled_profile(
            f"{role}{index:03}", role, num_blocks=4096, block_size=16, max_model_len=1 << 16, max_num_seqs=num_seats
        )
        for role in (Role.PREFILL, Role.DECODE)
        for index in range(num_instances // 2)
    ]
    bench = CoreBench(*profiles, config=CoreConfig(policy=policy))
    bench.feed(BundleChangeRequested("pdmesh"))
    return bench


def without_room_to_decode(num_instances: int) -> CoreBench:
    """Prefill instances are idle, and nobody bears to be computed ahead of room."""
    bench = a_bench(num_instances, PolicyConfig(slo_ttft_s=1e5), num_seats=1)
    for index in range(num_instances // 2):
        (step,) = of(RunStep, bench.arrive(f"decodes{index}", 500, 3000))
        bench.done(step.instance_id, step.plan)
    return bench


def without_step_slots_to_prefill(num_instances: int) -> CoreBench:
    """Those that decode could compute prompts, more slowly than these wait for the others."""
    bench = a_bench(num_instances, PolicyConfig(slo_tpot_s=0.06), num_seats=16)
    for index in range(num_instances):  # two plans in flight on each
        assert of(RunStep, bench.arrive(f"prompt{index}", 6000, 100))
    return bench


def ahead_of_room(num_awaiting_decode: int) -> CoreBench:
    """So many prompts are computed, all too late to wait for room before they begin."""
    profiles = [
        modelled_profile(str(role), role, num_blocks=1 << 16, max_model_len=1 << 16, max_num_seqs=1)
        for role in (Role.PREFILL, Role.DECODE)
    ]
    bench = CoreBench(
        *profiles, config=CoreConfig(policy=PolicyConfig(slo_ttft_s=0.0, slo_ttft_stretch=0.0, decodes_locally=False))
    )
    bench.feed(BundleChangeRequested("pdmesh"))
    for index in range(1 + num_awaiting_decode):
        (step,) = of(RunStep, bench.arrive(f"ahead{index}", 100, 3000))
        bench.done(step.instance_id, step.plan)
    assert len(bench.core.awaiting_decode) == num_awaiting_decode
    return bench


def calls_of_an_arrival(bench: CoreBench, prompt: int) -> int:
    """Of Python functions, by an arrival that waits; the first ones have looked at what was new."""
    for number in range(3):
        bench.arrive(f"before{number}", prompt, 10)
    num_waiting = bench.core.num_waiting
    calls = num_calls(lambda: bench.core.handle(RequestArrived(a_request("last", prompt, 10)), bench.now_s))
    assert bench.core.num_waiting == num_waiting + 1
    return calls


@pytest.mark.parametrize(
    ("a_full_mesh", "prompt"), [(without_room_to_decode, 100), (without_step_slots_to_prefill, 6000)]
)
def test_a_request_that_waits_costs_no_more_in_a_larger_mesh(
    a_full_mesh: Callable[[int], CoreBench], prompt: int
) -> None:
    assert calls_of_an_arrival(a_full_mesh(LARGE), prompt) <= 1.5 * calls_of_an_arrival(a_full_mesh(SMALL), prompt)


def calls_of_a_join(num_instances: int) -> int:
    """By the last instance that joins a mesh of so many, as all do when a scheduler starts anew."""
    bench = a_bench(num_instances, PolicyConfig(), num_seats=16)
    late = modelled_profile("late", Role.DECODE, num_blocks=4096, block_size=16, max_model_len=1 << 16)
    return num_calls(lambda: bench.core.handle(InstanceJoined(late, ()), bench.now_s))


def test_a_join_costs_no_more_in_a_larger_mesh() -> None:
    assert calls_of_a_join(LARGE) <= 1.1 * calls_of_a_join(SMALL)


def test_a_prompt_that_begins_ahead_of_room_costs_no_more_behind_many_that_did() -> None:
    many, few = ahead_of_room(LARGE), ahead_of_room(SMALL)
    last = RequestArrived(a_request("last", 100, 10))
    calls = num_calls(lambda: many.core.handle(last, many.now_s))
    assert len(many.core.awaiting_decode) == LARGE + 1
    assert calls <= 1.2 * num_calls(lambda: few.core.handle(last, few.now_s))
