"""Agent sessions in a closed loop: pauses, joins, lanes, and the sessions that the core sees."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pdmesh.core.commands import Outcome
from pdmesh.core.scheduler import SchedulerCore
from pdmesh.kv_layout import KvLayout
from pdmesh.metrics import NO_SLO
from pdmesh.model import SessionKey, SessionName
from pdmesh.policy.config import PolicyConfig
from pdmesh_lab.sim.agents import AgentLoop, AgentSession, AgentTurn
from pdmesh_lab.sim.mesh import MeshShape, study_core
from pdmesh_lab.sim.report import report
from pdmesh_lab.sim.result import RequestRun, SimResult
from pdmesh_lab.sim.simulator import SimConfig, Simulator
from pdmesh_lab.sim.workload import Arrival

LAYOUT = KvLayout(num_layers=4, num_kv_heads=2, head_dim=16, block_size=16, dtype="bfloat16")

MAIN = SessionName(SessionKey(bytes(15) + b"\1"))
CHILD = SessionName(SessionKey(bytes(15) + b"\2"), MAIN.key)


def a_turn(
    granules: list[int],
    *,
    after: tuple[int, ...] = (),
    pause_s: float = 0.0,
    at_s: float = 0.0,
    name: SessionName = MAIN,
) -> AgentTurn:
    arrival = Arrival(
        arrival_s=at_s,
        num_prompt_tokens=128 * len(granules) + 10,
        num_output_tokens=20,
        granules=granules,
        session=name,
    )
    return AgentTurn(arrival=arrival, after=after, pause_s=pause_s)


#: A turn, a subagent with two turns, and two turns more. The first of these waits for the subagent.
FAMILY = [
    a_turn([1, 2]),
    a_turn([1, 2, 3], after=(0,), pause_s=2, at_s=4, name=CHILD),
    a_turn([1, 2, 3, 4], after=(1,), pause_s=3, at_s=8, name=CHILD),
    a_turn([1, 2, 5], after=(0, 2), pause_s=1, at_s=10),
    a_turn([1, 2, 5, 6], after=(3,), pause_s=7, at_s=20),
]


def conversation(number: int, num_turns: int = 4, granules: int = 8) -> AgentSession:
    """A session whose prompts grow by some granules each turn, a second after the answer before."""
    name = SessionName(SessionKey(number.to_bytes(16)))
    return [
        a_turn(
            [1000 * number + index for index in range(granules * (turn + 1))],
            after=(turn - 1,) if turn else (),
            pause_s=1.0,
            at_s=2.0 * turn,
            name=name,
        )
        for turn in range(num_turns)
    ]


def simulate(loop: AgentLoop, *, num_kv_tokens: int = 1 << 20) -> tuple[SimResult, SchedulerCore]:
    policy = PolicyConfig()
    core = study_core("pdmesh", policy, 0)
    mesh = MeshShape(num_prefill=0, num_decode=0, num_mixed=1, kv_layout=LAYOUT, num_kv_tokens=num_kv_tokens)
    config = SimConfig(events_between_checks=1)
    result = Simulator(core, mesh.instances(policy.latency), (), config, closed_loop=loop).run()
    assert all(run.outcome is Outcome.FINISHED for run in result.requests)
    return result, core


def end_s(run: RequestRun) -> float:
    return run.token_times_s[-1]


def test_turns_follow_answers_and_parents_wait_for_their_subagents() -> None:
    result, core = simulate(AgentLoop(sessions=[FAMILY], num_lanes=1))
    first, child, grandchild, second, third = result.requests
    assert child.request.arrival_s == pytest.approx(end_s(first) + 2)
    assert grandchild.request.arrival_s == pytest.approx(end_s(child) + 3)
    assert second.request.arrival_s == pytest.approx(end_s(grandchild) + 1)
    assert third.request.arrival_s == pytest.approx(end_s(second) + 7)
    main, sub = core.sessions.find(MAIN.key), core.sessions.find(CHILD.key)
    assert main is not None
    assert sub is not None
    assert (main.num_turns, sub.num_turns) == (3, 2)
    assert sub.parent is main


def test_all_that_is_possible_is_reused_if_there_is_room() -> None:
    result, _ = simulate(AgentLoop(sessions=[FAMILY], num_lanes=1))
    figures = report(result, long_tokens=1 << 30, slo=NO_SLO)
    granules_before = [0, 2, 3, 2, 3]
    num_tokens = sum(turn.arrival.num_prompt_tokens for turn in FAMILY)
    assert figures.possible_share == pytest.approx(128 * sum(granules_before) / num_tokens)
    assert figures.reused_share == figures.possible_share


def test_less_is_reused_if_sessions_need_more_than_the_cache_unless_whole_sessions_wait() -> None:
    named = [conversation(number) for number in range(1, 7)]
    unnamed = [[replace(turn, arrival=replace(turn.arrival, session=None)) for turn in turns] for turns in named]
    shares: list[float] = []
    for sessions in (unnamed, named):
        result, _ = simulate(AgentLoop(sessions=sessions, num_lanes=6), num_kv_tokens=9000)
        figures = report(result, long_tokens=1 << 30, slo=NO_SLO)
        shares.append((figures.reused_share or 0.0) / (figures.possible_share or 1.0))
    assert shares[0] < 0.7
    assert shares[1] > shares[0] + 0.1, shares


def test_a_lane_takes_the_next_session_when_one_has_ended() -> None:
    sessions = [conversation(number, num_turns=number) for number in (2, 3, 4)]
    result, _ = simulate(AgentLoop(sessions=sessions, num_lanes=2))
    runs = {
        number: [run for run in result.requests if run.request.session == sessions[number][0].arrival.session]
        for number in range(3)
    }
    assert [len(runs[number]) for number in range(3)] == [2, 3, 4]
    assert runs[0][0].request.arrival_s == runs[1][0].request.arrival_s == 0
    assert runs[2][0].request.arrival_s == pytest.approx(end_s(runs[0][-1]))


def test_no_turn_begins_after_the_duration_and_first_sessions_begin_anywhere() -> None:
    sessions = [conversation(number, num_turns=30, granules=1) for number in range(1, 9)]
    loop = AgentLoop(sessions=sessions, num_lanes=8, duration_s=10.0, seed=3)
    once, again = (simulate(loop)[0] for _ in range(2))
    assert [run.token_times_s for run in once.requests] == [run.token_times_s for run in again.requests]
    assert max(run.request.arrival_s for run in once.requests) <= 10
    firsts = {run.request.session: run.request.num_prompt_tokens for run in reversed(once.requests)}
    assert len(firsts) == 8
    assert len(set(firsts.values())) > 4


@pytest.mark.parametrize("seed", range(4))
def test_a_turn_before_the_beginning_is_not_sent_once_a_longer_subagent_ends(seed: int) -> None:
    """A recording whose parent went on before its subagent's last turn."""
    session = [a_turn([1]), a_turn([2], at_s=30, name=CHILD), a_turn([1, 3], after=(0, 1), at_s=3)]
    late = replace(session[2], arrival=replace(session[2].arrival, granules=[1, 3, 4], arrival_s=40.0), after=(2,))
    result, _ = simulate(AgentLoop(sessions=[[*session, late]], num_lanes=1, duration_s=900.0, seed=seed))
    lengths = [run.request.num_prompt_tokens for run in result.requests]
    assert len(lengths) == len({(run.request.session, run.request.chain) for run in result.requests}) <= 4
