"""Changes of roles are judged by how requests fare after them, and taken back where they made things worse."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pdmesh.core.commands import AdmitPrefill, PlaceDecode, RunStep
from pdmesh.core.config import CoreConfig
from pdmesh.core.events import RequestArrived, Tick
from pdmesh.core.operator_events import BundleChangeRequested, OperationRequested
from pdmesh.core.operators.judging import (
    COOL_DOWN_S,
    JUDGE_S,
    NUM_TO_JUDGE,
    Judge,
    Standing,
    chance_of,
    has_enough_data,
    why_worse,
)
from pdmesh.core.operators.operation_records import OperationRecord
from pdmesh.core.requests.request import RequestState
from pdmesh.model import (
    InstanceId,
    InstanceProfile,
    OperationId,
    OperationKind,
    OperationState,
    Request,
    Role,
)
from pdmesh.policy.config import PolicyConfig
from pdmesh.policy.latency import LinearLatencyModel
from pdmesh.policy.views import Rank
from pdmesh_testing.core import CoreBench, a_request, of
from pdmesh_testing.modelled import modelled_profile
from pdmesh_testing.worker import a_shard


def profile(name: str) -> InstanceProfile:
    return modelled_profile(name, Role.PREFILL if name[0] == "p" else Role.DECODE)


def standing(num_met: int, num_judged: int, wait_s: float = 0.0) -> Standing:
    return Standing(num_judged, num_judged, num_met, wait_s)


def asked_for(instance: str, role: Role, name: str, *, judged: bool = True, force: bool = False) -> OperationRequested:
    return OperationRequested(
        operation_id=OperationId(name),
        kind=OperationKind.ROLE,
        instance_id=InstanceId(instance),
        timeout_s=10.0,
        role=role,
        judged=judged,
        force=force,
    )


def hurried(name: str, *, epoch: int = 0, arrival_s: float = 0.0) -> Request:
    """It has a target of half a second."""
    return replace(a_request(name, epoch=epoch, arrival_s=arrival_s), slo_ttft_s=0.5)


def state(bench: CoreBench, name: str) -> OperationRecord:
    return next(view for view in bench.core.operations if view.operation_id == name)


def role_of(bench: CoreBench, instance: str) -> Role:
    return next(view.role for view in bench.core.instances if view.instance_id == instance)


def serve(bench: CoreBench, name: str, ttft_s: float) -> None:
    """One request with a target of half a second, whose first token comes after ``ttft_s``."""
    commands = bench.feed(RequestArrived(hurried(name, arrival_s=bench.now_s)))
    (admit,), (step,) = of(AdmitPrefill, commands), of(RunStep, commands)
    bench.now_s += ttft_s
    bench.done(step.instance_id, step.plan)
    target = admit.instance_id
    for place in of(PlaceDecode, commands):
        target = place.instance_id
        bench.landed(target, name)
        bench.sent(admit.instance_id, name)
        bench.released(admit.instance_id, name)
    bench.finish(target, name)
    bench.released(target, name)


@pytest.mark.parametrize(
    ("before", "after", "is_worse"),
    [
        (standing(100, 100), standing(80, 100), True),
        (standing(100, 100), standing(98, 100), False),  # two points
        (standing(28, 30), standing(26, 30), False),  # by chance
        (standing(0, 0), standing(0, 100), False),  # nothing to compare with
        (standing(90, 100), standing(100, 100), False),
        (standing(30, 30, wait_s=0.1), standing(30, 30, wait_s=0.5), True),
        (standing(30, 30, wait_s=1.0), standing(30, 30, wait_s=1.4), False),
    ],
)
def test_what_is_worse(before: Standing, after: Standing, is_worse: bool) -> None:
    assert (why_worse(before, after, 0.0) is not None) is is_worse


def test_the_chance_is_that_of_the_table() -> None:
    assert chance_of(standing(90, 100), standing(80, 100)) == pytest.approx(0.0239, abs=1e-4)  # z = 1.98
    assert chance_of(standing(100, 100), standing(100, 100)) == 1.0


def test_who_still_waits_counts_too() -> None:
    assert why_worse(standing(30, 30, wait_s=0.1), standing(30, 30, wait_s=0.1), 5.0) is not None


def test_so_many_requests_tell_or_so_much_time() -> None:
    assert not has_enough_data(standing(9, NUM_TO_JUDGE - 1), 0.0, JUDGE_S - 1)
    assert has_enough_data(standing(9, NUM_TO_JUDGE), 0.0, 1.0)
    assert has_enough_data(standing(0, 0), 0.0, JUDGE_S)


def test_what_was_started_again_does_not_count() -> None:
    judge = Judge()
    request = hurried("a")
    judge.finished(request, 0.0, request.arrival_s + 9.0, 5, request.arrival_s + 10.0)
    judge.refused(hurried("b", epoch=1), 1.0)
    assert judge.before(request.arrival_s + 10.0) == Standing(1, 1, 0, 0.0)
    judge.refused(hurried("c"), request.arrival_s + 10.0)
    assert judge.before(request.arrival_s + 10.0) == Standing(2, 2, 0, 0.0)


def test_a_flip_that_made_things_worse_is_taken_back_and_not_made_again_soon() -> None:
    bench = CoreBench(*(profile(name) for name in ("p0", "p1", "d0")))
    for number in range(NUM_TO_JUDGE):
        serve(bench, f"before-{number}", 0.2)
    bench.feed(asked_for("p1", Role.DECODE, "x"))
    assert (state(bench, "x").state, role_of(bench, "p1")) == (OperationState.RUNNING, Role.DECODE)
    for number in range(NUM_TO_JUDGE):
        assert state(bench, "x").state is OperationState.RUNNING, number
        serve(bench, f"after-{number}", 0.9)
    assert state(bench, "x").state is OperationState.FAILED
    assert "0% of 30 requests met their targets, 100% of 30 before" in state(bench, "x").detail
    assert (state(bench, "x/back").state, role_of(bench, "p1")) == (OperationState.DONE, Role.PREFILL)
    bench.feed(asked_for("p1", Role.DECODE, "y"))
    assert "was taken back 0 s ago" in state(bench, "y").detail
    bench.feed(asked_for("p1", Role.DECODE, "z", judged=False))
    assert state(bench, "z").state is OperationState.DONE
    bench.feed(asked_for("p1", Role.PREFILL, "back", judged=False))
    bench.now_s += COOL_DOWN_S
    bench.feed(asked_for("p1", Role.DECODE, "later"))
    assert state(bench, "later").state is OperationState.RUNNING


def test_a_flip_that_nobody_notices_is_done_when_its_time_is_over() -> None:
    bench = CoreBench(*(profile(name) for name in ("p0", "p1", "d0")))
    bench.feed(asked_for("p1", Role.DECODE, "x"))
    bench.now_s += JUDGE_S
    bench.feed(Tick())
    assert (state(bench, "x").state, role_of(bench, "p1")) == (OperationState.DONE, Role.DECODE)


def test_requests_that_wait_for_room_once_they_are_computed_wait_too() -> None:
    """They are placed and draw their first tokens at once; their second ones are late."""
    latency = LinearLatencyModel(a_s=0.0, b_s=1e-3, c_s=0.0, d_s=0.0, decode_a_s=0.01)
    policy = PolicyConfig(latency=latency, prefills_locally=False, slo_ttft_s=0.0, slo_ttft_stretch=0.0)
    seat = modelled_profile("d0", Role.DECODE, max_num_seqs=1)
    bench = CoreBench(profile("p0"), seat, profile("d1"), config=CoreConfig(policy=policy))
    bench.feed(BundleChangeRequested("pdmesh"))
    for number in range(NUM_TO_JUDGE):
        serve(bench, f"before-{number}", 0.2)
    bench.feed(asked_for("d1", Role.PREFILL, "x"))
    for name in ("first", "ahead"):  # the only seat is taken by the first one
        (step,) = of(RunStep, bench.arrive(name))
        bench.done(step.instance_id, step.plan)
        if name == "first":
            bench.landed("d0", name)
    bench.now_s += JUDGE_S
    bench.feed(Tick())
    assert "taken back: requests wait 30 s" in state(bench, "x").detail


def test_what_waited_for_room_counts_when_it_has_ended() -> None:
    waited = RequestState(replace(a_request("r"), arrival_s=1.0), rank=Rank())
    assert waited.waited_s(3.0) == 2.0
    waited.place(a_shard("p", 1), 1.5, stays=False)
    assert waited.waited_s(3.0) == 0.5, "it is computed"
    waited.draw_first_token(2.0)
    assert waited.waited_s(6.0) == 4.5, "it has no room yet"
    waited.keep(a_shard("p", 1))
    assert waited.waited_s(6.0) == 0.5, "it had room from the beginning"
    waited.find_room(5.0)
    assert waited.waited_s(6.0) == 3.5
