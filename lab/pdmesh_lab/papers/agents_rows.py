"""Rows for agents whose contexts exceed the cache: turns in time with and without the names of their sessions."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec

from pdmesh.core.config import CoreConfig
from pdmesh.core.scheduler import SchedulerCore
from pdmesh.kv_layout import GRANULE_TOKENS, KvLayout
from pdmesh.metrics import NO_SLO, percentile
from pdmesh.policy.bundles import make_bundle
from pdmesh.policy.config import PolicyConfig
from pdmesh.policy.latency import LinearLatencyModel
from pdmesh_lab.papers.open_loop import shown
from pdmesh_lab.sim.agents import AgentLoop, AgentSession
from pdmesh_lab.sim.mesh import MeshShape
from pdmesh_lab.sim.report import report
from pdmesh_lab.sim.result import SimResult
from pdmesh_lab.sim.simulator import Simulator
from pdmesh_lab.weka_generator import draw_session
from pdmesh_lab.weka_traces import read_weka_traces

HEADS = (
    "working set / cache",
    "session names",
    "turns in time/s",
    "turns/s",
    "reused of reusable",
    "TTFT p50; p99, s",
    "longest wait aside, s",
)

NUM_SESSIONS, NUM_LANES, DURATION_S = 32, 8, 900.0

#: Contexts of all lanes together in the mean, with an endless cache.
WORKING_SET_TOKENS = 1_160_000

#: A turn is in time if its first token comes within this.
IN_TIME_S = 3.0

#: 20,000 prompt tokens, or 60 tokens of each answer, a second.
POLICY = PolicyConfig(
    latency=LinearLatencyModel(a_s=1 / 60, b_s=1 / 20_000, c_s=0.0, d_s=0.0, decode_a_s=1 / 60),
)
LAYOUT = KvLayout(num_layers=1, num_kv_heads=1, head_dim=64, block_size=GRANULE_TOKENS, dtype="bfloat16")


def drawn_sessions(*, named: bool, scale: int = 1, block_size: int = GRANULE_TOKENS) -> list[AgentSession]:
    """Draw agent sessions with lengths divided by ``scale``, in blocks of ``block_size`` tokens."""
    with TemporaryDirectory() as folder:
        for number in range(NUM_SESSIONS):
            trace = draw_session(number, seed=0, scale=scale, block_size=block_size)
            Path(folder, f"{trace.id}.json").write_bytes(msgspec.json.encode(trace))
        sessions = read_weka_traces(Path(folder))
    return sessions if named else [_without_names(session) for session in sessions]


def _without_names(session: AgentSession) -> AgentSession:
    return [replace(turn, arrival=replace(turn.arrival, session=None)) for turn in session]


def simulated(
    loop: AgentLoop, config: CoreConfig, kv_layout: KvLayout, num_kv_tokens: int
) -> tuple[SimResult, SchedulerCore]:
    """Simulate agents on one mixed instance. Return the result, and the core at the end."""
    mesh = MeshShape(num_prefill=0, num_decode=0, num_mixed=1, kv_layout=kv_layout, num_kv_tokens=num_kv_tokens)
    core = SchedulerCore(config, make_bundle("pdmesh", config.policy), random.Random(0))
    return Simulator(core, mesh.instances(config.policy.latency), (), closed_loop=loop).run(), core


def named_and_unnamed() -> Iterator[Sequence[str]]:
    """Yield the figures of eight lanes of agents on a mixed instance, for each ratio of contexts to cache."""
    sessions = {"no": drawn_sessions(named=False), "yes": drawn_sessions(named=True)}
    for ratio in (1.2, 2.0):
        for name, each in sessions.items():
            yield f"{ratio:g}", name, *_figures(each, ratio)


def _figures(sessions: Sequence[AgentSession], ratio: float) -> Iterator[str]:
    loop = AgentLoop(sessions=sessions, num_lanes=NUM_LANES, duration_s=DURATION_S)
    result, core = simulated(loop, CoreConfig(policy=POLICY), LAYOUT, round(WORKING_SET_TOKENS / ratio))
    firsts_s = [each.ttft_s for each in result.requests if each.ttft_s is not None]
    in_time = [
        each.ttft_s <= IN_TIME_S
        for each in result.requests
        if each.ttft_s is not None and each.token_times_s[0] < DURATION_S
    ]
    figures = report(result, long_tokens=1 << 30, slo=NO_SLO)
    yield shown(sum(in_time) / DURATION_S)
    yield shown(len(in_time) / DURATION_S)
    yield shown((figures.reused_share or 0.0) / (figures.possible_share or 1.0))
    yield f"{shown(percentile(firsts_s, 50))}; {shown(percentile(firsts_s, 99))}"
    yield shown(core.sessions.working_set.longest_aside_s)
