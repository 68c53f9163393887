"""Rows of the papers' page for Tetris: the scheduling core with 16 prefill instances beside static groups."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from pdmesh.metrics import percentile
from pdmesh.policy.config import PolicyConfig
from pdmesh.policy.latency import LLAMA_3_8B, TETRIS_A100_LLAMA_3_8B, ChunkShape, StepShape
from pdmesh_lab.papers.open_loop import OpenLoop, layout_of, shown
from pdmesh_lab.sim.mesh import MeshShape
from pdmesh_lab.sim.simulator import SimConfig
from pdmesh_lab.sim.workload import Arrival

NUM_INSTANCES = 16

#: Size of the paper's best static groups, whose load is the measure of others.
STATIC = 8

#: Requests for latencies and for loads.
NUM_REQUESTS, NUM_OF_LOADS = 150, 200

#: A load is sustained if 99 % of first tokens come within this many times the TTFT without other requests (§7.2).
SLOWDOWN = 25

#: Loads of the core over those that static groups sustain.
OVER_STATIC = (1.1, 1.3)


@dataclass(frozen=True)
class Trace:
    """Prompts of one of the paper's traces, and about two thirds of the load that groups of 8 sustain."""

    least: int
    most: int
    median: float
    requests_per_s: float

    def arrivals(self, number: int, requests_per_s: float) -> list[Arrival]:
        """Draw log-normal lengths within the range, at random times. Another rate only scales the times."""
        rng = random.Random(0)
        found: list[Arrival] = []
        passed = 0.0
        while len(found) < number:
            length = round(self.median * math.exp(rng.gauss(0, 0.8)))
            if self.least <= length <= self.most:
                at_s = passed / requests_per_s
                found.append(Arrival(arrival_s=at_s, num_prompt_tokens=length, num_output_tokens=1))
                passed += rng.expovariate(1.0)
        return found


#: Medians are chosen for the paper's means: 23,600, 32,800 and 50,100 tokens.
TRACES: Mapping[str, Trace] = {
    "short": Trace(4_000, 95_000, 18_600, 2.6),
    "medium": Trace(8_000, 142_000, 24_800, 2.0),
    "long": Trace(16_000, 190_000, 38_500, 1.1),
}

POLICY = PolicyConfig(latency=TETRIS_A100_LLAMA_3_8B[1], link_bytes_per_s=1e11)
AT_ONCE = replace(POLICY, sequence_parallel="parallel")

#: Size of the groups that `pdmesh` forms at once where `policy.group_size` is set.
GROUP_SIZE = 4
IN_GROUPS = replace(AT_ONCE, group_size=GROUP_SIZE)
MESH = MeshShape(
    num_prefill=NUM_INSTANCES,
    num_decode=2,
    num_mixed=0,
    kv_layout=layout_of(LLAMA_3_8B),
    num_kv_tokens=1 << 21,
    joins_groups=True,
)


def alone_s(num_tokens: int, size: int = STATIC) -> float:
    """Return the TTFT of a prompt alone on a static group, by the paper's Table 1."""
    return TETRIS_A100_LLAMA_3_8B[size].step_s(StepShape((ChunkShape(num_tokens, 0),), 0, 0))


def static_groups(arrivals: Sequence[Arrival], size: int = STATIC) -> list[float]:
    """Return the TTFTs under the paper's fixed-SP scheduling: each prompt goes to the group that is free first."""
    frees_s = [0.0] * (NUM_INSTANCES // size)
    found: list[float] = []
    for arrival in arrivals:
        group = min(range(len(frees_s)), key=frees_s.__getitem__)
        frees_s[group] = max(frees_s[group], arrival.arrival_s) + alone_s(arrival.num_prompt_tokens, size)
        found.append(frees_s[group] - arrival.arrival_s)
    return found


def by_core(arrivals: Sequence[Arrival], bundle: str = "pdmesh", policy: PolicyConfig = POLICY) -> list[float]:
    """Return the TTFTs that the scheduling core reaches."""
    config = SimConfig(port_bytes_per_s=policy.link_bytes_per_s)
    runs = OpenLoop(bundle=bundle, policy=policy, mesh=MESH, config=config).requests(arrivals)
    return [run.ttft_s or math.inf for run in runs]


HEADS = (
    "lengths",
    "requests/s",
    *(f"{name}: mean; p99, s" for name in ("the paper's groups of 8", "our groups of 8", "`tetris`", "`pdmesh`")),
)


def first_tokens() -> Iterator[Sequence[str]]:
    """Yield the TTFTs at about two thirds of the load that static groups sustain, by trace."""
    for name, trace in TRACES.items():
        arrivals = trace.arrivals(NUM_REQUESTS, trace.requests_per_s)
        found = (
            static_groups(arrivals),
            by_core(arrivals, "fcfs", replace(AT_ONCE, group_size=STATIC, chunk_tokens=4096)),
            by_core(arrivals, "tetris"),
            by_core(arrivals),
        )
        cells = [f"{fmean(firsts_s):.2f}; {shown(percentile(firsts_s, 99))}" for firsts_s in found]
        yield (name, f"{trace.requests_per_s:g}", *cells)


LOAD_HEADS = (
    "lengths",
    "limit",
    "groups of 16",
    "groups of 8",
    *(f"`pdmesh` in time at {each} x" for each in OVER_STATIC),
    *(f"groups of {GROUP_SIZE} at {each} x" for each in OVER_STATIC),
)


def loads() -> Iterator[Sequence[str]]:
    """Yield the requests a second that static groups sustain, and the core's first tokens in time at higher loads."""
    for name, trace in TRACES.items():
        lengths = [arrival.num_prompt_tokens for arrival in trace.arrivals(NUM_OF_LOADS, 1.0)]
        of_own_s = [SLOWDOWN * alone_s(length) for length in lengths]
        for title, limits_s in (("own", of_own_s), ("mean", [fmean(of_own_s)] * len(lengths))):
            wide, static = (sustained(trace, size, limits_s) for size in (16, STATIC))
            arrivals = [trace.arrivals(NUM_OF_LOADS, static * each) for each in OVER_STATIC]
            found = [by_core(each, policy=policy) for policy in (POLICY, IN_GROUPS) for each in arrivals]
            yield (name, title, f"{wide:.2f}", f"{static:.2f}", *(f"{in_time(each, limits_s):.1%}" for each in found))


def in_time(ttfts_s: Sequence[float], limits_s: Sequence[float]) -> float:
    """Return the share of TTFTs that keep their limits."""
    return fmean([ttft_s <= limit_s for ttft_s, limit_s in zip(ttfts_s, limits_s, strict=True)])


def sustained(trace: Trace, size: int, limits_s: Sequence[float]) -> float:
    """Return the most requests a second, in steps of 0.02, at which static groups keep 99 % of the limits."""
    low, high = 0, 400
    while high - low > 1:
        middle = (low + high) // 2
        ttfts_s = static_groups(trace.arrivals(len(limits_s), middle / 50), size)
        low, high = (middle, high) if in_time(ttfts_s, limits_s) >= 0.99 else (low, middle)
    return low / 50
