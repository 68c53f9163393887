"""What the scheduler remembers of losses, restarts and drains, and how long."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from pdmesh.core.config import CoreConfig
from pdmesh.core.events import (
    DrainRequested,
    InstanceJoined,
    InstanceLost,
    InstanceSuspected,
    InstanceUnreachable,
)
from pdmesh.core.operator_events import UNKNOWN_PID, BundleChangeRequested, EndedProcess, OperationRequested
from pdmesh.core.scheduler import SchedulerCore
from pdmesh.model import InstanceId, Role
from pdmesh.operations import OperationId, OperationKind
from pdmesh.policy.bundles import make_bundle
from pdmesh.policy.config import PolicyConfig
from pdmesh.wire.messages import InstanceNote
from pdmesh_scheduler.history import LEFT_S, MAX_CAUSE, MAX_EVENTS, MAX_GONE, RESTARTED_S, MeshHistory, safety
from pdmesh_scheduler.observing import Handled
from pdmesh_testing.core import a_report, a_view
from pdmesh_testing.modelled import modelled_profile

DECODE = InstanceId("decode-0")
#: Unix time of the core's second 0.
EPOCH = 1000.0


class Watched:
    """A core whose events a history observes."""

    def __init__(self) -> None:
        self.core = SchedulerCore(CoreConfig(), make_bundle("fcfs", PolicyConfig()), random.Random(0))
        self.history = MeshHistory(self.core, lambda at_s: EPOCH + at_s, 0.0)

    def handle(self, event: Any, now_s: float) -> None:
        commands = self.core.handle(event, now_s)
        self.history.observe(
            Handled(event=event, now_s=now_s, commands=commands, milestones=(), bundle=self.core.bundle)
        )

    def join(self, now_s: float, *, pid: int = 1, instance_id: str = DECODE, role: Role = Role.DECODE) -> None:
        profile = modelled_profile(instance_id, role)
        self.handle(InstanceJoined(replace(profile, pid=pid, data_address=b"%d" % pid), ()), now_s)

    def lose(self, now_s: float) -> None:
        """The instance's process dies: its stream breaks, and half a second later it is given up."""
        self.handle(InstanceSuspected(DECODE), now_s)
        self.handle(InstanceUnreachable(DECODE), now_s)
        self.handle(InstanceLost(DECODE), now_s + 0.5)

    def report(self, now_s: float, *ended: EndedProcess) -> None:
        self.handle(replace(a_report(DECODE), ended=ended), now_s)

    def note(self, now_s: float) -> InstanceNote | None:
        (view,) = self.core.instances
        return self.history.note(view, now_s)

    def told(self) -> list[tuple[str, str, str]]:
        return [(event.what, event.name, event.detail) for event in self.history.events][1:]


KILLED = EndedProcess(name=DECODE, pid=1, cause="was killed by SIGKILL")


@pytest.mark.parametrize("reported_s", [9.9, 10.2, 10.9])  # before its stream breaks, before and after it is lost
def test_a_killed_instance_is_told_of_until_its_successor_serves(reported_s: float) -> None:
    mesh = Watched()
    mesh.join(1.0)
    steps = {10.0: lambda: mesh.lose(10.0), reported_s: lambda: mesh.report(reported_s, KILLED)}
    for at_s in sorted(steps):
        steps[at_s]()
    (gone,) = mesh.history.gone((), 20.0)
    assert (gone.instance_id, gone.role, gone.state, gone.pid) == (DECODE, Role.DECODE, "restarting", 1)
    assert (gone.note.cause, gone.note.next) == ("was killed by SIGKILL", "its supervisor starts it again")
    assert EPOCH + 9.9 <= gone.note.at <= EPOCH + 10.0
    assert mesh.told()[-1] == ("lost", DECODE, "was killed by SIGKILL")

    mesh.report(21.0, EndedProcess(name=DECODE, pid=7, cause="exited with code 1", has_served=False))
    (gone,) = mesh.history.gone((), 21.0)
    assert gone.note.next == "its supervisor starts it again; the last start failed: it exited with code 1"

    mesh.join(22.0, pid=8)
    assert mesh.history.gone((), 22.0) == ()
    note = mesh.note(25.0)
    assert note is not None
    assert (note.cause, note.next) == ("was killed by SIGKILL", "process 8 serves since 3 s ago")
    assert mesh.history.num_restarts(DECODE) == 1
    assert mesh.history.joined_at(DECODE) == EPOCH + 22.0
    what, _, detail = mesh.told()[-1]
    assert what == "restarted"
    assert detail.startswith("was killed by SIGKILL; process 8 serves after 12.")
    assert mesh.note(22.0 + RESTARTED_S + 1) is None


def test_a_successor_that_joins_before_its_predecessor_is_lost_has_the_cause() -> None:
    mesh = Watched()
    mesh.join(1.0)
    mesh.join(10.0, pid=2)
    mesh.report(10.1, KILLED)
    note = mesh.note(11.0)
    assert note is not None
    assert note.cause == "was killed by SIGKILL"
    assert mesh.told()[-1] == ("restarted", DECODE, "was killed by SIGKILL; process 2 serves after 0.0 s")


def test_a_pods_container_has_no_pid_and_gives_the_cause_of_an_open_absence() -> None:
    mesh = Watched()
    mesh.join(1.0)
    mesh.lose(10.0)
    oom = EndedProcess(name=DECODE, pid=UNKNOWN_PID, cause="was killed by SIGKILL (OOMKilled)")
    mesh.handle(replace(a_report(), ended=(oom,), unsettled=(DECODE,)), 11.0)
    (gone,) = mesh.history.gone((), 11.0)
    assert (gone.state, gone.note.cause) == ("restarting", oom.cause)
    mesh.join(12.0, pid=2)
    mesh.report(50.0, replace(oom, cause="exited with code 1"))  # of a process that the scheduler has not seen
    note = mesh.note(50.0)
    assert note is not None
    assert note.cause == oom.cause


def test_without_a_supervisor_a_lost_instance_has_lost_its_stream() -> None:
    mesh = Watched()
    mesh.join(1.0)
    mesh.lose(10.0)
    (gone,) = mesh.history.gone((), 1e6)  # it is listed for good
    assert gone.state == "lost"
    assert gone.note == InstanceNote(
        at=EPOCH + 10.0, cause="lost its stream", next="no supervisor is connected: start it again yourself"
    )


def test_a_stream_that_comes_back_is_no_restart() -> None:
    mesh = Watched()
    mesh.join(1.0)
    mesh.handle(InstanceUnreachable(DECODE), 5.0)
    note = mesh.note(5.2)
    assert note is not None
    assert note.cause == "lost its stream"
    mesh.join(5.5)
    assert mesh.note(6.0) is None
    assert mesh.history.num_restarts(DECODE) == 0
    assert mesh.history.joined_at(DECODE) == EPOCH + 1.0
    assert mesh.told()[-1] == ("joined again", DECODE, "lost its stream; the same process reconnected after 0.5 s")


def test_a_silent_instance_says_so_until_it_reports() -> None:
    mesh = Watched()
    mesh.join(1.0)
    mesh.handle(InstanceSuspected(DECODE), 5.0)
    note = mesh.note(6.0)
    assert note is not None
    assert note.cause == "fell silent"
    mesh.handle(InstanceSuspected(DECODE, suspected=False), 7.0)
    assert mesh.note(7.0) is None
    mesh.history.fell_silent(DECODE, 8.0)
    mesh.handle(InstanceLost(DECODE), 8.0)
    (gone,) = mesh.history.gone({DECODE}, 9.0)
    assert (gone.state, gone.note.cause) == ("lost", "fell silent")
    assert gone.note.next == "requests wait for it, because its process may still run"


def test_an_instance_that_stops_on_purpose_is_listed_for_a_while() -> None:
    mesh = Watched()
    mesh.join(1.0)
    mesh.handle(DrainRequested(DECODE), 5.0)
    note = mesh.note(6.0)
    assert note is not None
    assert (note.at, note.cause, note.next) == (EPOCH + 5.0, "began to stop", "no request is left on it")
    mesh.handle(InstanceLost(DECODE), 8.0)
    (gone,) = mesh.history.gone((), 9.0)
    assert (gone.state, gone.note.cause, gone.note.at) == ("left", "stopped", EPOCH + 8.0)
    assert mesh.told()[-1] == ("left", DECODE, "stopped")
    assert mesh.history.gone((), 9.0 + LEFT_S) == ()


def test_an_instance_that_goes_on_after_all_has_no_note() -> None:
    mesh = Watched()
    mesh.join(1.0)
    mesh.handle(DrainRequested(DECODE), 5.0)
    mesh.handle(DrainRequested(DECODE, enabled=False), 6.0)
    assert mesh.note(7.0) is None


def test_an_end_that_is_reported_again_is_one_event() -> None:
    """A supervisor reports an end until it is answered, and asks anew whenever a process of it changes."""
    mesh = Watched()
    gateway = EndedProcess(name="gateway", pid=3, cause="was killed by SIGKILL")
    failed = EndedProcess(name="decode-0", pid=UNKNOWN_PID, cause="exited with code 1", has_served=False)
    mesh.join(1.0)
    for ended in ((gateway,), (gateway, failed), (gateway, failed, failed), (), (failed,)):
        mesh.report(2.0, *ended)
    assert [what for what, *_ in mesh.told()] == ["joined", "ended", *3 * ["start failed"]]


def test_a_report_of_any_length_leaves_a_short_event() -> None:
    mesh = Watched()
    mesh.report(5.0, EndedProcess(name="n" * 10_000, pid=1, cause="c" * 10_000))
    assert len("".join(mesh.told()[-1])) < 3 * MAX_CAUSE


def test_operations_and_policies_are_events() -> None:
    mesh = Watched()
    mesh.join(1.0)
    drain = OperationRequested(
        operation_id=OperationId("o-1"), kind=OperationKind.DRAIN, instance_id=DECODE, timeout_s=60.0, force=True
    )
    mesh.handle(drain, 5.0)
    mesh.handle(BundleChangeRequested("pdmesh"), 6.0)
    assert mesh.told()[1:] == [("drain", DECODE, "operation o-1 done"), ("policy set", "", "pdmesh")]
    note = mesh.note(7.0)
    assert note is not None
    assert (note.at, note.cause) == (EPOCH + 5.0, "began to drain")
    mesh.handle(InstanceLost(DECODE), 8.0)
    (gone,) = mesh.history.gone((), 9.0)
    assert gone.note.cause == "stopped for operation o-1 (drain)"


def test_the_history_is_bounded() -> None:
    mesh = Watched()
    for number in range(2 * MAX_EVENTS):
        instance_id = InstanceId(f"decode-{number}")
        mesh.join(float(number), instance_id=instance_id)
        mesh.handle(InstanceLost(instance_id), number + 0.5)
    assert len(mesh.history.events) == MAX_EVENTS
    assert len(mesh.history.gone((), 2 * MAX_EVENTS)) == MAX_GONE


@pytest.mark.parametrize(
    ("fields", "other", "expected"),
    [
        ({"num_decoding": 2}, {}, (False, "2 decoding on it")),
        ({"num_decoding": 2}, {"draining": True}, (False, "2 decoding on it; no other instance decodes")),
        ({}, {}, (False, "`pdmesh drain a` first: it takes requests")),
        ({"draining": True}, {}, (True, "drained")),
        ({"draining": True, "num_free_blocks": 60}, {}, (False, "4 KV blocks of requests on it")),
        ({"draining": True}, {"reachable": False}, (True, "drained; no other instance decodes: new requests wait")),
    ],
)
def test_an_instance_is_safe_to_delete_once_it_is_drained(
    fields: dict[str, Any], other: dict[str, Any], expected: tuple[bool, str]
) -> None:
    view, rest = a_view("a", Role.DECODE, **fields), a_view("b", Role.DECODE, **other)
    assert safety(view, [view, rest]) == expected
