"""A restart of every process in the core: its turns, what it waits for, and what the next scheduler is told."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pdmesh.core.commands import ExpectCopy, RunStep, StopInstance, WakeAt
from pdmesh.core.events import Event, InstanceJoined, InstanceLost, Tick
from pdmesh.core.operator_events import (
    ActuatorLost,
    BundleChangeRequested,
    FailedStart,
    OperationCancelled,
    OperationRequested,
    RollingRequested,
)
from pdmesh.core.operators.operation_records import TAKEN_BACK
from pdmesh.core.operators.replacements import SILENCE_LIMIT_S
from pdmesh.model import InstanceId, InstanceProfile, Role
from pdmesh.operations import ManagedProcess, OperationId, OperationKind, OperationState
from pdmesh_testing.core import CoreBench, a_report, bench_of, named_profile, of

ROLLING = RollingRequested(operation_id=OperationId("x"), timeout_s=10.0, start_timeout_s=100.0, began_at=1000.0)
SERVICES = {"scheduler": 1, "gateway": 2}


class Machine:
    """A core, and a supervisor that does what it wants when it is told to."""

    def __init__(self, *names: str) -> None:
        self.bench = bench_of(*names)
        self.instances = dict.fromkeys(names, 0)
        self.lasting = frozenset(names)
        self.services = dict(SERVICES)
        self.outdated: list[str] = []  # of a container that is made from an older template
        self.did: list[str] = []
        self.weights, self.began_at = "", 0.0  # of the processes that are started from now on
        self.report()

    def report(self, *failed: FailedStart) -> None:
        report = a_report(
            *self.instances, services=self.services, pids=self.instances, outdated=self.outdated, failed=failed
        )
        self.bench.feed(report)

    def stopped(self) -> list[str]:
        """Instances whose processes were told to end, and have not been started again."""
        commands = of(StopInstance, self.bench.commands)
        self.bench.commands.clear()
        return [command.instance_id for command in commands]

    def restart(self, name: str) -> None:
        self.instances[name] += 1
        self.did.append(name)
        self.bench.feed(InstanceLost(InstanceId(name)))
        self.bench.feed(InstanceJoined(replace(self.profile(name), pid=self.instances[name]), ()))
        self.report()

    def profile(self, name: str) -> InstanceProfile:
        return named_profile(name, weights=self.weights, started_at=self.began_at)

    def act(self) -> bool:
        """Do what is wanted now; whether there was anything."""
        stopped = self.stopped()
        for name in stopped:
            self.restart(name)
        desired = self.bench.core.desired_processes("a")
        start = [each.instance_id for each in desired.start if each.instance_id not in self.instances]
        stop = [each for each in desired.stop if each in self.instances]
        beside = set(desired.temporary)
        assert {*start} <= beside, "the supervisor must know that the instance leaves again"
        assert beside.isdisjoint(self.lasting)
        processes = {**self.services, **self.instances}
        replaced = [each.name for each in desired.replace if processes[each.name] == each.pid]
        for name in start:
            self.did.append(f"+{name}")
            self.instances[name] = 0
            self.bench.feed(InstanceJoined(self.profile(name), ()))
        for name in stop:
            self.did.append(f"-{name}")
            del self.instances[name]
            self.bench.feed(InstanceLost(InstanceId(name)))
        for name in replaced:
            if name in self.instances:
                self.outdated.remove(name)
                self.restart(name)
                continue
            self.did.append(name)
            self.services[name] += 10
        self.report()
        return bool(stopped or start or stop or replaced)

    def act_until_over(self) -> OperationState:
        while self.act():
            pass
        return self.bench.operation("x").state


def test_all_are_replaced_in_turn_beside_another_one_where_there_is_one_of_a_kind() -> None:
    machine = Machine("prefill-0", "decode-0")
    machine.bench.feed(ROLLING)
    assert machine.act_until_over() is OperationState.DONE
    assert machine.did == [
        *("+prefill-1", "prefill-0", "-prefill-1"),
        *("+decode-1", "decode-0", "-decode-1"),
        *("gateway", "scheduler"),
    ]
    assert machine.bench.core.desired.rolling is None


@pytest.mark.parametrize(
    ("names", "did"),
    [
        (
            ("prefill-0", "prefill-1", "decode-0", "decode-1"),
            ["prefill-0", "decode-0", "prefill-1", "decode-1"],
        ),
        (
            ("prefill-0", "decode-0", "decode-1"),
            ["+prefill-1", "decode-0", "prefill-0", "-prefill-1", "decode-1"],
        ),
        (
            ("prefill-0", "decode-0"),
            ["+prefill-1", "+decode-1", "prefill-0", "decode-0", "-prefill-1", "-decode-1"],
        ),
        (("mixed-0", "mixed-1"), ["mixed-0", "mixed-1"]),
        (("prefill-0", "prefill-1", "mixed-0"), ["prefill-0", "prefill-1", "+decode-0", "mixed-0", "-decode-0"]),
    ],
)
def test_new_weights_serve_before_the_last_pair_of_old_ones_leaves(names: tuple[str, ...], did: list[str]) -> None:
    machine = Machine(*names)
    machine.weights, machine.began_at = "new", 1.0
    machine.bench.feed(ROLLING)
    while machine.act():
        assert machine.bench.core.unready_reason is None, machine.did
    assert machine.bench.operation("x").state is OperationState.DONE
    assert machine.did == [*did, "gateway", "scheduler"]
    assert {each.weights for each in machine.bench.core.revisions} == {"new"}


def test_the_only_prefill_instance_that_may_decode_restarts_beside_a_decode_instance() -> None:
    machine = Machine("prefill-0", "prefill-1")
    machine.bench.feed(BundleChangeRequested("pdmesh"))
    fixed, drain = (
        OperationRequested(
            operation_id=OperationId(kind), kind=kind, instance_id=InstanceId(name), timeout_s=0.0, role=role
        )
        for kind, name, role in (
            (OperationKind.ROLE, "prefill-1", Role.PREFILL),
            (OperationKind.DRAIN, "prefill-0", None),
        )
    )
    machine.bench.feed(fixed)
    machine.bench.feed(drain)
    assert "the last that can prefill and decode" in machine.bench.operation("drain").detail
    machine.bench.feed(ROLLING)
    while machine.act():
        assert machine.bench.core.unready_reason is None, machine.did
    assert machine.bench.operation("x").state is OperationState.DONE
    assert machine.did == ["prefill-1", "+decode-0", "prefill-0", "-decode-0", "gateway", "scheduler"]


def test_weights_that_change_again_and_again_end_a_restart() -> None:
    """Else one instance after the other would be started beside the others."""
    machine = Machine("prefill-0", "decode-0")
    machine.bench.feed(ROLLING)
    for number in range(9):
        machine.weights, machine.began_at = f"new {number}", 1.0 + number
        machine.act()
    view = machine.bench.operation("x")
    assert view.state is OperationState.FAILED
    assert view.detail.startswith("prefill-1, decode-1 loaded different weights")
    assert sorted(machine.instances) == ["decode-0", "prefill-0"]


def test_what_would_start_again_as_it_is_is_replaced_by_its_actuator_and_not_told_to_end() -> None:
    machine = Machine("prefill-0", "prefill-1", "decode-0")
    machine.outdated = ["prefill-0"]
    machine.report()
    commands = machine.bench.arrive("a")
    (place,), (step,) = of(ExpectCopy, commands), of(RunStep, commands)
    assert step.instance_id == "prefill-0"
    machine.bench.feed(ROLLING)
    machine.bench.done("prefill-0", step.plan)
    machine.bench.landed(place.instance_id, "a")
    machine.bench.sent("prefill-0", "a")
    assert machine.bench.core.desired_processes("a").replace == (), "the request has not left it"
    machine.bench.released("prefill-0", "a")
    assert machine.bench.core.desired_processes("a").replace == (ManagedProcess(name="prefill-0", pid=0),)
    assert machine.stopped() == [], "it is its actuator's to end"
    machine.outdated = []
    machine.restart("prefill-0")
    assert machine.bench.core.desired_processes("a").replace == ()
    assert machine.stopped() == ["prefill-1"], "this one would start as what is wanted"


def test_the_next_scheduler_leaves_the_end_of_a_process_to_its_actuator_too() -> None:
    machine = Machine("prefill-0", "prefill-1", "decode-0")
    machine.outdated = ["prefill-0"]
    machine.report()
    machine.bench.feed(ROLLING)
    before = machine.bench
    machine.bench = CoreBench()
    for event in before.core.desired.events():
        machine.bench.feed(event)
    for name in machine.instances:
        machine.bench.feed(InstanceJoined(replace(named_profile(name), pid=0), ()))
    assert machine.stopped() == [], "though no actuator was heard of yet"
    machine.report()
    assert machine.bench.core.desired_processes("a").replace == (ManagedProcess(name="prefill-0", pid=0),)
    assert machine.stopped() == []


def test_one_that_its_actuator_cannot_replace_is_used_as_before() -> None:
    machine = Machine("prefill-0", "prefill-1", "decode-0")
    machine.outdated = ["prefill-0"]
    machine.report()
    machine.bench.feed(ROLLING)
    assert machine.bench.core.desired_processes("a").replace
    machine.report(FailedStart(instance_id=InstanceId("prefill-0"), reason="it may not delete pods"))
    assert machine.bench.operation("x").state is OperationState.FAILED
    assert machine.bench.operation("x").detail == "the restart of prefill-0 was failed: it may not delete pods"
    assert machine.bench.core.desired_processes("a").replace == ()
    assert not [view.instance_id for view in machine.bench.core.instances if view.draining]
    assert machine.stopped() == []


def test_requests_leave_an_instance_before_its_process_ends() -> None:
    machine = Machine("prefill-0", "prefill-1", "decode-0", "decode-1")
    target = machine.bench.decoding("a")
    machine.stopped()
    machine.bench.feed(ROLLING)
    for name in ("prefill-0", "prefill-1"):
        assert machine.stopped() == [name]
        machine.restart(name)
    others = [] if target == "decode-0" else ["decode-0"]
    assert machine.stopped() == others
    for name in others:
        machine.restart(name)
    assert machine.bench.operation("x").detail == f"{target}: 1 requests leave it"
    machine.bench.finish(target, "a")
    machine.bench.released(target, "a")
    assert machine.stopped() == [target]


@pytest.mark.parametrize("num_acts", range(9))
def test_the_next_scheduler_goes_on_where_this_one_was(num_acts: int) -> None:
    machine = Machine("prefill-0", "decode-0")
    machine.bench.feed(ROLLING)
    for _ in range(num_acts):
        machine.act()
    desired = machine.bench.core.desired
    before = machine.bench
    machine.bench = CoreBench()
    for event in desired.events():
        machine.bench.feed(replace(event, patience_s=60.0) if isinstance(event, RollingRequested) else event)
    assert machine.stopped() == []
    if desired.rolling is not None:
        assert machine.bench.operation("x").detail == "waiting for all processes to register with the scheduler"
    for name, pid in machine.instances.items():
        machine.bench.feed(InstanceJoined(replace(named_profile(name), pid=pid), ()))
    machine.report()
    if desired.rolling is None:
        assert before.operation("x").state is OperationState.DONE
    else:
        assert machine.act_until_over() is OperationState.DONE
    assert [name for name in machine.did if name[0] not in "+-"] == ["prefill-0", "decode-0", "gateway", "scheduler"]
    assert set(machine.instances) == {"prefill-0", "decode-0"}


def test_the_next_scheduler_waits_no_longer_than_it_is_told_to() -> None:
    bench = bench_of("prefill-0", "prefill-1", "decode-0", "decode-1")
    bench.feed(ROLLING)
    (desired,) = [event for event in bench.core.desired.events() if isinstance(event, RollingRequested)]
    after = bench_of("prefill-0", "prefill-1", "decode-0", "decode-1")
    after.now_s = 50.0
    after.feed(replace(desired, patience_s=5.0, age_s=30.0))
    assert after.operation("x").began_s == 20.0
    assert not of(StopInstance, after.commands), "no supervisor has said who is there"
    assert [command.instance_id for command in of(StopInstance, after.feed(Tick(), 55.0))] == ["prefill-0"]


def test_a_cancelled_one_ends_what_it_has_begun() -> None:
    machine = Machine("prefill-0", "decode-0")
    machine.bench.feed(ROLLING)
    machine.act()
    machine.bench.feed(OperationCancelled(OperationId("x")))
    assert machine.bench.operation("x").state is OperationState.RUNNING
    assert machine.act_until_over() is OperationState.CANCELLED
    assert machine.bench.operation("x").detail == TAKEN_BACK
    assert machine.did == ["+prefill-1", "prefill-0", "-prefill-1"]


def test_one_at_a_time_and_not_beside_a_resize() -> None:
    machine = Machine("prefill-0", "decode-0")
    machine.bench.feed(ROLLING)
    machine.bench.feed(replace(ROLLING, operation_id=OperationId("y")))
    assert machine.bench.operation("y").detail == "operation x (rolling) runs: wait for it"


@pytest.mark.parametrize(
    ("then", "at_s", "state", "detail"),
    [
        (
            Tick(),
            100.0,
            OperationState.FAILED,
            "the change of the pools was refused: mixed-9 is restarting: try again when it is back",
        ),
        (OperationCancelled(OperationId("x")), 0.0, OperationState.CANCELLED, TAKEN_BACK),
    ],
    ids=["for so long", "until it is cancelled"],
)
def test_who_is_away_is_waited_for_before_the_pools_change(
    then: Event, at_s: float, state: OperationState, detail: str
) -> None:
    machine = Machine("prefill-0", "prefill-1", "decode-0")
    machine.bench.feed(ROLLING)
    assert machine.stopped() == ["prefill-0"]
    machine.restart("prefill-0")
    assert machine.stopped() == ["prefill-1"]
    machine.instances["mixed-9"] = 1
    machine.report()
    machine.restart("prefill-1")
    assert machine.bench.operation("x").detail == "waiting for mixed-9 to come back"
    machine.bench.feed(then, at_s)
    assert machine.act_until_over() is state
    assert machine.bench.operation("x").detail == detail
    assert machine.did == ["prefill-0", "prefill-1"], "nobody is started beside them"


def test_a_wait_that_has_ended_wakes_the_scheduler_no_more() -> None:
    machine = Machine("prefill-0", "decode-0")
    machine.weights, machine.began_at = "new", 1.0
    machine.bench.feed(ROLLING)
    machine.bench.core.desired_processes("a")
    machine.bench.feed(InstanceJoined(machine.profile("prefill-1"), ()))
    assert machine.bench.operation("x").detail == "waiting for prefill-1 to come back"
    for now_s in (101.0, 102.0):
        assert all(wake.at_s > now_s for wake in of(WakeAt, machine.bench.feed(Tick(), now_s)))


def test_one_of_which_a_part_fails_is_over_once_all_are_there_and_nobody_else() -> None:
    machine = Machine("prefill-0", "decode-0")
    machine.bench.feed(ROLLING)
    machine.act()
    machine.bench.feed(InstanceLost(InstanceId("prefill-0")))
    machine.bench.feed(OperationCancelled(OperationId("x/prefill-0")))
    assert machine.act_until_over() is OperationState.FAILED
    assert machine.bench.operation("x").detail == f"the restart of prefill-0 was cancelled: {TAKEN_BACK}"
    assert machine.did == ["+prefill-1", "prefill-0", "-prefill-1"]


def test_a_service_whose_supervisor_is_gone_is_not_replaced() -> None:
    machine = Machine("prefill-0", "decode-0")
    restart = OperationRequested(
        operation_id=OperationId("x"), kind=OperationKind.RESTART, instance_id=InstanceId("gateway"), timeout_s=10.0
    )
    machine.bench.feed(restart)
    assert [each.name for each in machine.bench.core.desired_processes("a").replace] == ["gateway"]
    machine.bench.feed(ActuatorLost("a"))
    machine.bench.now_s += SILENCE_LIMIT_S
    machine.bench.feed(Tick())
    view = machine.bench.operation("x")
    assert (view.state, view.detail) == (OperationState.FAILED, "the supervisor has been silent for 60 s")


def test_an_instance_that_was_given_another_role_has_its_turn_with_that() -> None:
    machine = Machine("decode-0", "prefill-0", "mixed-0")
    machine.bench.feed(ROLLING)
    rolling = machine.bench.core.desired.rolling
    assert rolling is not None
    assert [each.name for each in rolling.left] == ["prefill-0", "decode-0", "mixed-0", "gateway", "scheduler"]
    assert tuple(Role) == (Role.PREFILL, Role.DECODE, Role.MIXED)
