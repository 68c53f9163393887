"""Local prefill: prompts computed where they decode, while every prefill instance is busy."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pdmesh.core.commands import AdmitPrefill, PlaceDecode, RunStep
from pdmesh.core.config import CoreConfig
from pdmesh.core.operator_events import BundleChangeRequested
from pdmesh.model import Role
from pdmesh.plans import StepPlan
from pdmesh.policy.config import PolicyConfig
from pdmesh.policy.latency import LinearLatencyModel
from pdmesh.testing.core import CoreBench, of
from pdmesh.testing.modelled import modelled_profile

#: A millisecond for each prompt token, 30 for each that decodes.
MODEL = LinearLatencyModel(a_s=0.0, b_s=1e-3, c_s=0.0, d_s=0.0, decode_s=0.03)
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
    assert not of(PlaceDecode, commands)
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
