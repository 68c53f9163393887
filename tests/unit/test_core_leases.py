"""Leases of sessions' cached KV: it outlasts other KV of its tenant, and costs no other tenant anything."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from pdmesh.core.config import CoreConfig
from pdmesh.core.events import InstanceJoined, SessionEnded, Tick
from pdmesh.core.instances.kept_chains import NO_GRANULE
from pdmesh.core.instances.last_uses import UseLog
from pdmesh.core.sessions import leases as module
from pdmesh.core.sessions import sessions as sessions_module
from pdmesh.core.sessions.leases import Leases
from pdmesh.core.sessions.sessions import Sessions
from pdmesh.kv_layout import GRANULE_TOKENS
from pdmesh.model import MAX_LEASE_S, CacheUser, InstanceId, PrefixHash, Request, SessionKey, SessionName
from pdmesh.policy.config import PolicyConfig
from pdmesh_testing.core import CoreBench
from pdmesh_testing.reuse import a_profile, a_prompt, hashes, serve

KEY, INSTANCE = SessionKey(bytes(16)), InstanceId("m0")

#: Names of prompts of two tenants, and the granules that each may keep of the 9 that the largest request leaves.
_OTHERS, _LEAST_SHARE = (range(100, 106, 2), range(101, 106, 2)), 3


def a_bench() -> CoreBench:
    """One instance with room for 16 granules."""
    return CoreBench(a_profile("m0"), config=CoreConfig(policy=PolicyConfig(chunk_tokens=4096), plans_in_flight=1))


def a_turn(request_id: str, num_granules: int, *, name: int, lease_s: float = 0.0, is_last: bool = False) -> Request:
    request = a_prompt(request_id, num_granules * GRANULE_TOKENS + 1, name=name)
    # A request with a target is never set aside.
    request = replace(request, slo_ttft_s=1000.0)
    key = SessionKey(bytes(15) + bytes([name]))
    return replace(request, session=SessionName(key, is_last=is_last, lease_s=lease_s))


def fill(bench: CoreBench, *, first: int = 100, number: int = 8) -> None:
    """Send prompts without a name that fill the cache more than once."""
    for each in range(first, first + number):
        serve(bench, a_prompt(f"fill-{each}-{bench.now_s}", 4 * GRANULE_TOKENS + 1, name=each))


def num_cached(bench: CoreBench, name: int, num_granules: int) -> int:
    chain = hashes(num_granules, name)
    return bench.core._mesh.instances[INSTANCE].kept.depth(chain, num_granules)


def test_leased_kv_outlasts_later_kv_of_its_tenant_until_the_lease_ends() -> None:
    bench = a_bench()
    serve(bench, a_turn("leased", 5, name=1, lease_s=300.0))
    serve(bench, a_turn("other", 5, name=2))
    fill(bench)
    assert (num_cached(bench, 1, 5), num_cached(bench, 2, 5)) == (5, 0)
    bench.feed(Tick(), 299.0)
    fill(bench)
    assert num_cached(bench, 1, 5) == 5
    bench.feed(Tick(), 300.0)
    fill(bench)
    assert num_cached(bench, 1, 5) == 0


@pytest.mark.parametrize("way", ["last request", "asked", "shorter prompt"])
def test_a_lease_ends_with_its_session_and_with_the_next_lease(way: str) -> None:
    bench = a_bench()
    serve(bench, a_turn("leased", 5, name=1, lease_s=3600.0))
    if way == "asked":
        bench.feed(SessionEnded(SessionKey(bytes(15) + b"\1")))
    else:
        serve(bench, a_turn("next", 2, name=1, lease_s=300.0, is_last=way == "last request"))
    fill(bench)
    assert num_cached(bench, 1, 5) == (2 if way == "shorter prompt" else 0)


def test_a_lease_ends_when_its_session_is_ended_after_it_was_forgotten() -> None:
    bench = a_bench()
    serve(bench, a_turn("leased", 5, name=1, lease_s=3600.0))
    bench.feed(Tick(), 301.0)
    bench.core.sessions.expire()
    key = SessionKey(bytes(15) + b"\1")
    assert bench.core.sessions.find(key) is None
    assert bench.core.sessions.leases
    bench.feed(SessionEnded(key))
    assert not bench.core.sessions.leases
    assert not bench.core.sessions.close(key)


@pytest.mark.parametrize("now_s", [10.0, 301.0])
def test_no_registration_brings_back_a_session_that_ended(now_s: float) -> None:
    """Though the instance's log of last uses names the session. A request does."""
    bench, key = a_bench(), SessionKey(bytes(15) + b"\1")
    serve(bench, a_turn("leased", 5, name=1, lease_s=3600.0))
    bench.feed(SessionEnded(key))
    bench.feed(Tick(), now_s)
    bench.core.sessions.expire()
    log, kept = UseLog(), hashes(5, 1)[::-1]
    log.ended(CacheUser("", session=key, num_turns=3, lease_s=3600.0), kept, 5 * GRANULE_TOKENS + 1, 0.0)
    joined = InstanceJoined(a_profile("m1"), (), kept=kept, jumps=((4, NO_GRANULE),), uses=log.report(kept, 5.0))
    bench.feed(joined)
    sessions = bench.core.sessions
    assert not sessions.leases
    assert all(each.is_ended for each in sessions.all)
    serve(bench, a_turn("next", 5, name=1, lease_s=60.0))
    assert len(sessions.leases) == 1
    assert not sessions._ended_s


def test_ends_of_sessions_are_remembered_in_bounded_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions_module, "MAX_ENDED", 8)
    sessions = Sessions()
    for number in range(20):
        sessions.close(SessionKey(number.to_bytes(16)))
    assert [int.from_bytes(key) for key in sessions._ended_s] == list(range(12, 20))
    sessions.now_s = MAX_LEASE_S
    sessions.close(KEY)
    assert list(sessions._ended_s) == [KEY]


def test_leases_block_no_request() -> None:
    bench = a_bench()
    for name in range(1, 8):
        serve(bench, a_turn(f"leased-{name}", 5, name=name, lease_s=3600.0))
    assert serve(bench, a_prompt("whole", 16 * GRANULE_TOKENS - 1, name=99)).num_reused_granules == 0
    assert not any(num_cached(bench, name, 5) for name in range(1, 8))


@pytest.mark.parametrize("seed", range(8))
def test_a_tenant_that_leases_everything_takes_nothing_from_others(seed: int) -> None:
    """The same requests with and without leases: after each, other tenants have as much cached, up to their share."""

    def num_cached(lease_s: float) -> list[tuple[int, int]]:
        rng, bench, found = random.Random(seed), a_bench(), list[tuple[int, int]]()
        for number in range(150):
            is_hostile = rng.random() < 0.7
            name = rng.randrange(20) if is_hostile else 100 + rng.randrange(6)
            turn = a_turn(f"r{number}", rng.randint(1, 6), name=name, lease_s=lease_s if is_hostile else 0.0)
            tenant = "hostile" if is_hostile else f"t{name % 2}"
            serve(bench, replace(turn, tenant=tenant))
            bench.core.check_integrity()
            kept = bench.core._mesh.instances[INSTANCE].kept
            even, odd = (sum(each in kept for name in names for each in hashes(6, name)) for names in _OTHERS)
            found.append((even, odd))
        return found

    for without, leased in zip(num_cached(0.0), num_cached(3600.0), strict=True):
        assert all(now >= min(before, _LEAST_SHARE) for before, now in zip(without, leased, strict=True))


def test_leases_are_bounded_and_the_tenant_with_the_most_loses_its_oldest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_LEASED", 12)
    leased: dict[PrefixHash, int] = {}
    leases = Leases(leased)
    leases.grant(KEY, "modest", hashes(4, 1), 300.0)
    for number in range(1, 200):
        leases.grant(SessionKey(number.to_bytes(16)), "hostile", hashes(4, 1 + number % 50), 300.0 + number)
        leases.check_integrity()
    assert len(leases) == 3
    assert set(hashes(4, 1)) <= leased.keys()
    assert len(leases._ends) <= 2 * len(leases) + 65
    assert set(leases.expire(1000.0)) >= set(hashes(4, 1))
    assert not leased
    for _ in range(65):  # the last of these empties the heap of ends
        leases.grant(KEY, "huge", hashes(13), 300.0)
    assert set(leases.expire(0.0)) == set(hashes(13))


def test_a_granule_is_leased_while_any_session_leases_it() -> None:
    leased: dict[PrefixHash, int] = {}
    leases = Leases(leased)
    leases.grant(KEY, "", hashes(4), 300.0)
    leases.grant(SessionKey(bytes(15) + b"\1"), "", hashes(2), 600.0)
    assert leases.expire(300.0) == list(hashes(4)[2:])
    assert leases.expire(600.0) == list(hashes(2))
