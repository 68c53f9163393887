"""Reader of agent sessions in the format `weka_trace`, which the AgentX scenario of AIPerf replays.

A folder has one JSON file for each session. Its requests name the blocks of their prompts (`hash_ids`), which are
common to requests of the same session only. A subagent's requests are listed where the subagent began. Unknown fields
are refused, as AIPerf does.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from pdmesh.kv_layout import GRANULE_TOKENS
from pdmesh.model import MAX_REQUEST_TOKENS, SessionKey, SessionName
from pdmesh_lab.sim.agents import AgentSession, AgentTurn
from pdmesh_lab.sim.workload import Arrival
from pdmesh_lab.traces import TraceError

MAX_FILE_BYTES = 64 << 20

#: Most files in a folder, and most prompt tokens of all their requests.
MAX_FILES = 10_000
MAX_TOKENS = 1 << 32

_Seconds = Annotated[float, Meta(ge=0, le=1e9)]


class WekaRequest(
    msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True, kw_only=True, tag="n", tag_field="type"
):
    """A request, with seconds since the beginning of the session."""

    t: _Seconds
    model: str
    num_prompt_tokens: Annotated[int, Meta(ge=1, le=MAX_REQUEST_TOKENS)] = msgspec.field(name="in")
    num_output_tokens: Annotated[int, Meta(ge=0, le=MAX_REQUEST_TOKENS)] = msgspec.field(name="out")
    hash_ids: list[int] = []
    input_types: list[str] = []
    output_types: list[str] = []
    stop: str = ""
    api_time: float | None = None
    think_time: float | None = None


class WekaStreamed(WekaRequest, tag="s", kw_only=True):
    """A request whose answer was streamed."""

    ttft: float | None = None


class WekaSubagent(
    msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True, kw_only=True, tag="subagent", tag_field="type"
):
    """A subagent and its requests."""

    t: _Seconds
    agent_id: str
    subagent_type: str
    status: str
    requests: list[WekaRequest | WekaStreamed]
    models: list[str]
    duration_ms: float | None = None
    total_tokens: int | None = None
    tool_use_count: int | None = None
    tool_tokens: int = 0
    system_tokens: int = 0


class WekaTrace(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True, kw_only=True):
    """One session: the content of a file."""

    id: str
    models: list[str]
    block_size: Annotated[int, Meta(ge=1, le=MAX_REQUEST_TOKENS)]
    hash_id_scope: Literal["local"]
    requests: list[WekaRequest | WekaStreamed | WekaSubagent]
    tool_tokens: int = 0
    system_tokens: int = 0
    totals: dict[str, Any] | None = None


def read_weka_traces(folder: Path, *, limit: int | None = None) -> list[AgentSession]:
    """Return the sessions of a folder's first ``limit`` files, in the order of their names. Raises TraceError."""
    try:
        paths = sorted(folder.glob("*.json"))[:limit]
        if not paths:
            raise TraceError(f"the folder {folder} has no file *.json with an agent session")
        if len(paths) > MAX_FILES:
            raise TraceError(f"the folder {folder} has {len(paths)} sessions: at most {MAX_FILES}; set --limit")
        numbers, num_tokens, sessions = count(), 0, list[AgentSession]()
        for number, path in enumerate(paths):
            if (size := path.stat().st_size) > MAX_FILE_BYTES:
                raise TraceError(f"the session {path} has {size} bytes: at most {MAX_FILE_BYTES}")
            session = _session(path, _decoded(path), number, numbers)
            num_tokens += sum(turn.arrival.num_prompt_tokens for turn in session)
            if num_tokens > MAX_TOKENS:
                raise TraceError(
                    f"the prompts up to {path} have {num_tokens} tokens: at most {MAX_TOKENS}; set --limit"
                )
            sessions.append(session)
    except OSError as error:
        raise TraceError(f"cannot read the agent sessions in {folder}: {error.strerror}") from error
    return sessions


def _decoded(path: Path) -> WekaTrace:
    try:
        trace = msgspec.json.decode(path.read_bytes(), type=WekaTrace)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise TraceError(f"the session {path} is no weka_trace: {error}") from error
    if not any(isinstance(each, WekaRequest) or each.requests for each in trace.requests):
        raise TraceError(f"the session {path} has no requests")
    return trace


class _Granules:
    """Numbers of the granules of one session's prompts. ``numbers`` yields new ones, never used by another session."""

    def __init__(self, block_size: int, numbers: Iterator[int]) -> None:
        self._block_size = block_size
        self._new = numbers
        self._known: dict[tuple[int, tuple[int, ...]], int] = {}

    def of(self, request: WekaRequest) -> tuple[int, ...]:
        """Return the numbers of a prompt's granules. Tokens behind the named blocks are shared with no prompt."""
        found: list[int] = []
        before = -1
        for start in range(0, request.num_prompt_tokens - GRANULE_TOKENS + 1, GRANULE_TOKENS):
            end = start + GRANULE_TOKENS
            if end > len(request.hash_ids) * self._block_size:
                before = next(self._new)
            else:
                blocks = request.hash_ids[start // self._block_size : -(-end // self._block_size)]
                key = before, tuple(blocks)
                if (known := self._known.get(key)) is None:
                    known = self._known[key] = next(self._new)
                before = known
            found.append(before)
        return tuple(found)


def _session(path: Path, trace: WekaTrace, number: int, numbers: Iterator[int]) -> AgentSession:
    """Return a session's turns: the agent's, and each subagent's after the turn before it in the list.

    A turn of the agent waits for its turn before, and for subagents that ended before it began when it was recorded.
    """
    granules = _Granules(trace.block_size, numbers)
    first_s = min(each.t for each in trace.requests)
    turns: list[AgentTurn] = []
    ends_s: list[float] = []

    def add(request: WekaRequest, at_s: float, name: SessionName, after: Sequence[int]) -> int:
        ended_s = max([ends_s[index] for index in after], default=0.0)
        arrival = Arrival(
            arrival_s=at_s,
            num_prompt_tokens=request.num_prompt_tokens,
            num_output_tokens=max(1, request.num_output_tokens),
            granules=granules.of(request),
            session=name,
        )
        turns.append(AgentTurn(arrival=arrival, after=tuple(after), pause_s=max(0.0, at_s - ended_s)))
        ends_s.append(at_s + _duration_s(request))
        return len(turns) - 1

    main = SessionName(_key(number, 0))
    last: list[int] = []
    subagents: list[tuple[float, int]] = []  # end and last turn of those that no turn has waited for
    for index, each in enumerate(sorted(trace.requests, key=lambda each: each.t)):
        at_s = each.t - first_s
        if isinstance(each, WekaRequest):
            joined = [turn for end_s, turn in subagents if end_s <= at_s]
            subagents = [(end_s, turn) for end_s, turn in subagents if end_s > at_s]
            last = [add(each, at_s, main, [*last, *joined])]
        elif each.requests:
            name = SessionName(_key(number, index + 1), main.key)
            own = list(last)
            for request in each.requests:
                # Older recordings count a subagent's times from its beginning.
                absolute_s = request.t if request.t >= each.t else each.t + request.t
                earliest_s = turns[own[0]].arrival.arrival_s if own else 0.0
                own = [add(request, max(absolute_s - first_s, earliest_s), name, own)]
            end_s = ends_s[own[0]] if each.duration_ms is None else at_s + max(0.0, each.duration_ms / 1e3)
            subagents.append((end_s, own[0]))
    return turns


def _key(session: int, thread: int) -> SessionKey:
    return SessionKey((session << 64 | thread).to_bytes(16))


def _duration_s(request: WekaRequest) -> float:
    duration_s = request.api_time
    return max(0.0, duration_s) if duration_s is not None and math.isfinite(duration_s) else 0.0
