"""Prompts computed ahead of room to decode: when one begins, who gets room, and how much KV may wait."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pdmesh.core.commands import AdmitPrefill, ExpectCopy, Restart, RunStep, SendCopy
from pdmesh.core.config import CoreConfig
from pdmesh.core.events import InstanceLost, RequestArrived, TransferOffered
from pdmesh.core.operator_events import BundleChangeRequested
from pdmesh.model import NO_TRANSFER, Epoch, RequestId, Role
from pdmesh.policy.config import PolicyConfig
from pdmesh.policy.handover import Decoding
from pdmesh.policy.latency import LinearLatencyModel
from pdmesh_testing.core import CoreBench, a_request, of
from pdmesh_testing.modelled import modelled_profile

#: A millisecond for each prompt token, 10 for a decode step: an output of 400 tokens takes 4 s, and may take 20.
MODEL = LinearLatencyModel(a_s=0.0, b_s=1e-3, c_s=0.0, d_s=0.0, decode_a_s=0.01)
POLICY = PolicyConfig(latency=MODEL, slo_tpot_s=0.05, prefill_step_s=0.2, prefills_locally=False)


def a_bench(
    policy: PolicyConfig = POLICY, *, bundle: str = "pdmesh", num_seats: int = 1, num_blocks: int = 64
) -> CoreBench:
    """A prefill instance of ``num_blocks`` of 4 tokens and one that decodes."""
    prefill = modelled_profile("p", Role.PREFILL, num_blocks=num_blocks, max_model_len=4096)
    decode = modelled_profile("d", Role.DECODE, num_blocks=4096, max_num_seqs=num_seats, max_model_len=4096)
    bench = CoreBench(prefill, decode, config=CoreConfig(policy=policy))
    bench.feed(BundleChangeRequested(bundle))
    return bench


def occupied(bench: CoreBench) -> None:
    """Whoever decodes has the only seat, and its prompt has gone from the prefill instance."""
    (step,) = of(RunStep, bench.arrive("first", 8, 400))
    bench.offered("p", "first")
    bench.done("p", step.plan)
    bench.landed("d", "first")
    bench.sent("p", "first")
    bench.released("p", "first")


def test_it_is_computed_while_nobody_has_room_and_goes_where_there_is_some_first() -> None:
    bench = a_bench()
    occupied(bench)
    commands = bench.arrive("ahead", 8, 400)
    (admit,), (step,) = of(AdmitPrefill, commands), of(RunStep, commands)
    assert (admit.awaits_receiver, admit.transfer, admit.num_blocks) == (True, None, 2)
    assert not of(ExpectCopy, commands)
    assert bench.feed(TransferOffered(admit.instance_id, RequestId("ahead"), Epoch(0), NO_TRANSFER)) == []
    bench.done("p", step.plan)
    bench.finish("d", "first")
    bench.arrive("late", 8, 400)
    commands = bench.released("d", "first")
    assert [place.request_id for place in of(ExpectCopy, commands)] == ["ahead"]
    assert [grant.request_id for grant in of(SendCopy, commands)] == ["ahead"]
    bench.landed("d", "ahead")
    bench.sent("p", "ahead")
    bench.released("p", "ahead")
    assert not of(Restart, bench.finish("d", "ahead"))


def test_under_other_bundles_it_waits_in_line() -> None:
    bench = a_bench(bundle="fcfs")
    occupied(bench)
    assert not of(AdmitPrefill, bench.arrive("r", 8, 400))
    assert bench.core.num_waiting == 1


@pytest.mark.parametrize(("slo_ttft_s", "begins"), [(4.9, True), (5.5, False)])
def test_it_waits_in_line_as_long_as_its_first_token_will_be_in_time(slo_ttft_s: float, begins: bool) -> None:
    """Whoever decodes is taken to draw 512 tokens in 5.12 s."""
    bench = a_bench()
    occupied(bench)
    request = replace(a_request("r", 8, 400), slo_ttft_s=slo_ttft_s)
    assert bool(of(AdmitPrefill, bench.feed(RequestArrived(request)))) == begins


def test_one_that_is_late_in_any_case_begins_too() -> None:
    """It would hold up those behind it that can yet be in time."""
    bench = a_bench(replace(POLICY, slo_ttft_s=0.0, slo_ttft_stretch=0.0))
    occupied(bench)
    assert of(AdmitPrefill, bench.arrive("r", 8, 400))


def test_kv_that_waits_is_bounded_and_holds_back_new_prompts() -> None:
    bench = a_bench(replace(POLICY, waiting_kv_share=0.25))  # 16 blocks
    occupied(bench)
    for number, begins in enumerate((True, True, False)):  # of 7 blocks each
        commands = bench.arrive(f"r{number}", 28, 400)
        assert bool(of(AdmitPrefill, commands)) == begins
        for step in of(RunStep, commands):
            bench.done("p", step.plan)
    assert bench.core.max_awaiting_decode_kv_share == 14 / 64
    assert bench.core.num_waiting == 1


def test_one_of_any_size_may_wait() -> None:
    bench = a_bench(replace(POLICY, waiting_kv_share=0.25))
    occupied(bench)
    assert of(AdmitPrefill, bench.arrive("large", 200, 400))
    assert not of(AdmitPrefill, bench.arrive("next", 8, 400))


def test_promised_kv_that_has_not_left_holds_back_new_prompts() -> None:
    bench = a_bench(replace(POLICY, waiting_kv_share=0.25), num_seats=4)
    for name in ("a", "b", "c"):
        (step,) = of(RunStep, bench.arrive(name, 28, 400))
        bench.offered("p", name)
        bench.done("p", step.plan)
    assert not of(AdmitPrefill, bench.arrive("next", 8, 400)), "21 of 16 blocks wait for their links"
    bench.landed("d", "a")
    bench.sent("p", "a")
    assert of(AdmitPrefill, bench.released("p", "a"))


def test_it_starts_again_if_its_own_instance_fails() -> None:
    bench = a_bench()
    occupied(bench)
    bench.arrive("ahead", 8, 400)
    (restart,) = of(Restart, bench.feed(InstanceLost(modelled_profile("p", Role.PREFILL).instance_id)))
    assert restart.request_id == "ahead"


def test_the_wait_for_room_is_that_of_the_ends_it_takes() -> None:
    full = Decoding(num_requests=10, num_blocks=100, num_free_seats=0, num_free_blocks=0, ends_per_s=2.0)
    assert full.room_s(1, 5) == 0.5
    assert full.room_s(3, 15) == 1.5  # seats
    assert full.room_s(1, 40) == 2.0  # blocks
    assert full._replace(num_requests=0).room_s(1, 1) == float("inf")


def test_a_long_prompt_leaves_room_to_others_that_wait_until_it_needs_it() -> None:
    policy = replace(POLICY, long_prompt_tokens=100, prefill_step_s=0.02)
    bench = a_bench(policy, num_seats=8, num_blocks=512)
    plans = [step.plan for name in ("a", "b") for step in of(RunStep, bench.arrive(name, 20, 1))]
    for name, tenant, prompt in (("long", "x", 200), ("short-0", "y", 20), ("short-1", "z", 20)):
        request = replace(a_request(name, prompt, 400), tenant=tenant)
        assert not of(AdmitPrefill, bench.feed(RequestArrived(request)))
    commands = bench.done("p", plans[0])
    (admit,) = of(AdmitPrefill, commands)
    assert (admit.request_id, admit.awaits_receiver) == ("long", True)
    plans = [*plans[1:], *[step.plan for step in of(RunStep, commands)]]
    placed: list[str] = []
    while plans:  # short ones have their room first; it has its own before its last chunk is planned
        commands = bench.done("p", plans.pop(0))
        placed += [place.request_id for place in of(ExpectCopy, commands)]
        plans += [step.plan for step in of(RunStep, commands)]
    assert placed == ["short-0", "short-1", "long"]
