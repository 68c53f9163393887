"""KV of sessions is loaded from the offload tier before their next turns are expected."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from pdmesh.core.commands import Command, ExpectCopy, FreeKv, RunStep, WakeAt
from pdmesh.core.config import CoreConfig
from pdmesh.core.copies import tier_loads as module
from pdmesh.core.copies.tier_loads import LEAD_SHARE, RETRY_SHARE
from pdmesh.core.events import (
    KvExpected,
    KvReleased,
    RequestArrived,
    SessionEnded,
    Tick,
    TransferFailed,
    TransferLanded,
)
from pdmesh.kv_layout import GRANULE_TOKENS
from pdmesh.model import Epoch, InstanceId, PrefixHash, Request, RequestId, SessionKey, SessionName, Then, TransferId
from pdmesh.policy.config import PolicyConfig
from pdmesh_testing.core import CoreBench, of
from pdmesh_testing.reuse import a_profile, a_prompt, hashes, serve

INSTANCE = InstanceId("m0")

#: The pause between two turns, and when KV is loaded: loading takes no time worth mentioning.
PAUSE_S = 30.0
LEAD_S = LEAD_SHARE * PAUSE_S

#: When an attempt without room is repeated.
RETRY_AFTER_S = RETRY_SHARE * PAUSE_S

NUM_GRANULES = 5


class Bench(CoreBench):
    """An instance with room for 16 granules, and a tier for ``num_offloaded``."""

    def __init__(self, num_offloaded: int = 64) -> None:
        profile = replace(a_profile("m0"), num_offload_granules=num_offloaded, load_bytes_per_s=1e12)
        super().__init__(profile, config=CoreConfig(policy=PolicyConfig(chunk_tokens=4096), plans_in_flight=1))
        self.num_requests = 0

    def turn(self, session: int, at_s: float | None = None) -> tuple[int, int]:
        """Serve a turn; return how many granules it reuses, and how many of these it loads itself."""
        if at_s is not None:
            self.now_s = at_s
        self.num_requests += 1
        prompt = a_prompt(f"r{self.num_requests}", NUM_GRANULES * GRANULE_TOKENS + 1, name=session)
        name = SessionName(key=SessionKey(session.to_bytes(16)))
        admit = serve(self, replace(prompt, arrival_s=self.now_s, session=name, slo_ttft_s=1000.0))
        return admit.num_reused_granules, admit.num_loaded_granules

    def turns(self, *sessions: int) -> float:
        """Serve four turns of each session, `PAUSE_S` apart, and return when the next is expected."""
        start_s = self.now_s
        for number in range(4):
            for session in sessions:
                self.turn(session, start_s + number * PAUSE_S)
        return start_s + 4 * PAUSE_S

    def fill(self, num_prompts: int = 4) -> None:
        """Send prompts without a name; four fill the cache."""
        for _ in range(num_prompts):
            self.num_requests += 1
            serve(self, self.filling(4))

    def filling(self, num_granules: int) -> Request:
        return a_prompt(f"r{self.num_requests}", num_granules * GRANULE_TOKENS + 1, name=100 + self.num_requests)

    def tick(self, at_s: float) -> list[ExpectCopy]:
        """Let time pass, and return the loads that begin."""
        commands = self.feed(Tick(), at_s)
        loads = of(ExpectCopy, commands)
        assert all(load.transfer.then is Then.KEEP and load.num_loaded_granules for load in loads)
        return loads

    def land(self, load: ExpectCopy) -> list[Command]:
        what = load.request_id, load.epoch, load.transfer.transfer_id
        commands = self.feed(KvExpected(INSTANCE, *what))
        commands += self.feed(TransferLanded(INSTANCE, *what, 0, 0.0))
        return commands + self.feed(KvReleased(INSTANCE, *what))

    def num_cached(self, session: int) -> int:
        return self.core._mesh.instances[INSTANCE].kept.depth(hashes(NUM_GRANULES, session), NUM_GRANULES)


def test_kv_that_went_to_the_tier_is_loaded_before_the_next_turn() -> None:
    bench = Bench()
    return_s = bench.turns(1)
    bench.fill()
    assert bench.num_cached(1) == 0
    assert not bench.tick(return_s - 2 * LEAD_S)
    (load,) = bench.tick(return_s - LEAD_S)
    assert (load.chain, load.num_loaded_granules) == (hashes(NUM_GRANULES, 1), NUM_GRANULES)
    assert load.room.offload
    assert not bench.land(load)
    assert bench.turn(1, return_s) == (NUM_GRANULES, 0)
    assert bench.core.sessions.num_loaded_tokens == NUM_GRANULES * GRANULE_TOKENS
    assert bench.core.num_fetched_tokens == 0
    bench.core.check_integrity()


def test_the_core_asks_to_be_woken_for_a_load() -> None:
    bench = Bench()
    return_s = bench.turns(1)
    wakes = [wake.at_s for wake in of(WakeAt, bench.commands) if wake.at_s > return_s - PAUSE_S]
    assert wakes == [pytest.approx(return_s - LEAD_S, abs=0.1)]


def test_a_part_in_the_tier_is_loaded_behind_the_part_in_the_cache() -> None:
    bench = Bench()
    return_s = bench.turns(1)
    bench.fill(3)
    assert bench.num_cached(1) == 3
    (load,) = bench.tick(return_s - LEAD_S)
    assert (load.num_loaded_granules, load.transfer.num_reused_granules) == (2, 3)


def test_a_turn_that_comes_during_a_load_waits_for_it_or_loads_itself() -> None:
    bench = Bench()
    return_s = bench.turns(1)
    bench.fill()
    (load,) = bench.tick(return_s - LEAD_S)
    assert bench.turn(1, return_s - LEAD_S) == (NUM_GRANULES, NUM_GRANULES)
    bench.land(load)
    assert bench.num_cached(1) == NUM_GRANULES
    bench.core.check_integrity()


@pytest.mark.parametrize("why", ["no tier", "kept", "ended", "came early", "pause unknown", "no session"])
def test_nothing_is_loaded(why: str) -> None:
    bench = Bench(0 if why == "no tier" else 64)
    return_s = 4 * PAUSE_S
    if why == "pause unknown":
        bench.turn(1, return_s - PAUSE_S)
    elif why == "no session":
        serve(bench, a_prompt("r", NUM_GRANULES * GRANULE_TOKENS + 1, name=1))
    else:
        return_s = bench.turns(1)
    if why == "kept":
        bench.fill(1)
    else:
        bench.fill()
    if why == "ended":
        bench.feed(SessionEnded(SessionKey((1).to_bytes(16))))
    if why == "came early":
        bench.turn(1, return_s - 2 * LEAD_S)
    assert not bench.tick(return_s - LEAD_S)
    assert not bench.tick(return_s)


@pytest.mark.parametrize(("num_turns", "is_loaded"), [(4, False), (1, True)])
def test_a_load_takes_no_room_from_sessions_that_return_earlier(num_turns: int, is_loaded: bool) -> None:
    """Two other sessions and a request fill the cache. After one turn the two are expected later than the first one."""
    bench = Bench()
    return_s = bench.turns(1)
    for number in range(num_turns):
        for session in (2, 3):
            bench.turn(session, return_s - 10.5 - (num_turns - 1 - number) * 6.0)
    bench.feed(RequestArrived(bench.filling(4)))
    assert bench.num_cached(1) < NUM_GRANULES
    assert [bench.num_cached(session) for session in (2, 3)] == [5, 5]
    loads = bench.tick(return_s - LEAD_S)
    assert [load.chain for load in loads] == [hashes(NUM_GRANULES, 1)] * is_loaded


def test_a_load_without_room_is_tried_again_until_the_session_is_late() -> None:
    bench = Bench()
    return_s = bench.turns(1)
    bench.fill()
    held = bench.filling(15)
    (step,) = of(RunStep, bench.feed(RequestArrived(held)))
    assert not bench.tick(return_s - LEAD_S)
    bench.done(INSTANCE, step.plan)
    bench.finish(INSTANCE, held.request_id)
    bench.released(INSTANCE, held.request_id)
    (load,) = bench.tick(return_s - LEAD_S + RETRY_AFTER_S)
    bench.land(load)
    assert bench.num_cached(1) == NUM_GRANULES


class Bisected(tuple[PrefixHash, ...]):
    """A chain that is looked up at its end and by bisection: all other granules must not be read."""

    def __getitem__(self, index: Any) -> Any:
        assert index in (-1, 2, 0), "all granules are read"
        return super().__getitem__(index)


@pytest.mark.parametrize("why", ["no room", "too many sessions"])
def test_without_room_for_a_load_its_chain_is_not_walked(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench()
    return_s = bench.turns(1)
    bench.fill()
    if why == "no room":
        bench.feed(RequestArrived(bench.filling(15)))
    else:
        monkeypatch.setattr(module, "MAX_COMPARED", 0)
    session = bench.core.sessions.find(SessionKey((1).to_bytes(16)))
    assert session is not None
    assert session.member is not None
    session.member.chain = Bisected(session.member.chain)
    assert not bench.tick(return_s - LEAD_S)
    assert bench.core._tier_loads.next_look_s == return_s - LEAD_S + RETRY_AFTER_S


def an_expected_load() -> tuple[Bench, float, tuple[RequestId, Epoch, TransferId]]:
    """Return a bench on which a load is under way, the time of the session's return, and the load's names."""
    bench = Bench()
    return_s = bench.turns(1)
    bench.fill()
    (load,) = bench.tick(return_s - LEAD_S)
    what = load.request_id, load.epoch, load.transfer.transfer_id
    bench.feed(KvExpected(INSTANCE, *what))
    return bench, return_s, what


def test_a_load_that_lands_after_its_limit_counts_as_loaded() -> None:
    bench, return_s, what = an_expected_load()
    assert of(FreeKv, bench.feed(Tick(), return_s + PAUSE_S))
    bench.feed(TransferLanded(INSTANCE, *what, 0, 0.0))
    assert bench.core.sessions.num_loaded_tokens == NUM_GRANULES * GRANULE_TOKENS
    assert bench.core.num_fetched_tokens == 0


def test_a_load_that_fails_leaves_no_trace() -> None:
    bench, return_s, what = an_expected_load()
    bench.feed(TransferFailed(INSTANCE, *what, "the disk is gone"))
    bench.feed(KvReleased(INSTANCE, *what))
    bench.core.check_integrity()
    assert not bench.core._mesh.instances[INSTANCE].allocations
    assert not bench.core._mesh.cut.of(INSTANCE)
    assert bench.turn(1, return_s) == (NUM_GRANULES, NUM_GRANULES)
