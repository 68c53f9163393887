"""Sessions in the core: opened by names, bounded, ended and forgotten; and no command depends on them."""

from __future__ import annotations

import random
import tracemalloc
from dataclasses import replace
from itertools import islice

import pytest

from pdmesh.core.commands import RunStep
from pdmesh.core.config import CoreConfig
from pdmesh.core.events import RequestArrived, SessionEnded
from pdmesh.core.sessions import sessions as module
from pdmesh.core.sessions import working_set
from pdmesh.core.sessions.session_state import Session, SessionState
from pdmesh.core.sessions.sessions import IDLE_S, MAX_CHILDREN, MAX_GENERATIONS, MAX_SESSIONS, Sessions
from pdmesh.kv_layout import GRANULE_TOKENS
from pdmesh.model import CacheUser, Epoch, LastUse, PrefixHash, Request, SessionKey, SessionName
from pdmesh.policy.config import PolicyConfig
from pdmesh_testing.core import CoreBench, a_request, of
from pdmesh_testing.reuse import a_profile, a_prompt, hashes, serve


def a_key(number: int) -> SessionKey:
    return SessionKey(number.to_bytes(16, "big"))


def a_bench() -> CoreBench:
    return CoreBench(a_profile("m0"), config=CoreConfig(policy=PolicyConfig(chunk_tokens=4096), plans_in_flight=1))


def named(request: Request, number: int = 1, parent: int | None = None, **more: bool) -> Request:
    above = None if parent is None else a_key(parent)
    return replace(request, session=SessionName(key=a_key(number), parent=above, **more))


def a_turn(sessions: Sessions, number: int, at_s: float, *, tenant: str = "", parent: int | None = None) -> None:
    """A request of a session comes and ends at once."""
    sessions.now_s = at_s
    request = replace(named(a_request(f"r{number}"), number, parent), tenant=tenant)
    session = sessions.begin(request)
    if session is not None:
        sessions.end(session, request, 0)
    sessions.check_integrity()


def test_a_session_is_in_a_turn_while_a_request_runs_and_counts_what_was_reused() -> None:
    bench = a_bench()
    sessions = bench.core.sessions
    (step,) = of(RunStep, bench.feed(RequestArrived(named(a_prompt("first", 1000)))))
    session = sessions.find(a_key(1))
    assert session is not None
    states = [session.state]
    bench.done("m0", step.plan)
    bench.finish("m0", "first")
    bench.released("m0", "first")
    states.append(session.state)
    assert states == [SessionState.TURN, SessionState.BETWEEN]
    serve(bench, named(a_prompt("second", 1100)))
    serve(bench, named(a_prompt("third", 1300)))
    assert (session.num_turns, session.num_prompt_tokens) == (3, 1300)
    assert (session.num_reused_tokens, session.num_possible_tokens) == (15 * 128, 15 * 128)
    assert bench.core.holders_of(session) == ["m0"]
    assert sessions.num_possible_tokens == session.num_possible_tokens


def test_requests_without_names_open_no_session() -> None:
    bench = a_bench()
    serve(bench, a_prompt("first", 1000))
    assert not len(bench.core.sessions)


def test_a_request_that_starts_again_is_one_turn() -> None:
    sessions = Sessions()
    request = named(a_request("a"))
    session = sessions.begin(request)
    assert session is not None
    sessions.end(session, request, None)
    sessions.begin(replace(request, epoch=Epoch(1)))
    assert (session.num_turns, session.num_live) == (1, 1)


def test_a_session_ends_when_its_client_says_so_and_a_request_opens_it_again() -> None:
    bench = a_bench()
    serve(bench, named(a_prompt("first", 200), is_last=True))
    states: list[SessionState] = []
    session = bench.core.sessions.find(a_key(1))
    assert session is not None
    states.append(session.state)
    serve(bench, named(a_prompt("second", 200)))
    states.append(session.state)
    bench.feed(SessionEnded(a_key(1)))
    states.append(session.state)
    assert states == [SessionState.ENDED, SessionState.BETWEEN, SessionState.ENDED]
    bench.feed(SessionEnded(a_key(2)))
    assert bench.core.ignored["SessionEnded"] == 1


def test_a_session_is_forgotten_after_it_was_idle() -> None:
    sessions = Sessions()
    a_turn(sessions, 1, 0.0)
    a_turn(sessions, 2, IDLE_S - 1.0)
    assert len(sessions) == 2
    a_turn(sessions, 3, IDLE_S)
    assert sessions.find(a_key(1)) is None
    assert len(sessions) == 2


def test_a_forgotten_parent_keeps_no_ancestors_in_memory() -> None:
    sessions = Sessions()
    a_turn(sessions, 1, 0.0)
    a_turn(sessions, 2, 1.0, parent=1)
    a_turn(sessions, 3, IDLE_S - 1.0, parent=2)
    a_turn(sessions, 4, IDLE_S + 2.0)
    child = sessions.find(a_key(3))
    assert child is not None
    assert child.parent is not None
    assert (child.parent.key, child.parent.parent) == (a_key(2), None)


def test_pauses_are_learnt_and_a_late_session_is_expected_later() -> None:
    sessions = Sessions()
    at_s = 0.0
    for pause_s in (1.0, 30.0, 10.0, 12.0):
        a_turn(sessions, 1, at_s)
        at_s += pause_s
    a_turn(sessions, 1, at_s)
    session = sessions.find(a_key(1))
    assert session is not None
    assert session.pause_s is not None
    assert 5.0 < session.pause_s < 15.0
    assert sessions.return_s(session) == at_s + session.pause_s
    sessions.now_s = at_s + 40.0
    assert sessions.return_s(session) == pytest.approx(at_s + 80.0 - session.pause_s)
    assert 1.0 < sessions.usual_pause_s < 30.0


def test_prefixes_are_sorted_by_the_expected_return_of_their_sessions() -> None:
    """The last one is needed first: of a session that returns each second, then one without a session."""
    sessions = Sessions()
    for name, pause_s in ((1, 1.0), (2, 20.0), (3, 1.0)):
        for turn in range(5):
            sessions.now_s = 80.0 - (4 - turn) * pause_s
            request = named(a_prompt(f"r{name}", 600, name=name), name)
            session = sessions.begin(request)
            assert session is not None
            sessions.end(session, request, 0)
    sessions.close(a_key(3))
    prefixes = [hashes(7, name) for name in (4, 3, 2, 1)]
    assert [prefix[0][0] for prefix in sessions.latest_return_first(prefixes)] == [3, 2, 4, 1]
    assert Sessions().latest_return_first(prefixes) == prefixes


def test_a_parent_waits_for_its_children() -> None:
    sessions = Sessions()
    a_turn(sessions, 1, 0.0)
    child = named(a_request("c"), 2, 1)
    opened = sessions.begin(child)
    parent = sessions.find(a_key(1))
    assert opened is not None
    assert parent is not None
    assert (parent.state, opened.parent, parent.num_children) == (SessionState.CHILDREN, parent, 1)
    sessions.end(opened, child, 0)
    assert parent.state is SessionState.BETWEEN


def test_children_and_generations_are_bounded() -> None:
    sessions = Sessions()
    a_turn(sessions, 0, 0.0)
    for number in range(1, MAX_CHILDREN + 10):
        a_turn(sessions, number, 0.0, parent=0)
    top = sessions.find(a_key(0))
    assert top is not None
    assert top.num_children == MAX_CHILDREN
    for number in range(1000, 1020):
        a_turn(sessions, number, 0.0, parent=number - 1 if number > 1000 else None)
    assert max(session.generation for session in sessions.all) == MAX_GENERATIONS


def test_a_tenant_with_new_names_pushes_out_its_own_sessions_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_OF_TENANT", 10)
    sessions = Sessions()
    a_turn(sessions, 1, 0.0, tenant="good")
    for number in range(100, 200):
        a_turn(sessions, number, 1.0, tenant="hostile")
    assert len(sessions) == 11
    assert sessions.find(a_key(1)) is not None
    assert sessions.find(a_key(199)) is not None
    assert sessions.find(a_key(199), "good") is None


def test_where_there_is_no_room_the_tenant_with_the_most_loses_its_longest_idle(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "MAX_SESSIONS", 5)
    sessions = Sessions()
    for number in range(4):
        a_turn(sessions, number, float(number), tenant="many")
    for number in (10, 11, 12):
        a_turn(sessions, number, 10.0, tenant="few")
    assert {session.key for session in sessions.all} == {a_key(number) for number in (2, 3, 10, 11, 12)}


def test_live_sessions_are_never_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond the limit a request is served without a session."""
    monkeypatch.setattr(module, "MAX_OF_TENANT", 2)
    sessions = Sessions()
    opened = [sessions.begin(named(a_request(f"r{number}"), number)) for number in range(3)]
    assert [each is not None for each in opened] == [True, True, False]
    sessions.now_s = 10 * IDLE_S
    sessions.expire()
    assert len(sessions) == 2
    sessions.check_integrity()


def test_more_sessions_may_be_learnt_than_there_is_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each session is its tenant's only one."""
    monkeypatch.setattr(module, "MAX_SESSIONS", 4)
    sessions = Sessions()
    users = [CacheUser(f"t{number}", session=a_key(number), num_turns=1) for number in range(6)]
    sessions.learn([(LastUse(user, 200, 1.0), ()) for user in users])
    sessions.check_integrity()
    assert {session.tenant for session in sessions.all} == {"t2", "t3", "t4", "t5"}


def test_any_order_of_requests_leaves_the_indexes_right() -> None:
    rng, sessions = random.Random(0), Sessions()
    live: list[tuple[object, Request]] = []
    for index in range(3000):
        sessions.now_s += rng.expovariate(0.2)
        if live and rng.random() < 0.5:
            session, request = live.pop(rng.randrange(len(live)))
            sessions.end(session, request, rng.choice((None, 0)))  # type: ignore[arg-type]
        else:
            parent = rng.choice((None, rng.randrange(40)))
            name = named(a_request(f"r{index}"), rng.randrange(40), parent, is_last=rng.random() < 0.3)
            request = replace(name, tenant=str(rng.randrange(3)))
            if (session := sessions.begin(request)) is not None:
                live.append((session, request))
        if rng.random() < 0.2:
            sessions.close(a_key(rng.randrange(40)))
        sessions.check_integrity()


def test_the_newest_sessions_are_found_without_a_look_at_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    sessions, looked = Sessions(), list[Session]()
    for number in range(200):
        a_turn(sessions, number, float(number), tenant=f"t{number % 2}")
    sessions.begin(replace(named(a_request("live"), 4), tenant="t0"))

    def since_s(session: Session) -> float:
        looked.append(session)
        return session.since_s

    monkeypatch.setattr(module, "_since_s", since_s)
    newest = {name: [session.key for session in islice(sessions.newest(name), 3)] for name in (None, "t0", "t2")}
    assert newest == {
        None: [a_key(4), a_key(199), a_key(198)],
        "t0": [a_key(4), a_key(198), a_key(196)],
        "t2": [],
    }
    assert len(looked) < 20


@pytest.mark.parametrize("most", [8_192, pytest.param(MAX_SESSIONS, marks=pytest.mark.slow)])
def test_a_session_takes_at_most_512_bytes(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """So all take 32 MiB, also with chains of 4 to 14 granules, and after others were forgotten for them."""
    monkeypatch.setattr(module, "MAX_SESSIONS", most)
    monkeypatch.setattr(working_set, "MAX_MEMBERS", most // 32)
    nameless = a_request("r")
    tracemalloc.start()
    sessions = Sessions()
    for number in range(most + most // 8):
        key = a_key(number)
        for num_granules in (number % 10 + 4, number % 10 + 5):
            request = replace(
                nameless,
                num_prompt_tokens=num_granules * GRANULE_TOKENS + 1,
                prefix=tuple([PrefixHash(bytes([num_granules, index]) + key[2:]) for index in range(num_granules)]),
                session=SessionName(key),
                tenant="".join(["tenant ", str(number % 32)]),
            )
            session = sessions.begin(request)
            assert session is not None
            sessions.end(session, request, 300)
            sessions.now_s += 1e-4
        del session, request
    num_bytes, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(sessions) == most
    assert num_bytes <= 512 * most
