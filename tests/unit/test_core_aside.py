"""Sessions that wait as a whole while the contexts of all exceed the room for KV."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pdmesh.core.admission import aside
from pdmesh.core.admission.aside import IDLE_S, NUM_WAITS
from pdmesh.core.commands import AdmitPrefill, RunStep, WakeAt
from pdmesh.core.config import CoreConfig
from pdmesh.core.events import InstanceLost, RequestArrived, RequestCancelled, SessionEnded, Tick
from pdmesh.core.instances.idle import IdleGranules
from pdmesh.core.sessions import working_set as module
from pdmesh.core.sessions.session_state import Session, SessionState
from pdmesh.core.sessions.sessions import Sessions
from pdmesh.core.sessions.working_set import RECENT_S, RETURNS_ASSUMED
from pdmesh.model import Epoch, InstanceId, Request, SessionKey, SessionName
from pdmesh.policy.config import PolicyConfig
from pdmesh_testing.core import GATEWAY, CoreBench, a_request, of
from pdmesh_testing.reuse import a_profile, a_prompt, hashes

MOST_S = 100.0

#: 2,048 tokens of KV: three contexts of five granules, and little more.
CONTEXT = 640


def a_key(number: int) -> SessionKey:
    return SessionKey(number.to_bytes(16, "big"))


class Mesh(CoreBench):
    """One instance that computes and ends each prompt as soon as it may."""

    def __init__(self) -> None:
        config = CoreConfig(policy=PolicyConfig(chunk_tokens=4096), plans_in_flight=1, max_queue_s=MOST_S / NUM_WAITS)
        super().__init__(a_profile("m0"), config=config)
        self.num_turns = 0
        self.num_cached: dict[str, int] = {}

    def turn(self, session: int, num_tokens: int = CONTEXT, *, at_s: float | None = None, tenant: str = "") -> str:
        """Let a turn of a session come, and return its id. `num_cached` has it once it was answered."""
        self.num_turns += 1
        request_id = f"r{self.num_turns}"
        prompt = a_prompt(request_id, num_tokens, name=session)
        name = SessionName(key=a_key(session)) if session else None
        self.serve(replace(prompt, arrival_s=self.now_s, session=name, tenant=tenant), at_s)
        return request_id

    def serve(self, event: Request | Tick | SessionEnded | RequestCancelled, at_s: float | None = None) -> None:
        commands = self.feed(RequestArrived(event) if isinstance(event, Request) else event, at_s)
        while commands:
            for admit in of(AdmitPrefill, commands):
                self.num_cached[admit.request_id] = admit.num_reused_granules
            steps = of(RunStep, commands)
            commands = []
            for step in steps:
                commands += self.done(step.instance_id, step.plan)
                for chunk in step.plan.chunks:
                    commands += self.finish(step.instance_id, chunk.request_id, chunk.epoch)
                    commands += self.released(step.instance_id, chunk.request_id, chunk.epoch)

    def session(self, number: int) -> Session:
        session = self.core.sessions.find(a_key(number))
        assert session is not None
        return session


def a_full_mesh() -> Mesh:
    """Three sessions with two turns each fill the room."""
    mesh = Mesh()
    for session in (1, 2, 3, 1, 2, 3):
        mesh.turn(session)
    assert set(mesh.num_cached) == {f"r{number}" for number in range(1, 7)}
    return mesh


def test_a_new_session_waits_and_the_others_keep_their_kv() -> None:
    mesh = a_full_mesh()
    fourth = mesh.turn(4)
    assert mesh.session(4).state is SessionState.ASIDE
    again = [mesh.turn(session) for session in (1, 2, 3)]
    assert [mesh.num_cached[turn] for turn in again] == [4, 4, 4]
    assert fourth not in mesh.num_cached
    mesh.serve(SessionEnded(a_key(2)))
    assert mesh.num_cached[fourth] == 0


def test_a_turn_waits_no_longer_than_the_limit_and_is_served_then() -> None:
    mesh = a_full_mesh()
    fourth = mesh.turn(4)
    for at_s in range(4, 100, 4):
        for session in (1, 2, 3):
            mesh.turn(session, at_s=float(at_s))
    assert fourth not in mesh.num_cached
    mesh.serve(Tick(), MOST_S - 0.5)
    assert fourth not in mesh.num_cached
    mesh.serve(Tick(), MOST_S)
    assert mesh.num_cached[fourth] == 0
    assert mesh.core.sessions.working_set.longest_aside_s == MOST_S
    assert not mesh.core._mesh.queue.turns_aside


def test_a_turn_goes_on_once_no_session_uses_the_mesh() -> None:
    mesh = a_full_mesh()
    turns = [mesh.turn(session) for session in (4, 5)]
    mesh.serve(Tick(), IDLE_S - 0.5)
    assert not set(turns) & set(mesh.num_cached)
    mesh.serve(Tick(), IDLE_S)
    assert set(turns) & set(mesh.num_cached) == {turns[0]}
    mesh.serve(Tick(), 2 * IDLE_S)
    assert set(turns) <= set(mesh.num_cached)


def test_room_is_divided_after_a_while_beside_many_sessions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aside, "MEMBERS_AT_ONCE", 3)
    monkeypatch.setattr(aside, "DIVIDE_S_PER_MEMBER", 0.5)
    mesh = a_full_mesh()
    fourth = mesh.turn(4)
    assert mesh.num_cached[mesh.turn(1)] == 4, "a session with room need not wait for the next division"
    mesh.serve(SessionEnded(a_key(2)), 0.25)
    assert fourth not in mesh.num_cached
    assert of(WakeAt, mesh.commands)[-1].at_s == 0.5
    mesh.serve(Tick(), 0.5)
    assert fourth in mesh.num_cached


def test_a_context_beyond_all_room_never_waits() -> None:
    mesh = a_full_mesh()
    assert mesh.turn(4, 3 * CONTEXT + 60) in mesh.num_cached


def test_room_that_no_tenant_fills_goes_to_a_context_beyond_its_tenants_share() -> None:
    mesh = Mesh()
    for session in (1, 1, 2, 2):
        mesh.turn(session, 1100 if session == 1 else 1000, tenant=f"t{session}")
    mesh.serve(Tick(), IDLE_S)
    turn = mesh.turn(1, 1100, tenant="t1", at_s=RECENT_S + IDLE_S)
    assert turn in mesh.num_cached


def test_sessions_that_vanish_lose_their_protection() -> None:
    mesh = a_full_mesh()
    mesh.turn(1, CONTEXT + 400)
    assert mesh.core._mesh.cache_index.protected
    mesh.serve(Tick(), RECENT_S)
    mesh.serve(Tick(), 2 * RECENT_S)
    assert not mesh.core._mesh.cache_index.protected


def test_a_parent_keeps_its_room_while_a_child_works() -> None:
    mesh = a_full_mesh()
    name = SessionName(key=a_key(4), parent=a_key(1))
    for turn, at_s in enumerate((20.0, 40.0, 60.0)):
        mesh.serve(replace(a_prompt(f"child{turn}", CONTEXT, name=1), session=name, arrival_s=at_s), at_s)
    mesh.turn(2, at_s=RECENT_S + 30.0)
    assert mesh.session(1).member is not None
    assert mesh.session(3).member is None


def test_a_turn_that_was_never_answered_takes_no_room() -> None:
    mesh = Mesh()
    for turn in range(2):
        request = replace(a_prompt(f"r{turn}", CONTEXT), session=SessionName(key=a_key(1)))
        mesh.feed(RequestArrived(request))
        mesh.feed(RequestCancelled(GATEWAY, request.request_id, Epoch(0)))
    assert mesh.core.sessions.working_set.num_tokens == 0


def test_of_sessions_that_grow_the_youngest_waits() -> None:
    mesh = a_full_mesh()
    mesh.turn(1, CONTEXT + 128)
    first, third = mesh.turn(2), mesh.turn(3)
    assert mesh.num_cached[first] == 4
    assert third not in mesh.num_cached
    assert mesh.session(3).state is SessionState.ASIDE
    mesh.turn(1, CONTEXT)
    assert third in mesh.num_cached


def test_a_session_that_waited_to_the_limit_keeps_its_room_for_its_next_turns() -> None:
    mesh = a_full_mesh()
    mesh.turn(1, CONTEXT + 128)
    third = mesh.turn(3)
    for at_s in range(4, 100, 4):
        for session, num_tokens in ((1, CONTEXT + 128), (2, CONTEXT)):
            mesh.turn(session, num_tokens, at_s=float(at_s))
    assert third in mesh.num_cached
    second = mesh.turn(2, at_s=97.0)
    next_third = mesh.turn(3, at_s=98.0)
    assert mesh.num_cached[next_third] == 4
    assert second not in mesh.num_cached
    assert mesh.core.sessions.working_set.longest_aside_s < MOST_S


@pytest.mark.parametrize("more", [{"slo_ttft_s": 2.0}, {"epoch": Epoch(1)}, {"session": None}])
def test_some_turns_never_wait(more: dict[str, object]) -> None:
    mesh = a_full_mesh()
    name = SessionName(key=a_key(4))
    mesh.serve(replace(replace(a_prompt("r", CONTEXT, name=4), session=name), **more))  # type: ignore[arg-type]
    assert "r" in mesh.num_cached


def test_a_new_session_that_continues_anothers_context_does_not_wait() -> None:
    mesh = a_full_mesh()
    mesh.serve(replace(a_prompt("fork", CONTEXT + 128, name=1), session=SessionName(key=a_key(4))))
    assert mesh.num_cached["fork"] == 4


def test_a_child_counts_without_its_inherited_context_until_its_parent_goes_on() -> None:
    mesh = a_full_mesh()
    name = SessionName(key=a_key(4), parent=a_key(1))
    mesh.serve(replace(a_prompt("child", CONTEXT + 1, name=1), session=name))
    assert mesh.num_cached["child"] == 4
    working_set = mesh.core.sessions.working_set
    assert working_set.num_tokens == 3 * CONTEXT + 129
    mesh.turn(1)
    assert mesh.session(4).member is None
    assert working_set.num_tokens == 3 * CONTEXT


def test_a_turn_beside_a_running_one_does_not_wait_but_a_turn_behind_a_waiting_one_does() -> None:
    mesh = a_full_mesh()
    name = SessionName(key=a_key(1))
    mesh.feed(RequestArrived(replace(a_prompt("runs", CONTEXT, name=1), session=name)))
    mesh.turn(1, 3 * CONTEXT)
    assert mesh.session(1).state is SessionState.TURN
    mesh = a_full_mesh()
    mesh.turn(4)
    mesh.turn(4)
    assert len(mesh.core._mesh.queue.turns_aside) == 2


def test_a_turn_that_is_cancelled_while_it_waits_leaves_nothing() -> None:
    mesh = a_full_mesh()
    fourth = mesh.turn(4)
    mesh.serve(RequestCancelled(GATEWAY, a_request(fourth).request_id, Epoch(0)))
    assert not mesh.core._mesh.queue.turns_aside
    assert mesh.session(4).state is SessionState.BETWEEN


def test_turns_go_on_when_no_instance_is_left_that_caches() -> None:
    mesh = a_full_mesh()
    mesh.turn(4)
    mesh.feed(InstanceLost(InstanceId("m0")))
    mesh.serve(Tick(), 1.0)
    assert not mesh.core._mesh.queue.turns_aside


def test_sessions_without_recent_turns_have_no_room() -> None:
    mesh = a_full_mesh()
    mesh.turn(1, at_s=RECENT_S - 3.0)
    fourth = mesh.turn(4, 2 * CONTEXT)
    assert fourth not in mesh.num_cached
    mesh.serve(Tick(), RECENT_S)
    assert fourth in mesh.num_cached


def test_new_names_set_no_session_aside_and_are_not_counted_when_none_returns() -> None:
    mesh = a_full_mesh()
    names = [mesh.turn(number) for number in range(10, 20 + 2 * RETURNS_ASSUMED)]
    again = [mesh.turn(session) for session in (1, 2, 3)]
    assert [mesh.num_cached[turn] for turn in again] == [4, 4, 4]
    assert not set(names) & set(mesh.num_cached)
    for number in (1, 2, 3):
        mesh.serve(SessionEnded(a_key(number)))
    for number in range(1, 100):
        mesh.serve(Tick(), number * 100 * aside.DIVIDE_S_PER_MEMBER)
    assert set(names) <= set(mesh.num_cached)
    other = mesh.turn(4)
    assert other in mesh.num_cached


def test_a_tenant_within_its_share_never_waits_for_another() -> None:
    mesh = Mesh()
    for _ in range(2):
        for session in (1, 2, 3):
            mesh.turn(session, tenant="many")
    mesh.turn(4, tenant="few")
    few = mesh.turn(4, CONTEXT + 128, tenant="few")
    assert few in mesh.num_cached
    third = mesh.turn(3, tenant="many")
    assert third not in mesh.num_cached


def test_the_working_set_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_MEMBERS", 3)
    monkeypatch.setattr(module, "MAX_CHAINED", 10)
    sessions = Sessions()
    for number in range(20):
        request = replace(a_prompt(f"r{number}", CONTEXT, name=number), session=SessionName(key=a_key(number)))
        session = sessions.begin(request)
        assert session is not None
        sessions.end(session, request, 0)
        sessions.check_integrity()
    members = sessions.working_set.members("")
    assert len(members) == 3
    assert sum(len(member.chain) for member in members) <= 10


def test_a_protected_chain_is_evicted_after_others() -> None:
    idle = IdleGranules()
    line = idle.line_of("t", 1)
    for name in (1, 2, 3):
        idle.add_all([(granule, line) for granule in reversed(hashes(4, name))])
    chain = hashes(4, 1)
    idle.spare({chain[-1]: chain}, 2)
    idle.check_integrity("m0")
    assert set(idle.take(8)) == {*hashes(4, 2), *hashes(4, 3)}
    idle.spare({chain[-1]: chain}, 4)
    assert set(idle.take(4)) == set(chain)


def test_all_protected_chains_are_evicted_after_others_however_many_were_used_before_these() -> None:
    idle = IdleGranules()
    line = idle.line_of("t", 1)
    for name in range(9):
        idle.add_all([(granule, line) for granule in reversed(hashes(4, name))])
    protected = {hashes(4, name)[-1]: hashes(4, name) for name in range(8)}
    idle.spare(protected, 4)
    idle.check_integrity("m0")
    assert set(idle.take(4)) == set(hashes(4, 8))
    idle.spare(protected, 4)
    assert set(idle.take(4)) == set(hashes(4, 0))
