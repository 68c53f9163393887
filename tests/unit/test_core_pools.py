"""Resizing pools: what is planned, in which order it is done, and how it is taken back."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdmesh.core.commands import SetRole
from pdmesh.core.events import InstanceJoined, InstanceLost, Tick
from pdmesh.core.operator_events import (
    ActuatorFacts,
    InstanceStartFailed,
    OperationCancelled,
    OperationRequested,
    ProcessesReported,
    ResizeRequested,
)
from pdmesh.core.operators.pools import GONE_S, plan_pools
from pdmesh.core.operators.records import OperationState
from pdmesh.model import InstanceId, OperationId, OperationKind, PoolCounts, Role
from pdmesh.testing.core import CoreBench, bench_of, named_profile, of

PAIR = ("prefill-0", "decode-0")


def resize(bench: CoreBench, prefill: int, decode: int, mixed: int = 0, **other: Any) -> ResizeRequested:
    """Asked for where an actuator looks after all that is there, and has room."""
    there = tuple(view.instance_id for view in bench.core.instances)
    wish = ResizeRequested(
        operation_id=OperationId("x"),
        pools=PoolCounts(prefill=prefill, decode=decode, mixed=mixed),
        timeout_s=10.0,
        start_timeout_s=100.0,
        actuator=ActuatorFacts(instance_ids=there, available_bytes=1000, instance_bytes=100),
    )
    return replace(wish, **other)


def started(bench: CoreBench) -> list[str]:
    return [member.instance_id for member in bench.core.desired_pools.start]


def join(bench: CoreBench, *names: str) -> None:
    for name in names:
        bench.feed(InstanceJoined(named_profile(name), ()))


def runs(bench: CoreBench, *names: str) -> None:
    """The actuator has processes of these instances, and of no others."""
    bench.feed(ProcessesReported(tuple(InstanceId(name) for name in names)))


def test_what_is_missing_is_started_and_the_resize_is_done_when_it_has_joined() -> None:
    bench = bench_of(*PAIR)
    assert bench.core.desired_pools == ((), ())
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
    assert bench.core.desired_pools.stop == (idle,), "the one that does least leaves"
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
    commands = bench.feed(resize(bench, 1, 2, actuator=None))
    (flip,) = of(SetRole, commands)
    assert flip.role is Role.DECODE
    assert bench.operation("x").state is OperationState.DONE, "and nobody has to start one"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"pools": PoolCounts(prefill=0, decode=1)}, "no instance could prefill"),
        ({"pools": PoolCounts(prefill=1, decode=0)}, "no instance could decode"),
        ({"actuator": None}, "no supervisor is connected to start and stop processes"),
        (
            {"actuator": ActuatorFacts(instance_ids=("prefill-0", "decode-0"), available_bytes=99, instance_bytes=100)},  # type: ignore[arg-type]
            "1 more instances need about 0.0 GiB of memory",
        ),
        (
            {"actuator": ActuatorFacts(instance_ids=("prefill-0", "gone"), available_bytes=999, instance_bytes=100)},  # type: ignore[arg-type]
            "gone is restarting",
        ),
    ],
)
def test_what_cannot_be_is_refused_before_anything_changes(change: dict[str, Any], reason: str) -> None:
    bench = bench_of(*PAIR)
    before = bench.core.instances
    assert not bench.feed(resize(bench, 1, 2, **change))
    assert bench.operation("x").state is OperationState.REFUSED
    assert reason in bench.operation("x").detail
    assert bench.operation("x").needs_actuator is (change.get("actuator", 1) is None)
    assert bench.core.instances == before
    assert bench.core.desired_pools == ((), ())


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
    assert bench.core.desired_pools.stop == ("decode-1", "decode-2")
    bench.feed(InstanceLost(InstanceId("decode-1")))
    runs(bench, *PAIR)
    assert bench.operation("x/back").state is OperationState.DONE
    assert bench.core.unready_reason is None


def test_one_that_cannot_be_started_fails_it_at_once() -> None:
    bench = bench_of(*PAIR)
    bench.feed(resize(bench, 1, 2))
    bench.feed(InstanceStartFailed(InstanceId("decode-7"), "not ours"))
    assert bench.operation("x").state is OperationState.RUNNING
    bench.feed(InstanceStartFailed(InstanceId("decode-1"), "no memory"))
    assert (bench.operation("x").state, bench.operation("x").detail) == (
        OperationState.FAILED,
        "decode-1 could not be started: no memory",
    )


def test_a_process_that_nobody_stops_fails_it_and_is_used_again() -> None:
    bench = bench_of("prefill-0", "decode-0", "decode-1")
    bench.feed(resize(bench, 1, 1))
    (leaving,) = bench.core.desired_pools.stop
    bench.now_s += GONE_S
    bench.feed(Tick())
    assert bench.operation("x").state is OperationState.FAILED
    assert "did not end within 60 s" in bench.operation("x").detail
    assert not next(view for view in bench.core.instances if view.instance_id == leaving).draining
    assert bench.core.desired_pools == ((), ())


def test_a_process_that_does_not_end_fails_it_though_its_instance_has_left() -> None:
    bench = bench_of("prefill-0", "decode-0", "decode-1")
    runs(bench, "prefill-0", "decode-0", "decode-1")
    bench.feed(resize(bench, 1, 1))
    (leaving,) = bench.core.desired_pools.stop
    bench.feed(InstanceLost(InstanceId(leaving)))
    bench.now_s += GONE_S
    bench.feed(Tick())
    assert (bench.operation("x").state, bench.operation("x").detail) == (
        OperationState.FAILED,
        f"the process of {leaving} did not end within 60 s",
    )
    assert started(bench) == [leaving], "the pools are to be as they were"


def test_a_cancelled_resize_is_taken_back() -> None:
    bench = bench_of(*PAIR)
    bench.feed(resize(bench, 2, 2))
    join(bench, "prefill-1")
    bench.feed(OperationCancelled(OperationId("x")))
    assert bench.operation("x").state is OperationState.CANCELLED
    assert bench.core.desired_pools.stop == ("prefill-1", "decode-1")
    bench.feed(InstanceLost(InstanceId("prefill-1")))
    runs(bench, *PAIR)
    assert bench.operation("x/back").state is OperationState.DONE
    bench.feed(OperationCancelled(OperationId("x")))  # it is over
    assert bench.core.ignored["OperationCancelled"] == 1


def test_what_is_restarted_meanwhile_is_not_used_when_a_resize_is_taken_back() -> None:
    """Found by the law machine."""
    bench = bench_of("prefill-0", "prefill-1", "decode-0")
    bench.feed(resize(bench, 1, 1))
    (leaving,) = bench.core.desired_pools.stop
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
    wish = bench.core.resize_wish
    assert wish is not None
    after = CoreBench()
    after.feed(wish)
    assert started(after) == ["decode-1"]
    join(after, "prefill-0", "decode-0", "decode-1")
    assert after.operation("x").state is OperationState.DONE
    assert after.core.resize_wish == wish


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
