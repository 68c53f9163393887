"""Running decodes that move for memory and for time: when, where to, who, and that nothing goes to and fro."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from pdmesh.core.commands import Command, ExpectCopy, FreeKv, Restart, RunStep
from pdmesh.core.config import CoreConfig, KvReservation
from pdmesh.core.copies.decode_moves import MAX_FAILED
from pdmesh.core.copies.rebalancing import COOL_DOWN_S, LOOK_S
from pdmesh.core.events import InstanceJoined, InstanceSuspected, KvLow, Tick, TransferFailed, TransferSent
from pdmesh.core.operator_events import BundleChangeRequested
from pdmesh.model import Epoch, InstanceId, RequestId, Role
from pdmesh.plans import ResidentContext
from pdmesh.policy.config import PolicyConfig
from pdmesh.policy.latency import LinearLatencyModel
from pdmesh_testing.core import GATEWAY, CoreBench, FixedGrowth, grown, of
from pdmesh_testing.modelled import modelled_profile

#: A millisecond for each token of a prompt and of a decode; two prompts of 8 tokens are more than a move takes.
LATENCY = LinearLatencyModel(a_s=0.0, b_s=0.02, c_s=0.0, d_s=0.0, decode_a_s=0.0, decode_s=0.01)
POLICY = PolicyConfig(chunk_tokens=64, latency=LATENCY, slo_tpot_s=0.05, prefills_locally=False)
CONFIG = CoreConfig(kv_reservation=KvReservation.ON_DEMAND, policy=POLICY, max_queue_s=50.0)


def moves_in(commands: list[Command]) -> list[tuple[str, str]]:
    """Who begins to move, and where to."""
    return [(place.request_id, place.instance_id) for place in of(ExpectCopy, commands) if place.transfer.is_move]


class Bench(CoreBench):
    """Mixed instances with blocks of 4 tokens, on demand; no two come at once, so each knows where its requests go."""

    def __init__(self, config: CoreConfig = CONFIG, /, **blocks: int) -> None:
        super().__init__(config=config)
        self.core._mesh.growth = FixedGrowth(1.0, risk=0.5)
        self.feed(BundleChangeRequested("pdmesh"))
        self.blocks = blocks

    def join(self, name: str, **fields: object) -> None:
        profile = modelled_profile(name, Role.MIXED, num_blocks=self.blocks[name], max_num_seqs=64)
        self.feed(InstanceJoined(replace(profile, **fields), ()))  # type: ignore[arg-type]

    def decodes(self, request_id: str, output: int = 40) -> None:
        """It arrives now, and is computed where there is room, a second after the one before."""
        self.now_s += 1.0
        for step in of(RunStep, self.arrive(request_id, 8, output)):
            self.done(step.instance_id, step.plan)

    def low(self, name: str, *residents: tuple[str, int]) -> list[Command]:
        contexts = tuple(
            ResidentContext(request_id=RequestId(who), epoch=Epoch(0), num_tokens=number) for who, number in residents
        )
        return self.feed(KvLow(InstanceId(name), contexts))

    def move_landed(self, request_id: str, source: str, target: str) -> list[Command]:
        commands = self.landed(target, request_id)
        commands += self.feed(TransferSent(*self._transfer(source, request_id), 1, 0.1, 0.001, was_decoding=True))
        return commands + self.released(source, request_id)


def short_of_memory(**blocks: int) -> Bench:
    """``a`` has no block left, beside another that came later: three requests, the oldest first."""
    bench = Bench(a=12, **blocks)
    bench.join("a")
    for name in ("r0", "r1", "r2"):
        bench.decodes(name)
    assert bench.free_blocks("a") == 0
    for name in blocks:
        bench.join(name)
    return bench


def test_who_asks_in_vain_has_somebody_younger_move_before_anybody_stands_still() -> None:
    bench = short_of_memory(b=64)
    commands = bench.low("a", ("r0", 10))
    ((who, where),) = moves_in(commands)
    assert (who in ("r1", "r2"), where) == (True, "b")
    assert not of(Restart, bench.commands)
    assert not moves_in(bench.low("a", ("r0", 11))), "what is on its way is enough"
    grows = grown(bench.move_landed(who, "a", "b"))
    assert [grow.request_id for grow in grows if grow.instance_id == "a"] == ["r0"]


def test_the_oldest_never_moves_for_the_memory_of_others() -> None:
    bench = short_of_memory(b=64)
    assert not moves_in(bench.low("a", ("r2", 10))), "all others are older"
    assert not of(Restart, bench.commands)


def test_who_stands_still_waits_for_what_moves_and_retracts_nobody() -> None:
    bench = short_of_memory(b=64)
    ((who, _),) = moves_in(bench.low("a", ("r0", 17)))
    bench.feed(Tick())
    assert not of(Restart, bench.commands)
    bench.move_landed(who, "a", "b")
    assert not of(Restart, bench.commands)


def test_where_the_move_fails_it_is_retracted_as_without_moves() -> None:
    bench = short_of_memory(b=64)
    ((who, _),) = moves_in(bench.low("a", ("r0", 17)))
    bench.feed(TransferFailed(*bench._transfer("a", who), committed=False, reason="why"))
    bench.released("b", who)
    bench.low("a", ("r0", 18))
    for _ in range(3):
        bench.feed(Tick(), at_s=bench.now_s + 0.1)
    failed_and_others = {restart.request_id for restart in of(Restart, bench.commands)} | {
        name for name, _ in moves_in(bench.commands)
    }
    assert failed_and_others == {"r1", "r2"}, "each younger one was tried once"


def test_whose_moves_failed_so_often_stays_where_it_is() -> None:
    bench = short_of_memory(b=64)
    num_failed: Counter[str] = Counter()
    for _ in range(2 * MAX_FAILED):
        commands = bench.low("a", ("r0", 10))
        while moves := moves_in(commands):
            ((who, _),) = moves
            num_failed[who] += 1
            commands = bench.feed(TransferFailed(*bench._transfer("a", who), committed=False, reason="why"))
            commands += bench.released("b", who)
        bench.now_s += COOL_DOWN_S
    assert num_failed == {"r1": MAX_FAILED, "r2": MAX_FAILED}


@pytest.mark.parametrize("why", ["no room there", "cheap to compute again", "switched off", "fcfs"])
def test_without_a_place_or_a_gain_something_is_retracted(why: str) -> None:
    policy = POLICY
    if why == "cheap to compute again":
        policy = replace(POLICY, latency=replace(LATENCY, b_s=1e-6))
    if why == "switched off":
        policy = replace(POLICY, rebalances=False)
    bench = Bench(replace(CONFIG, policy=policy), a=12, b=4 if why == "no room there" else 64)
    if why == "fcfs":
        bench.feed(BundleChangeRequested("fcfs"))
    bench.join("a")
    for name in ("r0", "r1", "r2"):
        bench.decodes(name)
    bench.join("b")
    assert not moves_in(bench.low("a", ("r0", 17)))
    (restart,) = of(Restart, bench.commands)
    assert restart.retracted


def test_nothing_comes_back_for_a_while() -> None:
    """Neither what has moved, nor another one from there."""
    bench = short_of_memory(b=64)
    ((who, _),) = moves_in(bench.low("a", ("r0", 10)))
    begun = bench.now_s
    assert bench.free_blocks("b") == 64 - 12, "it grows on the way: it had 4 blocks, and may come to need 12"
    bench.move_landed(who, "a", "b")
    for name in {"r0", "r1", "r2"} - {who}:
        bench.finish("a", name)
        bench.released("a", name)
    assert bench.free_blocks("a") == 12
    bench.feed(InstanceSuspected(InstanceId("a")))
    bench.decodes("older")
    bench.decodes("younger", output=10)
    bench.feed(InstanceSuspected(InstanceId("a"), suspected=False))
    bench.core._mesh.instances[InstanceId("b")].set_quarantined(bench.free_blocks("b"))
    assert not moves_in(bench.low("b", ("older", 10)))
    assert not moves_in(bench.feed(Tick(), at_s=begun + COOL_DOWN_S - 0.1)), "to and fro"
    assert moves_in(bench.feed(Tick(), at_s=begun + COOL_DOWN_S + 0.1)) == [("younger", "a")]


@pytest.mark.parametrize(("num_blocks", "moves"), [(13, True), (12, False)])
def test_where_it_goes_for_memory_an_eighth_is_left_free(num_blocks: int, moves: bool) -> None:
    """12 blocks are all that it may come to need."""
    assert bool(moves_in(short_of_memory(b=num_blocks).low("a", ("r0", 10)))) is moves


# --- time between tokens ---


def slow(number: int = 6, **fields: object) -> Bench:
    """``a`` decodes so many, each of which takes 10 ms of a step; they want 50. Another came later."""
    bench = Bench(a=200, b=200)
    bench.join("a")
    for index in range(number):
        bench.decodes(f"r{index}")
    bench.join("b", **fields)
    return bench


def look(bench: Bench) -> list[tuple[str, str]]:
    return moves_in(bench.feed(Tick(), at_s=bench.now_s + LOOK_S))


def test_one_after_the_other_moves_from_where_steps_are_too_slow_until_they_are_not() -> None:
    bench = slow(number=7)
    moved: list[str] = []
    for _ in range(10):
        for who, where in look(bench):
            assert where == "b"
            moved.append(who)
            bench.move_landed(who, "a", where)
    assert len(moved) == 2, "with five a step takes 50 ms"
    assert {view.instance_id: view.num_decoding for view in bench.core.instances} == {"a": 5, "b": 2}


def test_nothing_moves_where_the_other_would_soon_be_as_slow() -> None:
    bench = slow(number=11)
    moved = 0
    for _ in range(100):
        for who, where in look(bench):
            assert where == "b"
            bench.move_landed(who, "a", where)
            moved += 1
    assert moved == 4, "with four a step takes 40 of 50 ms; the other seven stay, and nothing comes back"


def test_it_moves_nowhere_where_there_are_no_seats() -> None:
    assert not look(slow(max_num_seqs=0))


def test_what_is_about_to_leave_counts_once() -> None:
    bench = slow(number=9)
    (first,) = look(bench)
    assert not look(bench), "one at a time"
    bench.feed(TransferFailed(*bench._transfer("a", first[0]), committed=False, reason="why"))
    assert [free.instance_id for free in of(FreeKv, bench.commands)] == ["b"]
    bench.released("b", first[0])
    ((second, _),) = look(bench)
    assert second != first[0], "who has just begun to move does not again"


def test_nothing_moves_to_whom_its_gateway_does_not_hear_of() -> None:
    bench = slow(number=9)
    bench.core._mesh.cut.note(GATEWAY, "b", bench.now_s)
    assert not look(bench)
    bench.core._mesh.cut.forget(GATEWAY)
    assert look(bench)
