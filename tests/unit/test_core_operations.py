"""Operators' operations on instances: what they refuse, what they wait for, and what starts again elsewhere."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pdmesh.core.commands import (
    AdmitPrefill,
    Command,
    ExpectCopy,
    FreeKv,
    Restart,
    RunStep,
    SetRole,
    StopInstance,
    WakeAt,
)
from pdmesh.core.events import InstanceJoined, InstanceLost, Tick
from pdmesh.core.operator_events import OperationCancelled, OperationRequested
from pdmesh.core.operators.instance_operations import COME_BACK_S
from pdmesh.core.operators.operation_records import MAX_ENDED
from pdmesh.model import Epoch, InstanceId, RequestId, Resident, Role
from pdmesh.operations import OperationId, OperationKind, OperationState
from pdmesh_testing.core import GATEWAY, CoreBench, bench_of, named_profile, of


def asked_for(
    kind: str, instance: str, *, role: str | None = None, timeout_s: float = 10.0, name: str = "", force: bool = False
) -> OperationRequested:
    return OperationRequested(
        operation_id=OperationId(name or f"{kind}-{instance}"),
        kind=OperationKind(kind),
        instance_id=InstanceId(instance),
        role=None if role is None else Role(role),
        timeout_s=timeout_s,
        force=force,
    )


def restarted(commands: list[Command]) -> list[str]:
    return [restart.request_id for restart in of(Restart, commands)]


def test_a_drain_is_done_when_the_last_request_has_left() -> None:
    bench = bench_of("p0", "d0", "d1")
    target = bench.decoding("a")
    assert not restarted(bench.feed(asked_for("drain", target, name="x")))
    assert (bench.operation("x").state, bench.operation("x").num_left) == (OperationState.RUNNING, 1)
    (place,) = of(ExpectCopy, bench.arrive("b"))
    assert place.instance_id != target
    bench.finish(target, "a")
    bench.released(target, "a")
    assert bench.operation("x").state is OperationState.DONE
    bench.feed(asked_for("undrain", target))
    assert bench.operation(f"undrain-{target}").state is OperationState.DONE
    assert not next(view for view in bench.core.instances if view.instance_id == target).draining


def test_what_is_left_at_the_time_limit_starts_again_elsewhere() -> None:
    bench = bench_of("p0", "d0", "d1")
    target = bench.decoding("a")
    commands = bench.feed(asked_for("drain", target, name="x", timeout_s=3.0))
    assert [wake.at_s for wake in of(WakeAt, commands)] == [bench.now_s + 3.0]
    bench.now_s += 3.0
    commands = bench.feed(Tick())
    assert restarted(commands) == ["a"]
    assert sorted(free.instance_id for free in of(FreeKv, commands)) == ["d0", "d1"], "it was on its way to the other"
    assert bench.operation("x").state is OperationState.RUNNING, "its KV is not free yet"
    for name in ("d0", "d1"):
        bench.released(name, "a")
    assert bench.operation("x").state is OperationState.DONE
    (place,) = of(ExpectCopy, bench.arrive("a", epoch=1))
    assert place.instance_id != target


def test_a_prompt_that_would_take_longer_than_the_limit_leaves_at_once() -> None:
    bench = bench_of("p0", "p1", "d0")
    (step,) = of(RunStep, bench.arrive("a"))
    assert restarted(bench.feed(asked_for("drain", step.instance_id, timeout_s=0.0))) == ["a"]


def test_a_process_that_is_named_is_restarted_once() -> None:
    bench = bench_of("p0", "p1", "d0")
    first = replace(named_profile("p1"), pid=1)
    bench.feed(InstanceLost(first.instance_id))
    bench.feed(InstanceJoined(first, ()))
    asked = replace(asked_for("restart", "p1", name="x"), pid=1)
    assert of(StopInstance, bench.feed(asked))
    bench.feed(InstanceLost(first.instance_id))
    gone = replace(asked, operation_id=OperationId("y"))
    bench.feed(replace(gone, instance_id=InstanceId("p2")))
    assert bench.operation("y").detail == "waiting for the instance to come back", "who names a process has seen it"
    bench.feed(InstanceJoined(replace(first, pid=2), ()))
    assert bench.operation("x").state is OperationState.DONE
    again = replace(asked, operation_id=OperationId("z"))
    assert not of(StopInstance, bench.feed(again)), "it was another one that was to go"
    assert bench.operation("z").state is OperationState.DONE


def test_the_last_of_its_kind_is_drained_by_force_only() -> None:
    bench = bench_of("p0", "d0")
    bench.feed(asked_for("drain", "d0", name="x"))
    assert bench.operation("x").state is OperationState.REFUSED
    assert "the last that can decode" in bench.operation("x").detail
    assert of(RunStep, bench.arrive("a")), "nothing has changed"
    bench.feed(asked_for("drain", "d0", name="y", force=True))
    assert bench.operation("y").state is OperationState.RUNNING


def test_a_mixed_instance_becomes_what_another_one_is_not() -> None:
    bench = bench_of("m0", "p0")
    bench.feed(asked_for("role", "m0", role="decode", name="x"))
    assert bench.operation("x").state is OperationState.DONE


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        (asked_for("drain", "nobody", name="x"), "no instance is called 'nobody': the mesh has d0, d1, p0"),
        (asked_for("role", "p0", role="decode", name="x"), "the last that can prefill"),
        (asked_for("drain", "d0", name="x"), "operation first (drain) runs on d0"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_changes(asked: OperationRequested, reason: str) -> None:
    bench = bench_of("p0", "d0", "d1")
    assert bench.decoding("a") == "d0"
    bench.feed(asked_for("drain", "d0", name="first"))
    before = bench.core.instances
    assert not bench.feed(asked)
    assert bench.operation("x").state is OperationState.REFUSED
    assert reason in bench.operation("x").detail
    assert bench.core.instances == before


def test_asked_twice_is_done_once() -> None:
    bench = bench_of("p0", "d0", "d1")
    bench.decoding("a")
    bench.feed(asked_for("drain", "d0", name="x"))
    assert not bench.feed(asked_for("drain", "d0", name="x"))
    assert [view.state for view in bench.core.operations] == [OperationState.RUNNING]


def test_an_operation_that_is_taken_back_leaves_the_instance_as_it_was() -> None:
    bench = bench_of("p0", "d0", "d1")
    target = bench.decoding("a")
    bench.feed(asked_for("drain", target, name="x"))
    bench.feed(OperationCancelled(OperationId("x")))
    assert bench.operation("x").state is OperationState.CANCELLED
    assert not any(view.draining for view in bench.core.instances)
    bench.feed(OperationCancelled(OperationId("x")))
    assert bench.core.ignored["OperationCancelled"] == 1


def test_an_instance_takes_on_its_new_role_at_once_and_the_operation_is_done_when_its_old_work_has_left() -> None:
    bench = bench_of("p0", "d0", "d1")
    target = bench.decoding("a")
    commands = bench.feed(asked_for("role", target, role="prefill", name="x"))
    assert [(command.instance_id, command.role) for command in of(SetRole, commands)] == [(target, Role.PREFILL)]
    view = next(view for view in bench.core.instances if view.instance_id == target)
    assert (view.role, view.draining) == (Role.PREFILL, False)
    assert (bench.operation("x").state, bench.operation("x").num_left) == (OperationState.RUNNING, 1)
    placed = [bench.arrive(name) for name in ("b", "c", "d")]
    prefills = {admitted.instance_id for commands in placed for admitted in of(AdmitPrefill, commands)}
    assert target in prefills, "it prefills while its decode leaves"
    assert target not in {place.instance_id for commands in placed for place in of(ExpectCopy, commands)}
    bench.finish(target, "a")
    bench.released(target, "a")
    assert bench.operation("x").state is OperationState.DONE


def test_what_comes_to_an_instance_in_its_new_role_need_not_leave_it() -> None:
    bench = bench_of("p0", "p1", "d0")
    (step,) = of(RunStep, bench.arrive("a"))
    bench.feed(asked_for("role", step.instance_id, role="decode", name="x", timeout_s=10.0))
    assert bench.operation("x").num_left == 1
    places = [place.instance_id for name in "bcd" for place in of(ExpectCopy, bench.arrive(name))]
    assert step.instance_id in places, "it decodes while its prompt is computed to its end"
    assert bench.operation("x").num_left == 1
    bench.feed(Tick(), at_s=bench.now_s + 10.0)
    assert set(restarted(bench.commands)) <= {"a"}, "at the time limit only what is old starts again"


def test_undrain_and_cancel_give_an_instance_its_old_role_again() -> None:
    for name, again in (
        ("cancel", OperationCancelled(OperationId("x"))),
        ("undrain", asked_for("undrain", "", name="u")),
    ):
        bench = bench_of("p0", "d0", "d1")
        target = bench.decoding("a")
        bench.feed(asked_for("role", target, role="prefill", name="x"))
        bench.feed(again if isinstance(again, OperationCancelled) else replace(again, instance_id=InstanceId(target)))
        view = next(view for view in bench.core.instances if view.instance_id == target)
        assert (view.role, bench.operation("x").state) == (Role.DECODE, OperationState.CANCELLED), name


def test_the_next_scheduler_knows_which_role_an_instance_had() -> None:
    bench = bench_of("p0", "d0", "d1")
    target = bench.decoding("a")
    bench.feed(asked_for("role", target, role="prefill", name="x"))
    (again,) = bench.core.desired.operations
    assert again.role_before is Role.DECODE
    after = CoreBench()
    after.feed(replace(again, again=True))
    resident = Resident(
        request_id=RequestId("a"),
        epoch=Epoch(0),
        gateway_id=GATEWAY,
        num_blocks=3,
        num_context_tokens=9,
        decoding=True,
        max_total_tokens=11,
    )
    after.feed(InstanceJoined(replace(named_profile(target), role=Role.PREFILL), (resident,)))
    assert (after.operation("x").state, after.operation("x").num_left) == (OperationState.RUNNING, 1)
    after.feed(OperationCancelled(OperationId("x")))
    assert next(iter(after.core.instances)).role is Role.DECODE


def test_a_role_that_does_more_changes_at_once() -> None:
    bench = bench_of("p0", "d0")
    bench.decoding("a")
    commands = bench.feed(asked_for("role", "d0", role="mixed", name="x"))
    assert of(SetRole, commands)
    assert bench.operation("x").state is OperationState.DONE


def test_what_was_wanted_holds_for_an_instance_that_comes_back() -> None:
    bench = bench_of("p0", "d0", "d1", "m0")
    bench.feed(asked_for("drain", "d0"))
    bench.feed(asked_for("role", "m0", role="decode"))
    for name in ("d0", "m0"):
        bench.feed(InstanceLost(InstanceId(name)))
    commands = [command for name in ("d0", "m0") for command in bench.feed(InstanceJoined(named_profile(name), ()))]
    assert [(command.instance_id, command.role) for command in of(SetRole, commands)] == [("m0", Role.DECODE)]
    views = {view.instance_id: view for view in bench.core.instances}
    assert views[InstanceId("d0")].draining
    assert views[InstanceId("m0")].role is Role.DECODE


def test_a_drain_is_done_when_the_instance_dies_and_a_role_waits_for_it() -> None:
    bench = bench_of("p0", "d0", "d1", "d2")
    bench.decoding("a")
    bench.decoding("b")
    bench.feed(asked_for("drain", "d0", name="x"))
    bench.feed(asked_for("role", "d1", role="prefill", name="y"))
    for name in ("d0", "d1"):
        bench.feed(InstanceLost(InstanceId(name)))
    assert (bench.operation("x").state, bench.operation("y").state) == (OperationState.DONE, OperationState.RUNNING)
    bench.feed(InstanceJoined(named_profile("d1"), ()))
    assert bench.operation("y").state is OperationState.DONE


def test_the_next_scheduler_goes_on_with_what_was_asked_of_this_one() -> None:
    bench = bench_of("p0", "p1", "d0", "d1")
    target = bench.decoding("a")
    bench.feed(asked_for("drain", "p0", name="done"))
    bench.feed(asked_for("role", target, role="mixed", name="role"))
    other = "d1" if target == "d0" else "d0"
    bench.feed(asked_for("drain", target, name="running"))
    desired = bench.core.desired.operations
    assert [each.operation_id for each in desired] == ["role", "done", "running"]

    after = CoreBench()
    for each in desired:
        after.feed(replace(each, again=True))
    for name in ("p0", "p1", target, other):
        after.feed(InstanceJoined(named_profile(name), ()))
    views = {view.instance_id: view for view in after.core.instances}
    assert views[InstanceId("p0")].draining
    assert (views[InstanceId(target)].draining, views[InstanceId(target)].role) == (True, Role.MIXED)
    assert [view.state for view in after.core.operations] == [OperationState.DONE] * 3


def test_an_instance_that_never_comes_back_ends_the_operation_at_its_limit() -> None:
    bench = bench_of("p0", "d0")
    bench.feed(replace(asked_for("role", "d9", role="mixed", name="x"), again=True))
    bench.now_s += 10.0
    bench.feed(Tick())
    assert bench.operation("x").state is OperationState.FAILED


def test_only_so_many_that_are_over_are_remembered() -> None:
    bench = bench_of("p0", "d0")
    for number in range(MAX_ENDED + 50):
        bench.feed(asked_for("drain", "nobody", name=f"x{number}"))
    assert len(bench.core.operations) <= MAX_ENDED + 1


def again(name: str, pid: int) -> InstanceJoined:
    return InstanceJoined(replace(named_profile(name), pid=pid), ())


def test_a_restart_stops_the_process_once_all_has_left_and_is_done_when_the_next_one_joins() -> None:
    bench = bench_of("p0", "d0", "d1")
    target = bench.decoding("a")
    assert not of(StopInstance, bench.feed(asked_for("restart", target, name="x")))
    bench.finish(target, "a")
    commands = bench.released(target, "a")
    assert [command.instance_id for command in of(StopInstance, commands)] == [target]
    bench.feed(InstanceLost(InstanceId(target)))
    assert bench.operation("x").state is OperationState.RUNNING
    bench.feed(again(target, pid=7))
    assert bench.operation("x").state is OperationState.DONE
    assert not any(view.draining for view in bench.core.instances)


def test_a_process_that_only_reconnects_is_told_again_to_stop() -> None:
    bench = bench_of("p0", "d0", "d1")
    assert of(StopInstance, bench.feed(asked_for("restart", "d0", name="x")))
    assert of(StopInstance, bench.feed(again("d0", pid=0)))
    (place,) = of(ExpectCopy, bench.arrive("a"))
    assert place.instance_id == "d1"


def test_a_restart_under_way_is_not_begun_again_by_the_next_scheduler() -> None:
    bench = bench_of("p0", "d0", "d1")
    bench.feed(asked_for("restart", "d0", name="x"))
    (carried,) = bench.core.desired.operations
    after = CoreBench()
    after.feed(replace(carried, again=True))
    commands = [command for event in (again("p0", 0), again("d1", 0), again("d0", 9)) for command in after.feed(event)]
    assert not of(StopInstance, commands)
    assert after.operation("x").state is OperationState.DONE


@pytest.mark.parametrize("is_gone", [True, False])
def test_a_process_that_does_not_come_back_ends_the_restart(is_gone: bool) -> None:
    bench = bench_of("p0", "d0", "d1")
    bench.feed(asked_for("restart", "d0", name="x"))
    if is_gone:
        bench.feed(InstanceLost(InstanceId("d0")))
    bench.now_s += COME_BACK_S
    bench.feed(Tick())
    assert bench.operation("x").state is OperationState.FAILED
    assert not any(view.draining for view in bench.core.instances), "one that lives on is used on"
