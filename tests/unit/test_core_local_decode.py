"""Local decode: a prefill instance decodes what it computes, while no decode instance has room or is there."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pdmesh.core.commands import AdmitPrefill, ExpectCopy, RunStep
from pdmesh.core.config import CoreConfig
from pdmesh.core.events import InstanceJoined, InstanceLost, InstanceSuspected, RequestArrived, TransferSent
from pdmesh.core.operator_events import BundleChangeRequested
from pdmesh.model import InstanceId, Role
from pdmesh.policy.config import PolicyConfig
from pdmesh.policy.latency import LinearLatencyModel
from pdmesh_testing.core import GATEWAY, CoreBench, a_request, a_role, kept_here, of
from pdmesh_testing.modelled import modelled_profile

#: Each prompt token takes 1 ms, each decode 1 ms and a step 10 ms.
MODEL = LinearLatencyModel(a_s=0.01, b_s=1e-3, c_s=0.0, d_s=0.0, decode_a_s=0.01, decode_s=1e-3)
POLICY = PolicyConfig(latency=MODEL, slo_tpot_s=0.2, prefill_step_s=0.2, long_prompt_tokens=1000)
P, D = InstanceId("p"), InstanceId("d")
PREFILL = modelled_profile(P, Role.PREFILL, num_blocks=1000, block_size=16)
DECODE = modelled_profile(D, Role.DECODE, num_blocks=1000, block_size=16)


def a_bench(policy: PolicyConfig = POLICY, *, bundle: str = "pdmesh", max_num_seqs: int = 8) -> CoreBench:
    decode = replace(DECODE, max_num_seqs=max_num_seqs)
    bench = CoreBench(PREFILL, decode, config=CoreConfig(policy=policy, plans_in_flight=2))
    bench.feed(BundleChangeRequested(bundle))
    return bench


def decoding_on(bench: CoreBench) -> dict[str, int]:
    return {view.instance_id: view.num_decoding for view in bench.core.instances}


def compute(bench: CoreBench, request_id: str, *, output: int = 100) -> list[str]:
    """A request arrives and its prompt is computed; return where it was placed to decode, if it is to leave."""
    commands = bench.arrive(request_id, 20, output)
    for run in of(RunStep, commands):
        commands += bench.done(run.instance_id, run.plan)
    return [place.instance_id for place in of(ExpectCopy, commands)]


def test_without_a_decode_instance_it_decodes_where_it_is_computed() -> None:
    bench = a_bench()
    assert compute(bench, "before") == ["d"]
    bench.feed(InstanceLost(D))
    assert bench.core.unready_reason is None
    assert compute(bench, "after") == []
    assert decoding_on(bench) == {"p": 2}, "also what had been computed for the lost one"
    (kept,) = kept_here(bench.commands)
    assert kept.request_id == "before"


def test_a_silent_decode_instance_is_as_good_as_none() -> None:
    bench = a_bench()
    bench.feed(InstanceSuspected(D))
    assert compute(bench, "r") == []
    assert decoding_on(bench) == {"p": 1, "d": 0}


def test_its_decodes_move_to_a_decode_instance_that_comes() -> None:
    bench = a_bench()
    bench.feed(InstanceLost(D))
    for name in ("r", "s"):
        compute(bench, name)
    commands = bench.feed(InstanceJoined(DECODE, ()))
    assert [(place.instance_id, place.request_id) for place in of(ExpectCopy, commands)] == [("d", "r"), ("d", "s")]
    for name in ("r", "s"):
        bench.feed(
            TransferSent(*bench._transfer(P, name), num_bytes=1, duration_s=0.1, exposed_s=0.0, was_decoding=True)
        )
        bench.released(P, name)
    assert decoding_on(bench) == {"p": 0, "d": 2}
    assert compute(bench, "t") == ["d"]


@pytest.mark.parametrize(("policy", "bundle"), [(POLICY, "fcfs"), (replace(POLICY, decodes_locally=False), "pdmesh")])
def test_it_waits_where_the_policy_says_so(policy: PolicyConfig, bundle: str) -> None:
    bench = a_bench(policy, bundle=bundle)
    bench.feed(InstanceLost(D))
    assert bench.core.unready_reason == "no decode instance is running"
    assert not of(AdmitPrefill, bench.arrive("r"))


def test_a_prefill_instance_whose_role_an_operator_chose_does_not_decode() -> None:
    bench = CoreBench(PREFILL, replace(PREFILL, instance_id=InstanceId("q"), role=Role.MIXED), DECODE)
    bench.feed(BundleChangeRequested("pdmesh"))
    bench.feed(a_role("q", Role.PREFILL))
    bench.feed(InstanceLost(P))
    bench.feed(InstanceLost(D))
    assert bench.core.unready_reason == "no decode instance is running"
    assert not of(AdmitPrefill, bench.arrive("r"))
    bench.feed(InstanceJoined(PREFILL, ()))
    (admitted,) = of(AdmitPrefill, bench.commands)
    assert admitted.instance_id == "p"


def test_beside_a_full_decode_instance_it_decodes_once_waiting_costs_more() -> None:
    """A step of two decodes takes 12 ms, so each costs 6 ms; one decode of the prefill instance costs 11 ms."""
    bench = a_bench(max_num_seqs=2)
    for name in ("r", "s"):
        assert compute(bench, name) == ["d"]
        bench.landed("d", name)
    compute(bench, "first")
    assert (list(bench.core.awaiting_decode), decoding_on(bench)) == ([("first", 0)], {"p": 0, "d": 2})
    compute(bench, "second")
    assert [kept.request_id for kept in kept_here(bench.commands)] == ["first", "second"]
    assert decoding_on(bench) == {"p": 2, "d": 2}, "a second decode there costs 1 ms, the wait 6 ms"


def test_full_prefill_instances_do_not_hide_one_with_room() -> None:
    """Ten full ones came first in the order of the policy, and eight are asked."""
    names = [f"p{number}" for number in range(10)]
    profiles = [replace(PREFILL, instance_id=InstanceId(name), max_num_seqs=2) for name in names]
    bench = CoreBench(*profiles, config=CoreConfig(policy=POLICY, plans_in_flight=2))
    bench.feed(BundleChangeRequested("pdmesh"))
    for number in range(20):
        compute(bench, f"r{number}")
    assert decoding_on(bench) == dict.fromkeys(names, 2)


def test_a_resumed_request_stays_in_the_class_of_its_tokens() -> None:
    others = replace(PREFILL, instance_id=InstanceId("a"), arithmetic="A")
    bench = CoreBench(replace(PREFILL, arithmetic="B"), others, config=CoreConfig(policy=POLICY, plans_in_flight=2))
    bench.feed(BundleChangeRequested("pdmesh"))
    for number in range(3):
        request = replace(a_request(f"r{number}", 20, 100, epoch=1), arithmetic="A")
        commands = bench.feed(RequestArrived(request))
        assert [admitted.instance_id for admitted in of(AdmitPrefill, commands)] == ["a"]
        for run in of(RunStep, commands):
            bench.done(run.instance_id, run.plan)


def test_it_decodes_where_its_gateway_hears_it() -> None:
    bench = CoreBench(PREFILL, replace(PREFILL, instance_id=InstanceId("q")), config=CoreConfig(policy=POLICY))
    bench.feed(BundleChangeRequested("pdmesh"))
    bench.core._mesh.cut.note(GATEWAY, P, 0.0)
    for number in range(3):
        compute(bench, f"r{number}")
    assert decoding_on(bench) == {"p": 0, "q": 3}


def test_new_prompts_do_not_take_the_room_that_a_computed_one_waits_for() -> None:
    prefill = modelled_profile(P, Role.PREFILL, num_blocks=40, block_size=16, max_model_len=4000)
    decode = replace(prefill, instance_id=D, role=Role.DECODE, num_blocks=1000)
    bench = CoreBench(prefill, decode, config=CoreConfig(policy=POLICY))
    bench.feed(BundleChangeRequested("pdmesh"))
    for name, prompt, output in (("big", 300, 300), ("small", 100, 100)):
        for run in of(RunStep, bench.arrive(name, prompt, output)):
            bench.done(run.instance_id, run.plan)
    bench.feed(InstanceLost(D))
    assert not kept_here(bench.commands), "the one behind waits, too"
    assert not of(AdmitPrefill, bench.arrive("new", 60, 60))
    assert [key for key, _ in bench.core.awaiting_decode] == ["big", "small"]


def test_an_operator_fixes_the_role_that_an_instance_has() -> None:
    bench = a_bench()
    bench.feed(InstanceLost(D))
    assert bench.core.unready_reason is None
    bench.feed(a_role("p", Role.PREFILL))
    assert bench.core.unready_reason == "no decode instance is running"
    assert not of(AdmitPrefill, bench.arrive("r"))
