"""Moves of running decodes as the core decides them: a row of the architecture's table each."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pdmesh.core.commands import Command, ExpectCopy, ForgetRequest, FreeKv, Outcome, Restart, SendCopy, Stop
from pdmesh.core.copies.decode_moves import MAX_AT_ONCE
from pdmesh.core.events import (
    DrainRequested,
    GatewayLost,
    InstanceJoined,
    InstanceLost,
    InstanceSuspected,
    RequestCancelled,
    RequestDropped,
    Tick,
    TransferFailed,
    TransferSent,
)
from pdmesh.core.operator_events import OperationCancelled, OperationRequested
from pdmesh.core.operators.operation_records import OperationRecord
from pdmesh.model import Epoch, InstanceId, RequestId, Resident, Role
from pdmesh.operations import OperationId, OperationKind, OperationState
from pdmesh_testing.core import GATEWAY, CoreBench, bench_of, named_profile, of, resumed, stopped
from pdmesh_testing.modelled import modelled_profile


def a_resident(*, decoding: bool) -> Resident:
    """What an instance that registers says of the request that moves."""
    return Resident(
        request_id=RequestId("a"),
        epoch=Epoch(0),
        gateway_id=GATEWAY,
        num_blocks=3,
        num_context_tokens=9,
        decoding=decoding,
        max_total_tokens=11,
    )


class Move:
    """A request ``a`` on its way from ``source`` to ``target``, as granted."""

    def __init__(self) -> None:
        self.bench = bench_of("p0", "d0", "d1")
        self.source = self.bench.decoding("a")
        self.target = "d1" if self.source == "d0" else "d0"
        self.commands = self.move("x")

    def move(
        self, name: str, request_id: str = "a", target: str | None = None, timeout_s: float = 10.0
    ) -> list[Command]:
        return self.bench.feed(
            OperationRequested(
                operation_id=OperationId(name),
                kind=OperationKind.MOVE,
                instance_id=InstanceId(target or self.target),
                timeout_s=timeout_s,
                request_id=RequestId(request_id),
            )
        )

    @property
    def operation(self) -> OperationRecord:
        return self.bench.core.operations[-1]

    def is_(self, state: OperationState) -> bool:
        return self.operation.state is state

    def landed(self) -> list[Command]:
        return self.bench.landed(self.target, "a")

    def sent(self) -> list[Command]:
        return self.bench.feed(TransferSent(*self.bench._transfer(self.source, "a"), 1, 0.1, 0.001, was_decoding=True))

    def failed(self, *, committed: bool) -> list[Command]:
        return self.bench.feed(TransferFailed(*self.bench._transfer(self.source, "a"), "why", committed))

    def finished(self, instance_id: str) -> None:
        """Ends on the instance; nothing is left anywhere."""
        assert not of(Restart, self.bench.commands)
        self.bench.finish(instance_id, "a")
        self.bench.released(instance_id, "a")
        self.assert_empty()

    def assert_empty(self) -> None:
        for view in self.bench.core.instances:
            assert (view.num_free_blocks, view.num_seats_taken) == (view.num_blocks, 0), view

    def restarted(self) -> bool:
        return bool(of(Restart, self.bench.commands))


def test_a_move_is_reserved_granted_landed_and_done() -> None:
    move = Move()
    (place,), (grant,) = of(ExpectCopy, move.commands), of(SendCopy, move.commands)
    assert (place.instance_id, grant.instance_id) == (move.target, move.source)
    assert place.transfer == grant.transfer
    assert place.transfer.is_move
    assert move.is_(OperationState.RUNNING)
    move.landed()
    assert move.is_(OperationState.DONE)
    move.sent()
    move.bench.released(move.source, "a")
    move.finished(move.target)
    assert not set(move.bench.core.ignored) - {"TransferSent"}, "of the prompt, after it had landed"


def test_the_source_may_tell_first() -> None:
    move = Move()
    move.sent()
    move.bench.released(move.source, "a")
    move.landed()
    assert move.is_(OperationState.DONE)
    move.finished(move.target)
    assert not set(move.bench.core.ignored) - {"TransferSent"}, "of the prompt, after it had landed"


def test_a_source_that_missed_the_acknowledgement_is_freed() -> None:
    move = Move()
    move.landed()
    (free,) = of(FreeKv, move.failed(committed=True))
    assert free.instance_id == move.source
    move.bench.released(move.source, "a")
    move.finished(move.target)


def test_word_of_a_move_before_says_nothing_of_this_one() -> None:
    move = Move()
    late = TransferFailed(*move.bench._transfer(move.source, "a"), "why", True)
    move.failed(committed=False)
    move.bench.released(move.target, "a")
    assert of(SendCopy, move.move("again"))
    assert not of(FreeKv, move.bench.feed(late))
    move.landed()
    move.sent()
    move.bench.released(move.source, "a")
    move.finished(move.target)


def test_a_request_moves_back_once_its_source_is_free() -> None:
    move = Move()
    move.landed()
    assert not of(ExpectCopy, move.move("too soon", target=move.source))
    assert move.is_(OperationState.REFUSED)
    move.sent()
    move.bench.released(move.source, "a")
    move.source, move.target = move.target, move.source
    assert of(SendCopy, move.move("back"))
    move.landed()
    move.sent()
    move.bench.released(move.source, "a")
    move.finished(move.target)


def test_what_ends_on_its_way_back_is_freed_there() -> None:
    move = Move()
    move.landed()
    move.sent()
    move.bench.released(move.source, "a")
    move.move("back", target=move.source)
    assert [free.instance_id for free in of(FreeKv, move.bench.finish(move.target, "a"))] == [move.source]
    for name in (move.source, move.target):
        move.bench.released(name, "a")
    move.assert_empty()


def test_before_the_commit_the_source_goes_on_and_its_target_is_freed() -> None:
    move = Move()
    assert [free.instance_id for free in of(FreeKv, move.failed(committed=False))] == [move.target]
    assert move.is_(OperationState.RUNNING)
    move.bench.released(move.target, "a")
    assert (move.operation.state, move.restarted()) == (OperationState.FAILED, False)
    move.finished(move.source)


@pytest.mark.parametrize("refuses", [True, False])
def test_a_target_that_refuses_or_gives_up_leaves_it_where_it_is(refuses: bool) -> None:
    move = Move()
    who, request_id, epoch, transfer_id = move.bench._transfer(move.target, "a")
    move.bench.feed(
        RequestDropped(who, request_id, epoch, "stopping")
        if refuses
        else TransferFailed(who, request_id, epoch, transfer_id, "damaged")
    )
    (resume,) = resumed(move.bench.released(move.target, "a"))
    assert resume.instance_id == move.source
    move.finished(move.source)


def test_after_the_commit_a_target_that_is_freed_before_it_landed_never_began() -> None:
    move = Move()
    assert [free.instance_id for free in of(FreeKv, move.failed(committed=True))] == [move.target]
    assert [resume.instance_id for resume in resumed(move.bench.released(move.target, "a"))] == [move.source]
    move.finished(move.source)


def test_after_the_commit_a_target_that_landed_before_it_was_freed_is_the_next_epoch() -> None:
    move = Move()
    move.failed(committed=True)
    assert of(Restart, move.landed())
    move.bench.released(move.target, "a")
    move.bench.released(move.source, "a")
    assert not resumed(move.bench.commands)
    move.assert_empty()


@pytest.mark.parametrize("committed", [True, False])
def test_a_target_that_dies_costs_an_epoch_only_after_the_commit(committed: bool) -> None:
    move = Move()
    commands = move.bench.feed(InstanceLost(InstanceId(move.target)))
    assert [cancel.instance_id for cancel in stopped(Stop.CANCEL, commands)] == [move.source]
    move.failed(committed=committed)
    assert move.restarted() is committed
    if committed:
        move.bench.released(move.source, "a")
        move.assert_empty()
    else:
        move.finished(move.source)


def test_a_target_that_died_after_it_acknowledged_costs_an_epoch() -> None:
    move = Move()
    move.bench.feed(InstanceLost(InstanceId(move.target)))
    assert of(Restart, move.sent())
    move.bench.released(move.source, "a")
    move.assert_empty()


def test_a_target_that_falls_silent_lets_the_source_go_on() -> None:
    move = Move()
    commands = move.bench.feed(InstanceSuspected(InstanceId(move.target)))
    assert [cancel.instance_id for cancel in stopped(Stop.CANCEL, commands)] == [move.source]


@pytest.mark.parametrize("has_landed", [True, False])
def test_a_target_that_registers_again_says_by_that_whether_it_began(has_landed: bool) -> None:
    move = Move()
    again = move.bench.feed(
        InstanceJoined(named_profile(move.target), (a_resident(decoding=True),) if has_landed else ())
    )
    assert bool(resumed(again)) is not has_landed
    if has_landed:
        move.sent()
        move.bench.released(move.source, "a")
    move.finished(move.target if has_landed else move.source)


def test_a_target_that_registers_with_what_has_not_landed_is_freed_before_the_source_goes_on() -> None:
    move = Move()
    again = move.bench.feed(InstanceJoined(named_profile(move.target), (a_resident(decoding=False),)))
    assert [free.instance_id for free in of(FreeKv, again)] == [move.target]
    assert not resumed(again)
    assert [resume.instance_id for resume in resumed(move.bench.released(move.target, "a"))] == [move.source]
    move.finished(move.source)


@pytest.mark.parametrize("committed", [True, False])
@pytest.mark.parametrize("is_told", [True, False])
def test_another_process_in_the_place_of_the_target_does_not_say_whether_that_began(
    is_told: bool, committed: bool
) -> None:
    """It may have landed, and drawn tokens, of which nobody had heard when it died."""
    move = Move()
    if is_told:
        move.bench.feed(InstanceLost(InstanceId(move.target)))
    commands = move.bench.feed(InstanceJoined(replace(named_profile(move.target), pid=4321), ()))
    assert not resumed(commands)
    assert not move.restarted()
    assert [cancel.instance_id for cancel in stopped(Stop.CANCEL, commands)] == [move.source]
    assert not resumed(move.failed(committed=committed))
    assert move.restarted() is committed
    if committed:
        move.bench.released(move.source, "a")
        move.assert_empty()
    else:
        move.finished(move.source)


@pytest.mark.parametrize("committed", [True, False])
@pytest.mark.parametrize("is_another", [True, False])
def test_a_target_that_was_told_to_free_it_and_registers_without_it_may_have_begun(
    is_another: bool, committed: bool
) -> None:
    move = Move()
    move.failed(committed=committed)
    again = replace(named_profile(move.target), pid=4321) if is_another else named_profile(move.target)
    assert not resumed(move.bench.feed(InstanceJoined(again, ())))
    assert move.restarted() is committed
    if committed:
        move.bench.released(move.source, "a")
        move.assert_empty()
    else:
        move.finished(move.source)


@pytest.mark.parametrize("is_freed", [True, False])
def test_a_source_that_registers_again_goes_on_if_it_still_decodes(is_freed: bool) -> None:
    move = Move()
    commands = move.bench.feed(
        InstanceJoined(named_profile(move.source), () if is_freed else (a_resident(decoding=True),))
    )
    assert [free.instance_id for free in of(FreeKv, commands)] == [move.target]
    assert bool(of(Restart, commands)) is is_freed
    move.bench.released(move.target, "a")
    if is_freed:
        move.assert_empty()
    else:
        move.finished(move.source)


def test_a_source_that_dies_before_it_landed_costs_an_epoch_and_after_that_nothing() -> None:
    move = Move()
    commands = move.bench.feed(InstanceLost(InstanceId(move.source)))
    assert of(Restart, commands)
    assert [free.instance_id for free in of(FreeKv, commands)] == [move.target]
    move.bench.released(move.target, "a")
    move.assert_empty()

    after = Move()
    after.landed()
    after.bench.feed(InstanceLost(InstanceId(after.source)))
    after.finished(after.target)


@pytest.mark.parametrize("how", ["cancel", "gateway", "finish"])
def test_what_ends_on_its_way_is_freed_on_both_sides(how: str) -> None:
    move = Move()
    match how:
        case "cancel":
            commands = move.bench.feed(RequestCancelled(GATEWAY, RequestId("a"), Epoch(0)))
        case "gateway":
            commands = move.bench.feed(GatewayLost(GATEWAY))
        case _:
            commands = move.bench.finish(move.source, "a")
    freed = {free.instance_id for free in of(FreeKv, commands)}
    assert freed == {move.target} | ({move.source} if how != "finish" else set())
    assert of(ForgetRequest, commands)[0].outcome is not Outcome.RESTARTED
    for name in (move.source, move.target):
        move.bench.released(name, "a")
    move.assert_empty()
    assert not resumed(move.bench.commands)
    assert move.is_(OperationState.FAILED)


def test_an_operator_takes_a_move_back() -> None:
    move = Move()
    assert stopped(Stop.CANCEL, move.bench.feed(OperationCancelled(OperationId("x"))))
    move.failed(committed=False)
    move.bench.released(move.target, "a")
    assert move.is_(OperationState.CANCELLED)
    move.finished(move.source)


def test_a_move_that_takes_too_long_is_taken_back() -> None:
    move = Move()
    move.bench.now_s += 10.0
    assert stopped(Stop.CANCEL, move.bench.feed(Tick()))
    move.failed(committed=False)
    move.bench.released(move.target, "a")
    assert move.is_(OperationState.FAILED)


@pytest.mark.parametrize(
    ("request_id", "target", "reason"),
    [
        ("b", "d1", "request 'b' is not running"),
        ("a", "d9", "no instance is called 'd9'"),
        ("a", "d0", "already decodes on d0"),
        ("a", "p0", "has no room on p0"),
        ("a", "d2", "has KV of another model or layout than d2"),
        ("a", "d3", "has no room on d3"),
        ("w", "d1", "is prefilling: only decoding requests can move"),
    ],
)
def test_what_cannot_move_is_refused_in_one_sentence(request_id: str, target: str, reason: str) -> None:
    bench = CoreBench(
        named_profile("p0"),
        named_profile("d0"),
        named_profile("d1"),
        modelled_profile("d2", Role.DECODE, model="other"),
        named_profile("d3", max_model_len=11),
    )
    move = Move.__new__(Move)
    move.bench = bench
    assert bench.decoding("a") == "d0"
    bench.arrive("w")
    assert not of(ExpectCopy, move.move("x", request_id, target))
    assert move.is_(OperationState.REFUSED)
    assert reason in move.operation.detail


def test_a_drain_moves_what_decodes_and_a_stopping_process_does_the_same() -> None:
    for event in (
        OperationRequested(
            operation_id=OperationId("x"),
            kind=OperationKind.DRAIN,
            instance_id=InstanceId("d0"),
            timeout_s=10.0,
        ),
        DrainRequested(InstanceId("d0")),
    ):
        bench = bench_of("p0", "d0", "d1")
        assert bench.decoding("a") == "d0"
        (place,) = of(ExpectCopy, bench.feed(event))
        assert (place.instance_id, place.transfer.is_move) == ("d1", True)
        bench.landed("d1", "a")
        bench.released("d0", "a")
        if bench.core.operations:
            assert bench.core.operations[-1].state is OperationState.DONE
        bench.finish("d1", "a")


def test_who_was_about_to_stop_and_is_lost_is_forgotten() -> None:
    bench = bench_of("p0", "d0", "d1")
    assert bench.decoding("a") == "d0"
    bench.feed(InstanceJoined(named_profile("d1"), (), stopping=True))
    bench.feed(InstanceLost(InstanceId("d1")))
    bench.feed(InstanceJoined(named_profile("d1"), ()))
    assert [place.instance_id for place in of(ExpectCopy, bench.feed(DrainRequested(InstanceId("d0"))))] == ["d1"]


def test_only_a_few_leave_at_a_time_and_fewer_are_sent() -> None:
    bench = CoreBench(named_profile("p0"), named_profile("d0", num_transfer_backends=4))
    for number in range(6):
        bench.decoding(f"r{number}")
    bench.feed(InstanceJoined(named_profile("d1", num_transfer_backends=4), ()))
    commands = bench.feed(DrainRequested(InstanceId("d0")))
    assert len(of(ExpectCopy, commands)) == 4
    assert len(of(SendCopy, commands)) == 2
    commands = bench.landed("d1", "r0")
    assert len(of(ExpectCopy, commands)) == 1
    assert len(of(SendCopy, commands)) == 1


def test_no_more_leave_at_a_time_where_they_go_to_several() -> None:
    bench = CoreBench(named_profile("p0"), named_profile("d0"))
    for number in range(6):
        bench.decoding(f"r{number}")
    for name in ("d1", "d2"):
        bench.feed(InstanceJoined(named_profile(name), ()))
    places = of(ExpectCopy, bench.feed(DrainRequested(InstanceId("d0"))))
    assert len(places) == MAX_AT_ONCE
    assert {place.instance_id for place in places} == {"d1", "d2"}


def test_no_more_come_at_a_time_where_several_are_left() -> None:
    bench = CoreBench(named_profile("p0"), named_profile("d0"), named_profile("d1"))
    for number in range(8):
        bench.decoding(f"r{number}")
    left = InstanceId("d0"), InstanceId("d1")
    for name in left:
        bench.feed(InstanceSuspected(name))  # nothing leaves it meanwhile
        bench.feed(DrainRequested(name))
    bench.feed(InstanceJoined(named_profile("d2"), ()))
    for name in left:
        bench.feed(InstanceSuspected(name, suspected=False))
    moves = [place for place in of(ExpectCopy, bench.commands) if place.transfer.is_move]
    assert [place.instance_id for place in moves] == ["d2"] * MAX_AT_ONCE
