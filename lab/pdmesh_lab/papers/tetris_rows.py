"""Rows of the papers' page for Tetris: the scheduling core with 16 prefill instances, by bundle and load."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from statistics import fmean
from typing import NamedTuple

from pdmesh.metrics import percentile
from pdmesh.policy.config import PolicyConfig
from pdmesh.policy.latency import LLAMA_3_8B, TETRIS_A100_LLAMA_3_8B
from pdmesh_lab.papers.open_loop import OpenLoop, layout_of, shown
from pdmesh_lab.sim.mesh import MeshShape
from pdmesh_lab.sim.simulator import SimConfig
from pdmesh_lab.sim.workload import Arrival

NUM_REQUESTS = 150


class Trace(NamedTuple):
    """Prompts of one of the paper's traces, and about two thirds of the load that groups of 8 sustain."""

    least: int
    most: int
    median: float
    requests_per_s: float

    def arrivals(self, rng: random.Random) -> list[Arrival]:
        """Draw log-normal lengths within the range, at random times."""
        found: list[Arrival] = []
        now_s = 0.0
        while len(found) < NUM_REQUESTS:
            length = round(self.median * math.exp(rng.gauss(0, 0.8)))
            if self.least <= length <= self.most:
                found.append(Arrival(arrival_s=now_s, num_prompt_tokens=length, num_output_tokens=1))
                now_s += rng.expovariate(self.requests_per_s)
        return found


#: Medians are chosen for the paper's means: 23,600, 32,800 and 50,100 tokens.
TRACES: Mapping[str, Trace] = {
    "short": Trace(4_000, 95_000, 18_600, 2.6),
    "medium": Trace(8_000, 142_000, 24_800, 2.0),
    "long": Trace(16_000, 190_000, 38_500, 1.1),
}

POLICY = PolicyConfig(latency=TETRIS_A100_LLAMA_3_8B[1], link_bytes_per_s=1e11)
BUNDLES: Mapping[str, tuple[str, PolicyConfig]] = {
    "groups of 8": ("fcfs", replace(POLICY, group_size=8, sequence_parallel="parallel")),
    "`tetris`": ("tetris", replace(POLICY, max_group_members=16, sequence_parallel="parallel")),
    "`pdmesh`": ("pdmesh", POLICY),
    "`pdmesh`, `parallel`": ("pdmesh", replace(POLICY, max_group_members=16, sequence_parallel="parallel")),
}
HEADS = ("lengths", "requests/s", *(f"{name}: mean; p99, s" for name in BUNDLES))


def first_tokens() -> Iterator[Sequence[str]]:
    """Yield the TTFT under each bundle, by trace."""
    mesh = MeshShape(
        num_prefill=16,
        num_decode=2,
        num_mixed=0,
        kv_layout=layout_of(LLAMA_3_8B),
        num_kv_tokens=1 << 21,
        joins_groups=True,
    )
    for name, trace in TRACES.items():
        arrivals = trace.arrivals(random.Random(0))
        cells: list[str] = []
        for bundle, policy in BUNDLES.values():
            config = SimConfig(port_bytes_per_s=policy.link_bytes_per_s)
            runs = OpenLoop(bundle=bundle, policy=policy, mesh=mesh, config=config).requests(arrivals)
            firsts_s = [run.ttft_s or 0.0 for run in runs]
            cells.append(f"{fmean(firsts_s):.2f}; {shown(percentile(firsts_s, 99))}")
        yield (name, f"{trace.requests_per_s:g}", *cells)
