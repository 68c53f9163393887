"""Agents in a closed loop against a running mesh: the sessions of `pdmesh_lab.weka_generator`, with or without names.

    python -m pdmesh_testing.live_agents [--ratio 2] [--unnamed] [--seconds 200]

Starts one mixed instance with the stand-in engine, whose cache holds the contexts of eight agents divided by ``ratio``.
All lengths, and the engine's rate of prompt tokens, are divided by 32. So times are the same as in
docs/results/papers.md. Without names, the cache is a plain LRU.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio
import httpx
import msgspec
from anyio.abc import TaskGroup

from pdmesh.kv_layout import GRANULE_TOKENS
from pdmesh_lab.sim.agents import AgentLoop, AgentSession
from pdmesh_lab.sim.workload import Arrival
from pdmesh_lab.weka_generator import draw_session
from pdmesh_lab.weka_traces import read_weka_traces
from pdmesh_testing.checkpoints import write_checkpoint
from pdmesh_testing.configured_fake import TIMED_LAYOUT
from pdmesh_testing.mesh import RunningMesh, running_mesh

NUM_SESSIONS, NUM_LANES, SCALE = 32, 8, 32

#: Contexts of all lanes together in the mean, with an endless cache.
WORKING_SET_TOKENS = 1_160_000 // SCALE

#: A turn is in time if its first token comes within this.
IN_TIME_S = 3.0

#: 20,000 prompt tokens of the published lengths, or 60 tokens of each answer, a second.
LATENCY = f"a_s=0.0167,b_s={SCALE / 20_000},decode_a_s=0.0167"

#: Tokens that every demo model has.
VOCABULARY = 200


@dataclass(frozen=True, slots=True)
class Turn:
    """An answered turn: the time to its first token, its prompt's length, and how much of the prompt was cached."""

    ttft_s: float
    num_prompt_tokens: int
    num_cached_tokens: int


async def stream_turn(client: httpx.AsyncClient, body: dict[str, object], headers: dict[str, str]) -> Turn:
    """Run one completion to its end. A completion that waited too long and was refused took infinite time.

    Raises httpx.HTTPError if it is refused for another reason.
    """
    asked = {"ignore_eos": True, "stream": True, "stream_options": {"include_usage": True}, **body}
    began_s, first_s, usage = time.monotonic(), 0.0, dict[str, Any]()
    async with client.stream("POST", "/v1/completions", json=asked, headers=headers) as response:
        if response.status_code == 429:
            return Turn(math.inf, 0, 0)
        response.raise_for_status()
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                first_s = first_s or time.monotonic()
                usage = json.loads(line[6:]).get("usage") or usage
    if not usage:
        return Turn(math.inf, 0, 0)
    details = usage["prompt_tokens_details"] or {}
    return Turn(first_s - began_s, usage["prompt_tokens"], details.get("cached_tokens", 0))


def quantile_s(turns: Sequence[Turn], share: float) -> float:
    """Return the least time to a first token that at least this share of the turns does not exceed."""
    ordered = sorted(turn.ttft_s for turn in turns)
    return ordered[max(0, math.ceil(len(ordered) * share) - 1)]


def cached_share(turns: Sequence[Turn]) -> float:
    """Return which share of the prompt tokens was cached."""
    return sum(turn.num_cached_tokens for turn in turns) / sum(turn.num_prompt_tokens for turn in turns)


def drawn_sessions(number: int = NUM_SESSIONS) -> Sequence[AgentSession]:
    """Return agent sessions with lengths divided by `SCALE`."""
    with tempfile.TemporaryDirectory() as folder:
        for index in range(number):
            trace = draw_session(index, seed=0, scale=SCALE, block_size=16)
            Path(folder, f"{trace.id}.json").write_bytes(msgspec.json.encode(trace))
        return read_weka_traces(Path(folder))


def one_instance(folder: Path, ratio: float) -> AbstractContextManager[RunningMesh]:
    """Start a mesh whose one instance caches the contexts of `NUM_LANES` agents divided by ``ratio``."""
    num_bytes = round(WORKING_SET_TOKENS / ratio) * TIMED_LAYOUT.token_bytes
    own = {"WORKER_ENGINE": "fake", "WORKER_FAKE_LATENCY": LATENCY, "WORKER_KV_CACHE_BYTES": str(num_bytes)}
    model = write_checkpoint(folder / "model", max_position_embeddings=16_384)
    return running_mesh(folder, model=model, prefill=0, decode=0, mixed=1, settings=own)


class Agents:
    """The clients of one loop. ``turns`` ended within its duration."""

    def __init__(self, mesh: RunningMesh, loop: AgentLoop, *, named: bool) -> None:
        self.turns: list[Turn] = []
        self._mesh = mesh
        self._clients = loop.clients(())
        self._duration_s = math.inf if loop.duration_s is None else loop.duration_s
        self._named = named
        self._num_sent = 0
        self._began_s = 0.0

    async def play(self) -> None:
        """Send all turns, and wait for the answers."""
        self._began_s = time.monotonic()
        async with self._mesh.client() as client, anyio.create_task_group() as tasks:
            self._send(self._clients.begin(), client, tasks)

    def _send(self, arrivals: Sequence[Arrival], client: httpx.AsyncClient, tasks: TaskGroup) -> None:
        for arrival in arrivals:
            tasks.start_soon(self._turn, self._num_sent, arrival, client, tasks)
            self._num_sent += 1

    async def _turn(self, index: int, arrival: Arrival, client: httpx.AsyncClient, tasks: TaskGroup) -> None:
        await anyio.sleep(max(0.0, self._began_s + arrival.arrival_s - time.monotonic()))
        headers: dict[str, str] = {}
        if self._named and arrival.session is not None:
            headers["x-session-id"] = arrival.session.key.hex()
            if arrival.session.parent is not None:
                headers["x-parent-session-id"] = arrival.session.parent.hex()
        body = {"prompt": _tokens(arrival), "max_tokens": max(1, arrival.num_output_tokens)}
        turn = await stream_turn(client, body, headers)
        if time.monotonic() - self._began_s < self._duration_s:
            self.turns.append(turn)
        self._send(self._clients.ended(index, time.monotonic() - self._began_s), client, tasks)


def _tokens(arrival: Arrival) -> list[int]:
    """Return the tokens of a prompt: equal granules have equal tokens."""
    tokens: list[int] = []
    for granule in arrival.granules or ():
        tokens += random.Random(granule).choices(range(VOCABULARY), k=GRANULE_TOKENS)
    return (tokens + [len(tokens) % VOCABULARY] * GRANULE_TOKENS)[: arrival.num_prompt_tokens]


def main() -> None:
    """Print the figures of one run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ratio", type=float, default=2.0, help="contexts of all agents over the cache")
    parser.add_argument("--unnamed", action="store_true", help="name no session")
    parser.add_argument("--seconds", type=float, default=200.0)
    options = parser.parse_args()
    sessions = drawn_sessions()
    loop = AgentLoop(sessions=sessions, num_lanes=NUM_LANES, duration_s=options.seconds)
    with tempfile.TemporaryDirectory() as folder, one_instance(Path(folder), options.ratio) as mesh:
        agents = Agents(mesh, loop, named=not options.unnamed)
        anyio.run(agents.play)
        longest_s = mesh.total("session_longest_aside_seconds")
    turns = agents.turns
    sys.stdout.write(
        f"turns in time: {sum(turn.ttft_s <= IN_TIME_S for turn in turns)} of {len(turns)}; "
        f"TTFT p50; p99: {quantile_s(turns, 0.5):.2f}; {quantile_s(turns, 0.99):.1f} s; "
        f"cached: {cached_share(turns):.3f}; longest wait aside: {longest_s:.1f} s\n"
    )


if __name__ == "__main__":
    main()
