"""Agent sessions as files: what is read, what is refused, and what the generator writes."""

from __future__ import annotations

import json
import statistics
from itertools import chain
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pdmesh.model import SessionKey, SessionName
from pdmesh_lab import weka_traces
from pdmesh_lab.sim.agents import AgentSession
from pdmesh_lab.traces import TraceError
from pdmesh_lab.weka_generator import draw_session
from pdmesh_lab.weka_traces import WekaRequest, WekaSubagent, read_weka_traces

NO_NAME = SessionName(SessionKey(b""))


def a_request(t: float, hash_ids: list[int], *, num_tokens: int | None = None, api_time: float = 1.0) -> dict[str, Any]:
    num_tokens = 64 * len(hash_ids) if num_tokens is None else num_tokens
    return {"t": t, "type": "s", "model": "m", "in": num_tokens, "out": 5, "hash_ids": hash_ids, "api_time": api_time}


def a_subagent(t: float, requests: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    names = {"agent_id": "a", "subagent_type": "Explore", "status": "completed", "models": ["m"]}
    return {"t": t, "type": "subagent", "requests": requests, **names, **more}


def a_trace(requests: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    return {"id": "x", "models": ["m"], "block_size": 64, "hash_id_scope": "local", "requests": requests, **more}


def read(folder: Path, *traces: dict[str, Any]) -> list[AgentSession]:
    for number, trace in enumerate(traces):
        Path(folder, f"{number}.json").write_text(json.dumps(trace))
    return read_weka_traces(folder)


def waits(session: AgentSession) -> list[tuple[tuple[int, ...], float]]:
    return [(turn.after, turn.pause_s) for turn in session]


def granules(session: AgentSession) -> list[list[int]]:
    return [list(turn.arrival.granules or ()) for turn in session]


def test_a_turn_waits_for_the_answer_and_the_pause(tmp_path: Path) -> None:
    (session,) = read(tmp_path, a_trace([a_request(10, [1, 2]), a_request(14, [1, 2, 3, 4]), a_request(14.5, [1, 2])]))
    assert waits(session) == [((), 0), ((0,), 3), ((1,), 0)]
    assert [turn.arrival.arrival_s for turn in session] == [0, 4, 4.5]
    assert len({turn.arrival.session for turn in session}) == 1


def test_prompts_of_a_session_share_what_their_blocks_share(tmp_path: Path) -> None:
    one = a_trace([a_request(0, [1, 2, 3, 4]), a_request(5, [1, 2, 3, 5, 6]), a_request(9, [9, 2, 3, 4])])
    first, second, third = granules((session := read(tmp_path, one, one))[0])
    assert len(first) == len(second) == len(third) == 2
    assert first[0] == second[0]
    assert first[1] != second[1]
    assert not set(first) & set(third)  # a granule stands for all tokens before it
    assert not {*chain(*granules(session[0]))} & {*chain(*granules(session[1]))}


def test_tokens_without_blocks_are_shared_with_no_prompt(tmp_path: Path) -> None:
    requests = [a_request(t, [1, 2], num_tokens=400) for t in (0, 5)]
    first, second = granules(read(tmp_path, a_trace(requests))[0])
    assert len(first) == len(second) == 3
    assert [a == b for a, b in zip(first, second, strict=True)] == [True, False, False]


def test_blocks_that_do_not_divide_a_granule(tmp_path: Path) -> None:
    requests = [a_request(t, [1, 2, last], num_tokens=300) for t, last in ((0, 3), (5, 4))]
    first, second = granules(read(tmp_path, a_trace(requests, block_size=100))[0])
    assert [a == b for a, b in zip(first, second, strict=True)] == [True, False]  # the second has tokens of all three


def test_subagents_are_children_that_a_later_turn_waits_for(tmp_path: Path) -> None:
    (session,) = read(
        tmp_path,
        a_trace(
            [
                a_request(0, [1, 2]),
                a_subagent(1, [a_request(1.5, [1, 2, 7]), a_request(0.75, [1, 2, 7, 8])]),  # the second is relative
                a_subagent(1, [a_request(1, [5, 6], api_time=20)]),
                a_request(6, [1, 2, 3]),
                a_request(24, [1, 2, 3, 4]),
            ]
        ),
    )
    main, child, _, other, second, third = (turn.arrival.session or NO_NAME for turn in session)
    assert main == second == third
    assert main.parent is None
    assert child.parent == other.parent == main.key
    assert len({main.key, child.key, other.key}) == 3
    assert waits(session) == [
        ((), 0),
        ((0,), 0.5),
        ((1,), 0),
        ((0,), 0),
        ((0, 2), 3.25),  # the other subagent has not ended at 6 s
        ((4, 3), 3),
    ]


@pytest.mark.parametrize(
    ("trace", "says"),
    [
        (a_trace([a_request(0, [1]) | {"colour": "red"}]), "unknown field `colour`"),
        (a_trace([a_request(0, [1])], hash_id_scope="global"), "Invalid enum value 'global'"),
        (a_trace([a_request(0, [1])], block_size=0), "block_size"),
        (a_trace([a_request(0, [1]) | {"in": 0}]), "in`"),
        (a_trace([a_request(0, [1]) | {"in": 1 << 40}]), "in`"),
        (a_trace([a_request(-1, [1])]), "`$.requests[0].t`"),
        (a_trace([a_request(0, [1]) | {"type": "x"}]), "Invalid value 'x'"),
        (a_trace([a_subagent(0, [a_subagent(0, [])])]), "Invalid value 'subagent'"),
        (a_trace([a_subagent(0, [])]), "has no requests"),
        (a_trace([]), "has no requests"),
    ],
)
def test_what_is_refused(tmp_path: Path, trace: dict[str, Any], says: str) -> None:
    with pytest.raises(TraceError, match=r"0\.json") as caught:
        read(tmp_path, trace)
    assert says in str(caught.value)


@pytest.mark.parametrize("limit", ["MAX_FILE_BYTES", "MAX_FILES", "MAX_TOKENS"])
def test_sizes_are_bounded(tmp_path: Path, limit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weka_traces, limit, 1)
    with pytest.raises(TraceError, match="at most 1"):
        read(tmp_path, a_trace([a_request(0, [1])]), a_trace([a_request(0, [1])]))


def test_a_folder_without_sessions_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="has no file"):
        read_weka_traces(tmp_path)


def test_generated_sessions_have_the_published_medians(tmp_path: Path) -> None:
    drawn = [draw_session(number, seed=0, scale=1, block_size=64) for number in range(120)]
    mains = [[each for each in trace.requests if isinstance(each, WekaRequest)] for trace in drawn]
    subagents = [[each for each in trace.requests if isinstance(each, WekaSubagent)] for trace in drawn]
    assert statistics.median(map(len, mains)) == pytest.approx(43, rel=0.2)
    assert sum(map(bool, subagents)) / len(drawn) == pytest.approx(0.44, abs=0.1)
    assert statistics.median(each.num_prompt_tokens for main in mains for each in main) == pytest.approx(142e3, rel=0.2)
    assert statistics.median(each.num_output_tokens for main in mains for each in main) == pytest.approx(444, rel=0.1)


def test_generated_files_are_read_and_equal_for_equal_arguments(tmp_path: Path) -> None:
    one, again = (msgspec.json.encode(draw_session(3, seed=1, scale=32, block_size=16)) for _ in range(2))
    assert one == again
    tmp_path.joinpath("one.json").write_bytes(one)
    (session,) = read_weka_traces(tmp_path)
    full = draw_session(3, seed=1, scale=1, block_size=16)
    longest = max(each.num_prompt_tokens for each in full.requests if isinstance(each, WekaRequest))
    assert max(turn.arrival.num_prompt_tokens for turn in session) < longest / 20
