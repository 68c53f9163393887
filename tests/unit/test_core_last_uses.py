"""A new scheduler learns from instances which tenants and sessions used their cached KV.

The first scheduler serves turns on one instance with room for 16 granules. The second one gets that instance's
registration, and must treat the KV as the first one would have.
"""

from __future__ import annotations

import random
from dataclasses import replace

import msgspec
import pytest

from pdmesh.core.commands import AdmitPrefill
from pdmesh.core.config import CoreConfig
from pdmesh.core.events import Event, GatewayJoined, InstanceJoined, RequestArrived, Tick
from pdmesh.core.instances.kept_chains import NO_GRANULE, KeptChains
from pdmesh.core.instances.last_uses import UseLog, last_turns, last_uses
from pdmesh.core.sessions.session_state import SessionState
from pdmesh.core.sessions.sessions import IDLE_S
from pdmesh.instance.cache import BlockCache, CachedPrefix
from pdmesh.kv_layout import GRANULE_TOKENS
from pdmesh.model import (
    NO_USES,
    CacheUser,
    Epoch,
    InstanceId,
    LastUse,
    PrefixHash,
    Request,
    RequestId,
    Resident,
    SessionKey,
    SessionName,
)
from pdmesh.policy.config import PolicyConfig
from pdmesh.wire.messages import RegisterWorker
from pdmesh_testing.core import GATEWAY, CoreBench, of
from pdmesh_testing.reuse import a_profile, a_prompt, hashes, serve

INSTANCE = InstanceId("m0")


def a_key(number: int) -> SessionKey:
    return SessionKey(number.to_bytes(16, "big"))


def a_bench(num_blocks: int = 64) -> CoreBench:
    config = CoreConfig(policy=PolicyConfig(chunk_tokens=4096), plans_in_flight=1, max_queue_s=25.0)
    return CoreBench(config=config) if not num_blocks else CoreBench(a_profile("m0", num_blocks), config=config)


class Served:
    """The cache of an instance and its users, as turns on a scheduler's bench leave them."""

    def __init__(self) -> None:
        self.bench = a_bench()
        self.cache = BlockCache(GRANULE_TOKENS)
        self.uses = UseLog()

    def turn(self, request: Request) -> None:
        """Serve a request, and note its end as a worker does."""
        for admit in of(AdmitPrefill, self.bench.feed(RequestArrived(request))):
            user = self.bench.core.user_of((admit.request_id, admit.epoch))
            prefix = CachedPrefix(request.chain)
            self.cache.make_room(admit.room)
            self.cache.share(prefix, admit.num_reused_granules)
            self.cache.computed(prefix, len(request.chain))
            self.cache.end(prefix, ())
            self.uses.ended(user, request.chain, request.num_prompt_tokens, self.bench.now_s)
        (plan,) = self.bench.core._mesh.instances[INSTANCE].plans.values()
        self.bench.done("m0", plan)
        self.bench.finish("m0", request.request_id)
        self.bench.released("m0", request.request_id)

    def registration(self, *residents: Resident, is_told: bool = True) -> InstanceJoined:
        kept = self.cache.granules
        uses = self.uses.report(kept, self.bench.now_s) if is_told else NO_USES
        return InstanceJoined(a_profile("m0"), residents, kept=kept, jumps=self.cache.jumps, uses=uses)

    def next_scheduler(self, *, is_told: bool = True, now_s: float = 0.0) -> CoreBench:
        """Return another scheduler's bench after the instance registered there; its clock has nothing in common."""
        bench = a_bench(0)
        bench.feed(self.registration(is_told=is_told), now_s)
        return bench


def a_turn(
    request_id: str, num_granules: int, *, name: int, tenant: str = "", session: int | None = None, lease_s: float = 0.0
) -> Request:
    prompt = a_prompt(request_id, num_granules * GRANULE_TOKENS + 1, name=name)
    named = None if session is None else SessionName(a_key(session), lease_s=lease_s)
    return replace(prompt, tenant=tenant, session=named)


def fill(bench: CoreBench, tenant: str, number: int = 8) -> None:
    """Send prompts that fill the cache more than once."""
    for each in range(100, 100 + number):
        serve(bench, a_turn(f"fill-{each}", 4, name=each, tenant=tenant))


def num_cached(bench: CoreBench, name: int, num_granules: int) -> int:
    return bench.core._mesh.instances[INSTANCE].kept.depth(hashes(num_granules, name), num_granules)


@pytest.mark.parametrize(("is_told", "left"), [(True, 5), (False, 0)])
def test_a_tenant_keeps_its_share_of_the_cache(is_told: bool, left: int) -> None:
    served = Served()
    served.turn(a_turn("quiet", 5, name=1, tenant="quiet"))
    bench = served.next_scheduler(is_told=is_told)
    fill(bench, "loud")
    assert num_cached(bench, 1, 5) == left


def test_a_chain_of_one_tenant_outlives_no_beginning_that_another_one_used_last() -> None:
    served = Served()
    served.turn(a_turn("long", 6, name=1, tenant="quiet"))
    served.turn(a_turn("beginning", 3, name=1, tenant="loud"))
    bench = served.next_scheduler()
    for each in range(100, 130):
        serve(bench, a_turn(f"r{each}", 4, name=each, tenant="loud"))
        kept = bench.core._mesh.instances[INSTANCE].kept
        is_kept = [granule in kept for granule in hashes(6, 1)]
        assert is_kept == sorted(is_kept, reverse=True)


@pytest.mark.parametrize(("is_told", "left"), [(True, 5), (False, 0)])
def test_a_lease_lasts_as_long_as_it_would_have(is_told: bool, left: int) -> None:
    served = Served()
    served.turn(a_turn("leased", 5, name=1, session=1, lease_s=400.0))
    served.bench.now_s = 350.0
    bench = served.next_scheduler(is_told=is_told)
    bench.now_s = 49.0
    fill(bench, "")
    assert num_cached(bench, 1, 5) == left
    bench.now_s = 51.0
    serve(bench, a_turn("other", 1, name=99))
    fill(bench, "")
    assert num_cached(bench, 1, 5) == 0
    assert served.bench.now_s > IDLE_S
    assert bench.core.sessions.find(a_key(1)) is None


def test_sessions_keep_their_turns_pauses_and_room() -> None:
    """Three sessions fill the room. A fourth, which is new, waits at the next scheduler, too."""
    served = Served()
    for number in range(4):
        for session in (1, 2, 3):
            served.bench.now_s += 1.0
            served.turn(a_turn(f"r{number}{session}", 5, name=session, session=session))
    bench = served.next_scheduler(now_s=3.0)
    sessions = bench.core.sessions
    for each in sessions.all:
        before = served.bench.core.sessions.find(each.key)
        assert before is not None
        assert (each.num_turns, each.num_prompt_tokens, each.depth) == (4, 5 * GRANULE_TOKENS + 1, 5)
        assert each.pause_s == pytest.approx(before.pause_s)
        assert sessions.now_s - each.since_s == served.bench.now_s - before.since_s
        assert each.member is not None
        assert each.member.chain == hashes(5, int.from_bytes(each.key, "big"))
    assert len(sessions) == 3
    bench.feed(RequestArrived(replace(a_turn("new", 5, name=4, session=4), arrival_s=3.0)))
    assert sessions.num_by_state()[SessionState.ASIDE] == 1
    assert serve(bench, a_turn("next", 5, name=2, session=2)).num_reused_granules == 5


def a_report(instance: str, turn: int, num_kept: int, ago_s: float, *, num_granules: int = 7) -> InstanceJoined:
    """Return a registration after a turn of session 1, of whose prompt ``num_kept`` granules are cached."""
    user = CacheUser("", session=a_key(1), num_turns=turn, lease_s=3600.0)
    log, kept = UseLog(), hashes(num_kept)[::-1]
    log.ended(user, kept, num_granules * GRANULE_TOKENS + 1, 0.0)
    jumps = ((num_kept - 1, NO_GRANULE),)
    return InstanceJoined(a_profile(instance), (), kept=kept, jumps=jumps, uses=log.report(kept, ago_s))


@pytest.mark.parametrize("ago_s", [10.0, 10.0 + IDLE_S])
@pytest.mark.parametrize(("turn", "num_kept", "more_s"), [(1, 4, 50.0), (2, 2, -1.0)], ids=["earlier", "evicted"])
@pytest.mark.parametrize("is_first", [True, False])
def test_the_last_turn_counts_whichever_instance_registers_first(
    is_first: bool, turn: int, num_kept: int, more_s: float, ago_s: float
) -> None:
    """The other instance has an earlier turn, or less of the last prompt. After `IDLE_S` only the lease counts."""
    bench = a_bench(0)
    last = a_report("m0", 2, 7, ago_s)
    other = a_report("m1", turn, num_kept, ago_s + more_s, num_granules=4 if turn == 1 else 7)
    for joined in (other, last) if is_first else (last, other):
        bench.feed(joined, 1000.0)
    assert bench.core._mesh.cache_index.leased == dict.fromkeys(hashes(7), 1)
    session = bench.core.sessions.find(a_key(1))
    if session is None:
        assert ago_s > IDLE_S
        return
    assert session.member is not None
    assert (session.num_turns, session.depth, session.tail) == (2, 7, hashes(7)[-1])
    assert session.since_s == 1000.0 - ago_s - (turn == 2) * (more_s if is_first else 0.0)
    assert (session.member.num_context_tokens, session.member.chain) == (7 * GRANULE_TOKENS + 1, hashes(7))


def test_a_turn_counts_that_does_not_continue_the_answer_before() -> None:
    """The granules of the first answer, which the second prompt leaves out, have the first turn as their last use."""
    answer, prompt = PrefixHash(b"answer".ljust(16)), hashes(6)
    cache, uses = BlockCache(GRANULE_TOKENS), UseLog()
    for turn, chain, drawn in ((1, prompt[:4], (answer,)), (2, prompt, ())):
        prefix = CachedPrefix(chain)
        cache.share(prefix, 4 if turn == 2 else 0)
        cache.computed(prefix, len(chain))
        cache.end(prefix, drawn)
        user = CacheUser("", session=a_key(1), num_turns=turn)
        uses.ended(user, (*chain, *drawn), len(chain) * GRANULE_TOKENS + 1, turn * 100.0 - 100.0)
    joined = InstanceJoined(a_profile("m0"), (), kept=cache.granules, jumps=cache.jumps)
    bench = a_bench(0)
    bench.feed(replace(joined, uses=uses.report(cache.granules, 110.0)), 1000.0)
    session = bench.core.sessions.find(a_key(1))
    assert session is not None
    assert session.member is not None
    assert (session.num_turns, session.depth, session.tail, session.since_s) == (2, 6, prompt[-1], 990.0)
    assert (session.member.num_context_tokens, session.member.chain) == (6 * GRANULE_TOKENS + 1, prompt)


def test_a_turn_that_ended_here_counts_more_than_an_earlier_one_elsewhere() -> None:
    bench = a_bench()
    serve(bench, a_turn("r", 3, name=1, session=1))
    bench.feed(a_report("m1", 7, 5, 50.0), 20.0)
    session = bench.core.sessions.find(a_key(1))
    assert session is not None
    assert (session.num_turns, session.depth, session.tail) == (7, 3, hashes(3, 1)[-1])
    assert session.member is not None
    assert session.member.chain == hashes(3, 1)


def test_a_wait_goes_on_and_is_the_longest() -> None:
    """A turn that waited at the last scheduler comes after the registration and after a new one."""
    served = Served()
    for number in range(2):
        for session in (1, 2, 3):
            served.turn(a_turn(f"r{number}{session}", 5, name=session, session=session))
    bench = served.next_scheduler()
    for name, waited_s in ((8, 0.0), (9, 80.0)):
        turn = a_turn(f"r{name}", 5, name=name, session=name)
        bench.feed(RequestArrived(replace(turn, arrival_s=bench.now_s - waited_s)))
    waiting = bench.core._mesh.queue.turns_aside.values()
    assert [(state.request.request_id, since_s) for state, since_s in waiting] == [("r9", -80.0), ("r8", 0.0)]
    bench.feed(Tick(), 20.0)
    assert bench.core.sessions.working_set.longest_aside_s == 100.0


def a_resident(user: CacheUser) -> Resident:
    return Resident(
        request_id=RequestId("r"),
        epoch=Epoch(0),
        gateway_id=GATEWAY,
        num_blocks=24,
        num_context_tokens=700,
        decoding=True,
        max_total_tokens=768,
        granules=hashes(5),
        user=user,
    )


def a_registration(resident: Resident) -> InstanceJoined:
    return InstanceJoined(a_profile("m0"), (resident,), kept=hashes(5)[::-1], jumps=((4, NO_GRANULE),))


@pytest.mark.parametrize("is_first", [True, False])
def test_a_running_turn_keeps_its_session_tenant_and_lease(is_first: bool) -> None:
    """Whether the instance registers first, or the gateway."""
    resident = a_resident(CacheUser("quiet", 2, a_key(1), a_key(7), 5, 2.5, 0, 60.0))
    bench, joined = a_bench(0), a_registration(resident)
    events: list[Event] = [joined, GatewayJoined(GATEWAY, ((resident.request_id, resident.epoch),))]
    for event in events if is_first else reversed(events):
        bench.feed(event)
    session = bench.core.sessions.find(a_key(1))
    assert session is not None
    assert (session.state, session.num_turns) == (SessionState.TURN, 5)
    assert session.pause_s == pytest.approx(2.5)
    assert bench.core.user_of((resident.request_id, resident.epoch)) == resident.user
    bench.finish("m0", "r")
    bench.released("m0", "r")
    assert (session.state, session.depth) == (SessionState.BETWEEN, 5)
    fill(bench, "loud")
    assert num_cached(bench, 0, 5) == 5
    bench.now_s = 61.0
    fill(bench, "quiet")
    assert num_cached(bench, 0, 5) == 0


@pytest.mark.parametrize("is_first", [True, False])
def test_a_running_turn_counts_once_if_its_gateway_submits_it_again(is_first: bool) -> None:
    """A gateway submits a request again if no token of its answer came. It may come before the instance registers."""
    joined = a_registration(a_resident(CacheUser("t", 1, a_key(1), None, 5, 20.0)))
    turn = replace(a_prompt("r", 690, output=70), tenant="t", session=SessionName(a_key(1)))
    bench = a_bench(0)
    events: list[Event] = [joined, RequestArrived(turn)]
    for event, now_s in zip(events if is_first else reversed(events), (100.0, 100.1), strict=True):
        bench.feed(event, now_s)
    session = bench.core.sessions.find(a_key(1))
    assert session is not None
    assert (session.state, session.num_turns) == (SessionState.TURN, 5)
    assert session.pause_s == pytest.approx(20.0)


@pytest.mark.parametrize("seed", range(10))
def test_reports_survive_the_wire_and_name_each_granules_last_user(seed: int) -> None:
    rng = random.Random(seed)
    kept = list(hashes(40))
    uses, expected = UseLog(), dict[PrefixHash, CacheUser]()
    for number in range(30):
        user = CacheUser(f"t{number % 3}", 1, a_key(number) if number % 2 else None, num_turns=number)
        granules = rng.sample(kept, rng.randint(1, 8))
        uses.ended(user, granules, 500, float(number))
        expected |= dict.fromkeys(granules, user)
        uses.ended(None, kept, 500, float(number))
    told = rng.sample(kept, 30)
    report = uses.report(told, 100.0)
    registered = RegisterWorker(profile=a_profile("m0"), residents=(), kept=tuple(told), uses=report)
    got = msgspec.msgpack.decode(msgspec.msgpack.encode(registered), type=RegisterWorker)
    back = last_uses(len(told), got.uses)
    assert [None if use is None else use.user for use in back] == [expected.get(granule) for granule in told]
    uses.forget(set(told[:2]), 2)
    assert len(uses) <= 40
    uses.ended(CacheUser("t"), hashes(100, 9), 1, 0.0)
    uses.forget(set(told[:2]), 2)
    assert len(uses) <= 2


@pytest.mark.parametrize("seed", range(20))
def test_wrong_reports_do_no_harm(seed: int) -> None:
    """Numbers out of range, and more turns and longer pauses than there can be."""
    rng = random.Random(seed)
    bench = a_bench(0)
    for number in range(6):
        first, second = rng.randint(1, 8), rng.randint(1, 8)
        kept = (*hashes(first)[::-1], *hashes(second, 1)[::-1])
        uses = [
            LastUse(
                CacheUser(
                    f"t{tenant}",
                    rng.randint(1, 3),
                    rng.choice([None, a_key(tenant), a_key(10 + tenant)]),
                    rng.choice([None, a_key(tenant)]),
                    rng.choice([0, 1, 1 << 60]),
                    rng.choice([None, 0.0, 1e300]),
                    rng.choice([0, 1 << 60]),
                    rng.choice([0.0, 3600.0]),
                ),
                rng.choice([0, 1, 1 << 24]),
                rng.choice([0.0, 1.0, 1e300]),
            )
            for tenant in rng.choices(range(3), k=rng.randrange(12))
        ]
        jumps = ((first - 1, NO_GRANULE), (len(kept) - 1, NO_GRANULE))
        runs = tuple((rng.randrange(-3, 40), rng.randrange(-3, 15)) for _ in range(rng.randrange(20)))
        joined = InstanceJoined(a_profile(f"m{number % 2}"), (), kept=kept, jumps=jumps)
        bench.feed(replace(joined, uses=(tuple(uses), runs)), bench.now_s + rng.choice([0.0, 10.0, 400.0]))
        for each in range(4):
            name = rng.randrange(3)
            request = a_turn(f"r{number}{each}", rng.randint(1, 6), name=name, session=name, tenant=f"t{name}")
            bench.feed(RequestArrived(replace(request, arrival_s=bench.now_s)))


def test_chains_of_all_sessions_are_bounded() -> None:
    chains = KeptChains(hashes(50)[::-1], ((49, NO_GRANULE),))
    users = [CacheUser("", 1, a_key(number), num_turns=2) for number in range(50)]
    uses = [LastUse(user, 50 * GRANULE_TOKENS + 1, 60.0 - number) for number, user in enumerate(users)]
    found = last_turns(chains, uses, 120)
    assert [use for use, _ in found] == uses
    assert [len(chain) for _, chain in found] == [0] * 35 + list(range(15, 0, -1)), "the newest uses have chains"
