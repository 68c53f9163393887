"""Local prefill: prompts computed where they decode, while every prefill instance is busy."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pdmesh.core.commands import AdmitPrefill, Command, ExpectCopy, RunStep
from pdmesh.core.config import CoreConfig
from pdmesh.core.operator_events import BatchingChangeRequested, BundleChangeRequested
from pdmesh.model import InstanceId, Role
from pdmesh.plans import StepPlan
from pdmesh.policy.batching import Mode
from pdmesh.policy.config import PolicyConfig
from pdmesh.policy.latency import LinearLatencyModel
from pdmesh_testing.core import CoreBench, of
from pdmesh_testing.modelled import modelled_profile

#: A millisecond for each prompt token, 30 for each that decodes.
MODEL = LinearLatencyModel(a_s=0.0, b_s=1e-3, c_s=0.0, d_s=0.0, decode_s=0.03)
#: A millisecond for each of both, and a constant for each kind of step.
QUICK = LinearLatencyModel(a_s=0.01, b_s=1e-3, c_s=0.0, d_s=0.0, decode_a_s=0.01, decode_s=1e-3)
POLICY = PolicyConfig(latency=MODEL, slo_tpot_s=0.2, prefill_step_s=0.2, long_prompt_tokens=1000)
P = modelled_profile("p", Role.PREFILL, num_blocks=1000, block_size=16)
D = modelled_profile("d", Role.DECODE, num_blocks=1000, block_size=16)


def a_bench(policy: PolicyConfig = POLICY, *, bundle: str = "pdmesh") -> CoreBench:
    bench = CoreBench(P, D, config=CoreConfig(policy=policy, plans_in_flight=2))
    bench.feed(BundleChangeRequested(bundle))
    return bench


def occupy(bench: CoreBench) -> list[StepPlan]:
    """Two plans in flight on the prefill instance, of prompts that nobody interrupts."""
    commands = [*bench.arrive("busy-0", 200), *bench.arrive("busy-1", 200)]
    assert [run.instance_id for run in of(RunStep, commands)] == ["p", "p"]
    return [run.plan for run in of(RunStep, commands)]


def test_a_prompt_is_computed_where_it_decodes_while_all_that_prefill_are_busy() -> None:
    bench = a_bench()
    occupy(bench)
    commands = bench.arrive("local", 300)
    (admitted,) = of(AdmitPrefill, commands)
    assert (admitted.instance_id, admitted.decode_instance_id) == ("d", None)  # it stays
    assert not of(ExpectCopy, commands)
    steps = of(RunStep, commands)
    assert [(run.instance_id, run.plan.chunks[0].num_tokens) for run in steps] == [("d", 96), ("d", 96)]
    assert all(run.plan.with_decodes for run in steps)
    (last,) = [chunk for run in steps for chunk in of(RunStep, bench.done("d", run.plan))][-1:]
    bench.done("d", last.plan)
    assert [view.num_decoding for view in bench.core.instances] == [0, 1]


def test_an_instance_that_prefills_comes_first() -> None:
    bench = a_bench()
    plans = occupy(bench)
    bench.done("p", plans[0])
    (admitted,) = of(AdmitPrefill, bench.arrive("next", 300))
    assert admitted.instance_id == "p"


@pytest.mark.parametrize(
    ("policy", "bundle"),
    [
        (POLICY, "pecsched"),
        (replace(POLICY, long_prompt_tokens=300), "pdmesh"),
        (replace(POLICY, prefills_locally=False), "pdmesh"),
    ],
)
def test_otherwise_it_waits(policy: PolicyConfig, bundle: str) -> None:
    bench = a_bench(policy, bundle=bundle)
    occupy(bench)
    assert not of(AdmitPrefill, bench.arrive("local", 300))
    assert bench.core.num_waiting == 1


def test_it_waits_while_decodes_leave_their_steps_no_room() -> None:
    bench = a_bench()
    for number in range(4):  # 4 x 30 ms is 0.6 of 200 ms
        (run,) = of(RunStep, bench.arrive(f"d{number}", 20))
        assert run.instance_id == "p"
        bench.done("p", run.plan)
        bench.landed("d", f"d{number}")
    occupy(bench)
    assert not of(AdmitPrefill, bench.arrive("local", 300))


def decode_steps(bench: CoreBench, commands: list[Command]) -> list[StepPlan]:
    """Return the plans that the decode instance was sent."""
    return [run.plan for run in of(RunStep, commands) if run.instance_id == "d"]


def with_decodes(batching: str, number: int = 4) -> CoreBench:
    """A busy prefill instance, and a decode instance with ``number`` decodes and a promise on 8 seats."""
    bench = a_bench(replace(POLICY, latency=QUICK, batching=batching, eb_threshold=0.3))
    for index in range(number):
        (run,) = of(RunStep, bench.arrive(f"d{index}", 20))
        bench.done("p", run.plan)
        bench.landed("d", f"d{index}")
    assert len(of(RunStep, bench.arrive("busy", 900))) == 2, "both plans are of a prompt that is not interrupted"
    return bench


def test_prompts_are_computed_beside_decodes_or_in_a_phase_as_the_operator_says() -> None:
    bench = with_decodes("mb")
    (step,) = decode_steps(bench, bench.arrive("local", 40))
    assert (step.with_decodes, step.holds_decodes) == (True, False)

    bench = with_decodes("eb")
    assert not decode_steps(bench, bench.arrive("a", 40)), "one waits, and 0.3 of the seats in use are wanted"
    first, last = decode_steps(bench, bench.arrive("b", 40))
    assert [chunk.request_id for chunk in first.chunks] == ["a", "b"]
    assert (first.with_decodes, first.holds_decodes) == (False, True)
    assert (last.chunks, last.with_decodes, last.holds_decodes) == ((), True, False), "the phase ends"


def test_the_mode_of_a_running_decode_instance_changes() -> None:
    bench = with_decodes("mb")
    before = bench.core.batching_of(InstanceId("d"))
    bench.feed(BatchingChangeRequested("eb", 0.1))
    after = bench.core.batching_of(InstanceId("d"))
    assert [view and view.mode for view in (before, after)] == [Mode.MIXED, Mode.EXCLUSIVE]
    first, _ = decode_steps(bench, bench.arrive("local", 40))
    assert first.holds_decodes


@pytest.mark.parametrize(
    ("policy", "bundle"), [(POLICY, "pecsched"), (replace(POLICY, prefills_locally=False), "pdmesh")]
)
def test_without_local_prefill_there_is_no_choice(policy: PolicyConfig, bundle: str) -> None:
    bench = a_bench(policy, bundle=bundle)
    assert [bench.core.batching_of(view.instance_id) for view in bench.core.instances] == [None, None]


def test_a_prefill_instance_has_no_choice() -> None:
    bench = a_bench()
    assert bench.core.batching_of(InstanceId("p")) is None
    assert bench.core.batching_of(InstanceId("d")) is not None
