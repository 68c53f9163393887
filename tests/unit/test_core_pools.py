"""Resizing pools: what is planned, in which order it is done, and how it is taken back."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdmesh.core.commands import DesiredProcesses, SetRole
from pdmesh.core.events import InstanceJoined, InstanceLost, Tick
from pdmesh.core.operator_events import (
    ActuatorLost,
    ActuatorReported,
    FailedStart,
    OperationCancelled,
    OperationRequested,
    ResizeRequested,
)
from pdmesh.core.operators.actuators import host_bytes
from pdmesh.core.operators.pools import GONE_S, plan_pools
from pdmesh.model import InstanceId, Role
from pdmesh.operations import OperationId, OperationKind, OperationState, PoolCounts
from pdmesh_testing.core import CoreBench, a_report, bench_of, named_profile, of

PAIR = ("prefill-0", "decode-0")


def resize(
    bench: CoreBench, prefill: int, decode: int, mixed: int = 0, *, actuated: bool = True, **other: Any
) -> ResizeRequested:
    """Asked for where an actuator looks after all that is there, and has room."""
    if actuated:
        bench.feed(a_report(*(view.instance_id for view in bench.core.instances)))
    requested = ResizeRequested(
        operation_id=OperationId("x"),
        pools=PoolCounts(prefill=prefill, decode=decode, mixed=mixed),
        timeout_s=10.0,
        start_timeout_s=100.0,
    )
    return replace(requested, **other)


def stops(bench: CoreBench) -> tuple[str, ...]:
    return bench.core.desired_processes("a").stop


def started(bench: CoreBench) -> list[str]:
    return [member.instance_id for member in bench.core.desired_processes("a").start]


def join(bench: CoreBench, *names: str) -> None:
    for name in names:
        bench.feed(InstanceJoined(named_profile(name), ()))


def runs(bench: CoreBench, *names: str) -> None:
    """The actuator has processes of these instances, and of no others."""
    bench.feed(a_report(*names))


def test_what_is_missing_is_started_and_the_resize_is_done_when_it_has_joined() -> None:
    bench = bench_of(*PAIR)
    assert bench.core.desired_processes("a") == DesiredProcesses()
    bench.feed(resize(bench, 2, 3))
    assert started(bench) == ["prefill-1", "decode-1", "decode-2"]
    join(bench, "prefill-1", "decode-1")
    assert (bench.operation("x").state, bench.operation("x").detail) == (OperationState.RUNNING, "decode-2 to start")
    join(bench, "decode-2")
    assert bench.operation("x").state is OperationState.DONE
    bench.core.check_integrity()


def test_what_leaves_is_drained_and_then_stopped() -> None:
    bench = bench_of("prefill-0", "decode-0", "decode-1")
    idle = "decode-1" if bench.decoding("a") == "decode-0" else "decode-0"
    bench.feed(resize(bench, 1, 1))
    assert stops(bench) == (idle,), "the one that does least leaves"
    assert bench.operation("x").state is OperationState.RUNNING
    runs(bench, "prefill-0", "decode-0", "decode-1")
    bench.feed(InstanceLost(InstanceId(idle)))
    assert (bench.operation("x").state, bench.operation("x").detail) == (
        OperationState.RUNNING,
        f"{idle} to end its process",
    )
    runs(bench, "prefill-0", "decode-0" if idle == "decode-1" else "decode-1")
    assert bench.operation("x").state is OperationState.DONE
    join(bench, idle)
    assert not next(view for view in bench.core.instances if view.instance_id == idle).draining, "it is another one"


def test_who_is_named_leaves_before_others() -> None:
    bench = bench_of("prefill-0", "decode-0", "decode-1")
    busy = bench.decoding("a")
    bench.feed(resize(bench, 1, 1, leaves=(InstanceId(busy),)))
    (part,) = (view for view in bench.core.operations if view.kind is OperationKind.DRAIN)
    assert part.instance_id == busy, "though it does more than the other one"


def test_a_role_changes_before_a_process_is_started() -> None:
    bench = bench_of("prefill-0", "prefill-1", "decode-0")
    commands = bench.feed(resize(bench, 1, 2, actuated=False))
    (flip,) = of(SetRole, commands)
    assert flip.role is Role.DECODE
    assert bench.operation("x").state is OperationState.DONE, "and nobody has to start one"


INSTANCE_BYTES = host_bytes(named_profile("decode-0"))


@pytest.mark.parametrize(
    ("pools", "report", "reason"),
    [
        ((0, 1), a_report(*PAIR), "no instance could prefill"),
        ((1, 0), a_report(*PAIR), "no instance could decode"),
        ((1, 2), None, "no supervisor is connected to start and stop processes"),
        (
            (1, 3),
            a_report(*PAIR, available_bytes=2 * INSTANCE_BYTES - 1),
            "2 more instances need about",
        ),
        ((1, 2), a_report("prefill-0", "gone"), "gone is restarting"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_changes(
    pools: tuple[int, int], report: ActuatorReported | None, reason: str
) -> None:
    bench = bench_of(*PAIR)
    if report is not None:
        bench.feed(report)
    before = bench.core.instances
    assert not bench.feed(resize(bench, *pools, actuated=False))
    assert bench.operation("x").state is OperationState.REFUSED
    assert reason in bench.operation("x").detail
    assert bench.operation("x").needs_actuator is (report is None)
    assert bench.core.instances == before
    assert bench.core.desired_processes("a") == DesiredProcesses()


def test_an_actuator_that_is_lost_starts_and_stops_nothing() -> None:
    bench = bench_of(*PAIR)
    bench.feed(a_report(*PAIR))
    bench.feed(ActuatorLost("a"))
    bench.feed(resize(bench, 1, 2, actuated=False))
    assert bench.operation("x").needs_actuator


def test_what_is_started_is_started_where_most_memory_is_left_and_named_after_its_host() -> None:
    """Two supervisors, one on each host."""
    bench = bench_of(*PAIR)
    here = a_report(*PAIR, available_bytes=3 * INSTANCE_BYTES)
    bench.feed(here)
    bench.feed(replace(a_report(available_bytes=2 * INSTANCE_BYTES), actuator_id="b", name_prefix="far-"))
    bench.feed(resize(bench, 1, 6, actuated=False))
    assert started(bench) == ["decode-1", "decode-2", "decode-3"]
    assert [member.instance_id for member in bench.core.desired_processes("b").start] == [
        "far-decode-0",
        "far-decode-1",
    ]
    assert bench.core.actuators.why_not("c", "far-") == "another supervisor already manages the pools of this mesh"
    assert bench.core.actuators.why_not("c", "elsewhere-") is None


def test_one_resize_at_a_time_and_not_over_another_operation() -> None:
    bench = bench_of("prefill-0", "decode-0", "decode-1")
    bench.feed(resize(bench, 1, 3))
    bench.feed(resize(bench, 1, 2, operation_id=OperationId("y")))
    assert "operation x (pool resize to 1 prefill + 3 decode) runs" in bench.operation("y").detail
    other = bench_of("prefill-0", "decode-0", "decode-1")
    leaving = other.decoding("a")
    other.decoding("b")
    other.feed(
        OperationRequested(
            operation_id=OperationId("d"), kind=OperationKind.DRAIN, instance_id=InstanceId(leaving), timeout_s=60.0
        )
    )
    other.feed(resize(other, 1, 1))
    assert other.operation("x").detail == f"operation d (drain) runs on {leaving}: wait for it"


def test_a_worker_that_never_registers_fails_it_and_what_was_started_leaves() -> None:
    bench = bench_of(*PAIR)
    bench.feed(resize(bench, 1, 3))
    join(bench, "decode-1")
    bench.now_s += 100.0
    bench.feed(Tick())
    assert bench.operation("x").state is OperationState.FAILED
    assert bench.operation("x").detail == "decode-2 did not register within 100 s"
    assert started(bench) == []
    assert stops(bench) == ("decode-1", "decode-2")
    bench.feed(InstanceLost(InstanceId("decode-1")))
    runs(bench, *PAIR)
    assert bench.operation("x/back").state is OperationState.DONE
    assert bench.core.unready_reason is None


def test_one_that_cannot_be_started_fails_it_at_once() -> None:
    bench = bench_of(*PAIR)
    bench.feed(resize(bench, 1, 2))
    bench.feed(a_report(*PAIR, failed=(FailedStart(instance_id=InstanceId("decode-7"), reason="not ours"),)))
    assert bench.operation("x").state is OperationState.RUNNING
    bench.feed(a_report(*PAIR, failed=(FailedStart(instance_id=InstanceId("decode-1"), reason="no memory"),)))
    assert (bench.operation("x").state, bench.operation("x").detail) == (
        OperationState.FAILED,
        "decode-1 could not be started: no memory",
    )


def test_a_process_that_nobody_stops_fails_it_and_is_used_again() -> None:
    bench = bench_of("prefill-0", "decode-0", "decode-1")
    bench.feed(resize(bench, 1, 1))
    (leaving,) = stops(bench)
    bench.now_s += GONE_S
    bench.feed(Tick())
    assert bench.operation("x").state is OperationState.FAILED
    assert "did not end within 60 s" in bench.operation("x").detail
    assert not next(view for view in bench.core.instances if view.instance_id == leaving).draining
    assert bench.core.desired_processes("a") == DesiredProcesses()


def test_a_process_that_does_not_end_fails_it_though_its_instance_has_left() -> None:
    bench = bench_of("prefill-0", "decode-0", "decode-1")
    runs(bench, "prefill-0", "decode-0", "decode-1")
    bench.feed(resize(bench, 1, 1))
    (leaving,) = stops(bench)
    bench.feed(InstanceLost(InstanceId(leaving)))
    bench.now_s += GONE_S
    bench.feed(Tick())
    assert (bench.operation("x").state, bench.operation("x").detail) == (
        OperationState.FAILED,
        f"the process of {leaving} did not end within 60 s",
    )
    assert started(bench) == [leaving], "the pools are to be as they were"


def test_a_process_has_the_grace_that_its_actuator_gives_it_before_the_resize_fails() -> None:
    """A pod of Kubernetes may be ending for longer than a minute, and is gone then."""
    bench = bench_of("prefill-0", "decode-0", "decode-1")
    report = replace(a_report("prefill-0", "decode-0", "decode-1"), grace_s=130.0)
    bench.feed(report)
    bench.feed(resize(bench, 1, 1))
    (leaving,) = stops(bench)
    bench.feed(InstanceLost(InstanceId(leaving)))
    bench.now_s += GONE_S + 129.0
    bench.feed(report)
    assert bench.operation("x").state is OperationState.RUNNING
    bench.now_s += 1.0
    bench.feed(Tick())
    assert (bench.operation("x").state, bench.operation("x").detail) == (
        OperationState.FAILED,
        f"the process of {leaving} did not end within 190 s",
    )


def test_a_cancelled_resize_is_taken_back() -> None:
    bench = bench_of(*PAIR)
    bench.feed(resize(bench, 2, 2))
    join(bench, "prefill-1")
    bench.feed(OperationCancelled(OperationId("x")))
    assert bench.operation("x").state is OperationState.CANCELLED
    assert stops(bench) == ("prefill-1", "decode-1")
    bench.feed(InstanceLost(InstanceId("prefill-1")))
    runs(bench, *PAIR)
    assert bench.operation("x/back").state is OperationState.DONE
    bench.feed(OperationCancelled(OperationId("x")))  # it is over
    assert bench.core.ignored["OperationCancelled"] == 1


def test_what_is_restarted_meanwhile_is_not_used_when_a_resize_is_taken_back() -> None:
    """Found by the law machine."""
    bench = bench_of("prefill-0", "prefill-1", "decode-0")
    bench.feed(resize(bench, 1, 1))
    (leaving,) = stops(bench)
    bench.feed(
        OperationRequested(
            operation_id=OperationId("r"), kind=OperationKind.RESTART, instance_id=InstanceId(leaving), timeout_s=60.0
        )
    )
    assert bench.operation("r").state is OperationState.RUNNING
    bench.feed(OperationCancelled(OperationId("x")))
    bench.core.check_integrity()
    assert next(view for view in bench.core.instances if view.instance_id == leaving).draining


def test_the_next_scheduler_goes_on_with_it() -> None:
    bench = bench_of(*PAIR)
    bench.feed(resize(bench, 1, 2))
    desired = bench.core.desired
    after = CoreBench()
    for event in desired.events():
        after.feed(event)
    after.feed(a_report())
    assert started(after) == ["decode-1"]
    join(after, "prefill-0", "decode-0", "decode-1")
    assert after.operation("x").state is OperationState.DONE
    assert after.core.desired == desired


@given(
    st.lists(st.sampled_from(list(Role)), min_size=1, max_size=6),
    st.integers(0, 4),
    st.integers(0, 4),
    st.integers(0, 4),
)
def test_a_plan_leads_to_the_sizes_that_are_wanted(roles: list[Role], prefill: int, decode: int, mixed: int) -> None:
    names = [f"{role}-{index}" for index, role in enumerate(roles)]
    bench = bench_of(*names)
    wanted = PoolCounts(prefill=prefill, decode=decode, mixed=mixed)
    plan = plan_pools(bench.core._mesh.instances.values(), wanted)
    after = dict(zip(names, roles, strict=True))
    for member in plan.flips:
        assert after[member.instance_id] is not member.role
        after[member.instance_id] = member.role
    for instance_id in plan.leaves:
        del after[instance_id]
    for member in plan.starts:
        assert member.instance_id not in after
        after[member.instance_id] = member.role
    assert {role: list(after.values()).count(role) for role in Role} == {role: wanted.of(role) for role in Role}
    assert not (plan.starts and plan.leaves), "no process ends where another one begins"


def ordered(bench: CoreBench, *names: str) -> None:
    """An actuator runs these, of which only the last of a name can leave."""
    bench.feed(replace(a_report(*names), last_leaves_first=True))


def test_where_only_the_last_can_leave_the_last_is_drained() -> None:
    bench = bench_of("prefill-0", "decode-0", "decode-1", "decode-2")
    ordered(bench, "prefill-0", "decode-0", "decode-1", "decode-2")
    bench.feed(resize(bench, 1, 1, actuated=False))
    assert bench.operation("x").state is OperationState.RUNNING
    assert set(stops(bench)) == {"decode-1", "decode-2"}


def test_where_only_the_last_can_leave_the_first_changes_its_role() -> None:
    bench = bench_of("prefill-0", "decode-0", "decode-1", "decode-2")
    ordered(bench, "prefill-0", "decode-0", "decode-1", "decode-2")
    bench.feed(resize(bench, 2, 1, actuated=False))
    (changed,) = of(SetRole, bench.commands)
    assert changed.instance_id == "decode-1"


def test_one_that_cannot_leave_before_another_is_refused() -> None:
    bench = bench_of("prefill-0", "decode-0", "prefill-1")
    bench.feed(InstanceJoined(named_profile("mesh-decode-0"), ()))
    bench.feed(InstanceJoined(replace(named_profile("prefill-9"), instance_id=InstanceId("mesh-decode-1")), ()))
    ordered(bench, "prefill-0", "decode-0", "prefill-1", "mesh-decode-0", "mesh-decode-1")
    bench.feed(resize(bench, 3, 1, actuated=False, leaves=(InstanceId("mesh-decode-0"),)))
    operation = bench.operation("x")
    assert operation.state is OperationState.REFUSED
    assert "can leave only after mesh-decode-1" in operation.detail
