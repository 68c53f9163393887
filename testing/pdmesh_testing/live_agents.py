"""Agents in a closed loop against a running mesh or the simulator: drawn sessions, with or without their names.

    python -m pdmesh_testing.live_agents [--ratio 2] [--unnamed] [--seconds 200] [--simulated]

Starts one mixed instance with the stand-in engine, whose cache holds the contexts of eight agents divided by ``ratio``.
All lengths, and the engine's rate of prompt tokens, are divided by 32. So prompts take the time that they take in
docs/results/papers.md, but answers a 32nd of it. Without names, the cache is a plain LRU.
"""

from __future__ import annotations

import argparse
import math
import random
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path

import anyio
import httpx
from anyio.abc import TaskGroup

from pdmesh.config import MeshConfig
from pdmesh.kv_layout import GRANULE_TOKENS
from pdmesh_lab.papers.agents_rows import IN_TIME_S, NUM_LANES, WORKING_SET_TOKENS, drawn_sessions, simulated
from pdmesh_lab.sim.agents import AgentLoop
from pdmesh_lab.sim.workload import Arrival
from pdmesh_scheduler.main import core_config_of
from pdmesh_testing.checkpoints import write_checkpoint
from pdmesh_testing.configured_fake import TIMED_LAYOUT, parse_latency
from pdmesh_testing.mesh import RunningMesh, running_mesh
from pdmesh_testing.streaming import ask

SCALE = 32

#: 20,000 prompt tokens of the published lengths, or 60 tokens of each answer, a second.
LATENCY = f"a_s=0.0167,b_s={SCALE / 20_000},decode_a_s=0.0167"

#: Tokens that every demo model has.
VOCABULARY = 200


@dataclass(frozen=True, slots=True)
class Turn:
    """A turn: the time to its first token, its prompt's length, and how much of the prompt was cached."""

    ttft_s: float
    num_prompt_tokens: int
    num_cached_tokens: int


#: A turn that was refused, perhaps after it waited too long.
REFUSED = Turn(math.inf, 0, 0)


async def stream_turn(
    client: httpx.AsyncClient,
    prompt: Sequence[int],
    max_tokens: int,
    headers: Mapping[str, str],
    /,
    **fields: object,
) -> Turn:
    """Run one completion to its end. Raises httpx.HTTPError if it is refused for another reason than a wait."""
    try:
        answer = await ask(client, prompt, max_tokens, headers, **fields)
    except KeyError:
        return REFUSED
    except httpx.HTTPStatusError as error:
        if error.response.status_code != 429:
            raise
        return REFUSED
    return Turn(answer.ttft_s, len(prompt), answer.num_cached_tokens)


def quantile_s(turns: Sequence[Turn], share: float) -> float:
    """Return the least time to a first token that at least this share of the turns does not exceed."""
    ordered = sorted(turn.ttft_s for turn in turns)
    return ordered[max(0, math.ceil(len(ordered) * share) - 1)]


def cached_share(turns: Sequence[Turn]) -> float:
    """Return which share of the prompt tokens was cached."""
    return sum(turn.num_cached_tokens for turn in turns) / sum(turn.num_prompt_tokens for turn in turns)


def num_cache_tokens(ratio: float) -> int:
    """Return how many tokens a cache holds if the contexts of `NUM_LANES` agents are ``ratio`` times as long."""
    return round(WORKING_SET_TOKENS / SCALE / ratio)


def one_instance(folder: Path, ratio: float) -> AbstractContextManager[RunningMesh]:
    """Start a mesh with one instance."""
    num_bytes = num_cache_tokens(ratio) * TIMED_LAYOUT.token_bytes
    own = {"WORKER_ENGINE": "fake", "WORKER_FAKE_LATENCY": LATENCY, "WORKER_KV_CACHE_BYTES": str(num_bytes)}
    model = write_checkpoint(folder / "model", max_position_embeddings=16_384)
    return running_mesh(folder, model=model, prefill=0, decode=0, mixed=1, settings=own)


class Agents:
    """The clients of one loop. ``turns`` ended within its duration."""

    def __init__(self, mesh: RunningMesh, loop: AgentLoop) -> None:
        self.turns: list[Turn] = []
        self._mesh = mesh
        self._clients = loop.clients(())
        self._duration_s = math.inf if loop.duration_s is None else loop.duration_s
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
        if arrival.session is not None:
            headers["x-session-id"] = arrival.session.key.hex()
            if arrival.session.parent is not None:
                headers["x-parent-session-id"] = arrival.session.parent.hex()
        turn = await stream_turn(client, _tokens(arrival), max(1, arrival.num_output_tokens), headers)
        if time.monotonic() - self._began_s < self._duration_s:
            self.turns.append(turn)
        self._send(self._clients.ended(index, time.monotonic() - self._began_s), client, tasks)


def _tokens(arrival: Arrival) -> list[int]:
    """Return the tokens of a prompt: equal granules have equal tokens."""
    tokens: list[int] = []
    for granule in arrival.granules or ():
        tokens += random.Random(granule).choices(range(VOCABULARY), k=GRANULE_TOKENS)
    return (tokens + [len(tokens) % VOCABULARY] * GRANULE_TOKENS)[: arrival.num_prompt_tokens]


def live_turns(loop: AgentLoop, ratio: float) -> tuple[Sequence[Turn], float]:
    """Return the turns on a running mesh, and the longest wait of a session aside."""
    with tempfile.TemporaryDirectory() as folder, one_instance(Path(folder), ratio) as mesh:
        agents = Agents(mesh, loop)
        anyio.run(agents.play)
        return agents.turns, mesh.total("session_longest_aside_seconds")


def simulated_turns(loop: AgentLoop, ratio: float) -> tuple[Sequence[Turn], float]:
    """Return what `live_turns` returns, as the simulator predicts with the scheduler's default settings."""
    default = core_config_of(MeshConfig(), None)
    config = replace(default, policy=replace(default.policy, latency=parse_latency(LATENCY)))
    result, core = simulated(loop, config, TIMED_LAYOUT, num_cache_tokens(ratio))
    turns = [
        REFUSED if run.ttft_s is None else Turn(run.ttft_s, run.request.num_prompt_tokens, run.num_reused_tokens)
        for run in result.requests
        if loop.duration_s is None or not run.token_times_s or run.token_times_s[-1] < loop.duration_s
    ]
    return turns, core.sessions.working_set.longest_aside_s


def main() -> None:
    """Print the figures of one run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ratio", type=float, default=2.0, help="contexts of all agents over the cache")
    parser.add_argument("--unnamed", action="store_true", help="name no session")
    parser.add_argument("--seconds", type=float, default=200.0)
    parser.add_argument("--simulated", action="store_true", help="simulate the mesh")
    options = parser.parse_args()
    sessions = drawn_sessions(named=not options.unnamed, scale=SCALE, block_size=TIMED_LAYOUT.block_size)
    loop = AgentLoop(sessions=sessions, num_lanes=NUM_LANES, duration_s=options.seconds)
    turns, longest_s = (simulated_turns if options.simulated else live_turns)(loop, options.ratio)
    sys.stdout.write(
        f"turns in time: {sum(turn.ttft_s <= IN_TIME_S for turn in turns)} of {len(turns)}; "
        f"TTFT p50; p99: {quantile_s(turns, 0.5):.2f}; {quantile_s(turns, 0.99):.1f} s; "
        f"cached: {cached_share(turns):.3f}; longest wait aside: {longest_s:.1f} s\n"
    )


if __name__ == "__main__":
    main()
