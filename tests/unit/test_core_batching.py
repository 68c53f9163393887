"""Batching modes: what each lets an instance begin, hold and decode, one story each."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pdmesh.core.batching.modes import BatchingView
from pdmesh.core.commands import Command, RunStep, WakeAt
from pdmesh.core.config import CoreConfig
from pdmesh.core.events import InstanceJoined, RequestArrived, RequestCancelled, RequestFinished, Tick
from pdmesh.core.operator_events import BatchingChangeRequested, BundleChangeRequested
from pdmesh.errors import ConfigError
from pdmesh.model import Epoch, FinishReason, InstanceId, Request, RequestId, Role
from pdmesh.plans import StepPlan
from pdmesh.policy.batching import Mode
from pdmesh.policy.bundles import make_bundle
from pdmesh.policy.config import PolicyConfig
from pdmesh.policy.latency import LinearLatencyModel
from pdmesh_testing.core import GATEWAY, CoreBench, a_request, a_role, of
from pdmesh_testing.modelled import modelled_profile

MODEL = LinearLatencyModel(a_s=0.006, b_s=0.00015, c_s=0.0, d_s=0.0, decode_a_s=0.004, decode_s=0.0002)


def a_bench(*names: str, batching: str = "eb", threshold: float | None = 0.5, max_num_seqs: int = 4) -> CoreBench:
    policy = PolicyConfig(chunk_tokens=16, batching=batching, eb_threshold=threshold, latency=MODEL)
    profiles = [modelled_profile(name, Role.MIXED, max_num_seqs=max_num_seqs) for name in names or ("m",)]
    return CoreBench(*profiles, config=CoreConfig(policy=policy))


def plans(commands: list[Command]) -> list[StepPlan]:
    return [command.plan for command in of(RunStep, commands)]


def view_of(bench: CoreBench) -> BatchingView:
    view = bench.core.batching_of(InstanceId("m"))
    assert view is not None
    return view


def end(bench: CoreBench, request_id: str, instance_id: str = "m", num_tokens: int = 4) -> list[Command]:
    """It decodes its last token, and its KV is released."""
    key = InstanceId(instance_id), RequestId(request_id), Epoch(0)
    commands = bench.feed(RequestFinished(*key, FinishReason.LENGTH, num_tokens))
    return commands + bench.released(instance_id, request_id)


def fill(bench: CoreBench, number: int = 4, instance_id: str = "m") -> None:
    """Requests r0, r1, …, computed; whatever is planned is done at once."""
    for index in range(number):
        for plan in plans(bench.arrive(f"r{index}")):
            run(bench, plan, instance_id)


def run(bench: CoreBench, plan: StepPlan, instance_id: str = "m") -> None:
    for following in plans(bench.done(instance_id, plan)):
        run(bench, following, instance_id)


def test_prompts_are_computed_alone_and_a_plan_without_chunks_lets_the_residents_go_on() -> None:
    bench = a_bench()
    first = plans(bench.arrive("r0"))
    assert [(len(plan.chunks), plan.with_decodes, plan.holds_decodes) for plan in first] == [
        (1, False, True),
        (0, True, False),
    ]


def test_a_decode_phase_ends_when_enough_seats_are_idle_and_their_kv_is_released() -> None:
    bench = a_bench()
    fill(bench)
    assert not plans(bench.arrive("a"))
    assert not plans(bench.arrive("b"))
    assert not plans(end(bench, "r0"))  # one of four seats is idle, two are wanted
    finished = bench.feed(RequestFinished(InstanceId("m"), RequestId("r1"), Epoch(0), FinishReason.LENGTH, 4))
    assert not plans(finished)  # its tokens are out, its KV is not yet released
    begun, ended = plans(bench.released("m", "r1"))
    assert {chunk.request_id for chunk in begun.chunks} == {"a", "b"}
    assert begun.holds_decodes
    assert not begun.with_decodes
    assert not ended.holds_decodes


def test_a_queue_shorter_than_the_threshold_is_served() -> None:
    bench = a_bench()
    fill(bench)
    bench.arrive("a")
    assert not plans(end(bench, "r0"))
    assert not plans(end(bench, "r1"))
    begun, _ = plans(end(bench, "r2"))  # one waits, one is busy: half of the two
    assert [chunk.request_id for chunk in begun.chunks] == ["a"]


def test_a_prompt_of_several_chunks_holds_the_residents_until_its_last() -> None:
    bench = a_bench(max_num_seqs=2)
    fill(bench, 1)
    first, second = plans(bench.arrive("a", prompt=40))
    assert first.holds_decodes
    assert second.holds_decodes
    (third,) = plans(bench.done("m", first))
    assert third.holds_decodes
    (release,) = plans(bench.done("m", second))
    assert not release.chunks
    assert release.with_decodes
    assert not release.holds_decodes


def test_a_phase_whose_prompt_is_cancelled_ends() -> None:
    bench = a_bench(max_num_seqs=2)
    fill(bench, 1)
    first, second = plans(bench.arrive("a", prompt=100))
    assert not plans(bench.feed(RequestCancelled(GATEWAY, RequestId("a"), Epoch(0))))
    (release,) = plans(bench.done("m", first))
    assert not release.chunks
    assert not release.holds_decodes
    assert not plans(bench.done("m", second))


def test_who_would_miss_its_target_opens_a_phase_early_and_wakes_the_core_for_it() -> None:
    bench = a_bench()
    fill(bench)
    end(bench, "r0")
    request = a_request("urgent", arrival_s=1.0)
    commands = bench.feed(RequestArrived(with_target(request, 0.5)), at_s=1.0)
    assert not plans(commands)
    (wake,) = of(WakeAt, commands)
    assert 1.4 < wake.at_s < 1.5
    assert plans(bench.feed(Tick(), at_s=wake.at_s))[0].chunks[0].request_id == "urgent"


def test_who_has_missed_its_target_waits_with_the_others() -> None:
    bench = a_bench()
    fill(bench)
    end(bench, "r0")
    late = with_target(a_request("late", arrival_s=0.0), 0.5)
    commands = bench.feed(RequestArrived(late), at_s=2.0)
    assert not plans(commands)


def with_target(request: Request, slo_ttft_s: float) -> Request:
    return replace(request, slo_ttft_s=slo_ttft_s)


def test_instances_of_a_pool_do_not_enter_prefill_phases_at_the_same_time() -> None:
    bench = a_bench("m", "n", max_num_seqs=2)
    for index in range(4):
        bench.now_s += 1.0
        for command in of(RunStep, bench.arrive(f"r{index}")):
            run(bench, command.plan, command.instance_id)
    where = {request.request_id: request.instance_ids[0] for request in bench.core.requests(9)}
    first, second = ("m", "n")
    by_instance = {name: next(key for key, place in where.items() if place == name) for name in (first, second)}
    bench.now_s += 1.0
    assert not plans(end(bench, by_instance[first], first))
    assert not plans(end(bench, by_instance[second], second))
    (begun, _), later = of(RunStep, bench.arrive("a")), bench.arrive("b")  # half of the seats of both are idle
    assert not plans(later)
    (wake,) = of(WakeAt, later)
    other = of(RunStep, bench.feed(Tick(), at_s=wake.at_s))
    assert {other[0].instance_id, begun.instance_id} == {first, second}


def test_a_switch_to_mixed_in_a_prefill_phase_lets_the_residents_go_on() -> None:
    bench = a_bench(max_num_seqs=2)
    fill(bench, 1)
    first, second = plans(bench.arrive("a", prompt=40))
    bench.feed(BatchingChangeRequested("mb"))
    assert bench.core.batching == "mb"
    (third,) = plans(bench.done("m", first))
    assert third.with_decodes
    assert not third.holds_decodes
    assert not plans(bench.done("m", second))


def test_another_role_in_a_prefill_phase_lets_the_residents_go_on() -> None:
    bench = a_bench(max_num_seqs=2)
    fill(bench, 1)
    first, second = plans(bench.arrive("a", prompt=32))
    bench.feed(a_role("m", Role.PREFILL))
    (release,) = plans(bench.done("m", first))
    assert not release.holds_decodes
    assert not plans(bench.done("m", second))


def test_an_instance_that_comes_back_is_not_thought_to_hold_its_residents() -> None:
    bench = a_bench(max_num_seqs=2)
    fill(bench, 1)
    bench.arrive("a", prompt=100)
    assert view_of(bench).is_prefill_phase
    bench.feed(InstanceJoined(modelled_profile("m", Role.MIXED, max_num_seqs=2), ()))
    assert not view_of(bench).is_prefill_phase


@pytest.mark.parametrize(("configured", "own"), [("", "ebplus"), ("mb", "mb")])
def test_another_bundle_batches_as_it_is_configured(configured: str, own: str) -> None:
    bench = a_bench(batching=configured)
    bench.feed(BatchingChangeRequested("eb", 0.5))
    assert (bench.core.batching, bench.core.desired.batching) == ("eb", BatchingChangeRequested("eb", 0.5))
    bench.feed(BundleChangeRequested("no such bundle"))
    assert bench.core.batching == "eb"
    bench.feed(BundleChangeRequested("pdmesh"))
    assert (bench.core.batching, bench.core.desired.batching) == (own, None)
    bench.feed(BatchingChangeRequested("eb"))
    bench.feed(InstanceJoined(modelled_profile("n", Role.MIXED), ()))
    assert bench.core.batching == "eb"


def test_a_mode_or_threshold_that_there_is_not_changes_nothing() -> None:
    bench = a_bench(batching="mb")
    bench.feed(BatchingChangeRequested("best"))
    bench.feed(BatchingChangeRequested("eb", 1.0))
    assert bench.core.batching == "mb"
    assert bench.core.ignored == {"BatchingChangeRequested": 2}
    with pytest.raises(ConfigError, match="no batching mode is called 'best': use one of mb, eb, ebplus"):
        make_bundle("fcfs", PolicyConfig(batching="best"))
    with pytest.raises(ConfigError, match=r"the threshold is 1\.5: must be a share between 0 and 1"):
        make_bundle("fcfs", PolicyConfig(batching="eb", eb_threshold=1.5))


def test_where_nothing_is_known_ebplus_is_mixed() -> None:
    bench = a_bench(batching="ebplus", threshold=None)
    fill(bench)
    assert view_of(bench).mode is Mode.MIXED
