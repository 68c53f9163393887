"""What each part of the bundle `pdmesh` is worth: the same requests through the scheduling core without that part.

A part that changes no figure of any workload has no reason to stay. Of the Azure trace of conversations, one workload
has one of fifty prompts made long, one leaves little room to decode, and one has more prompts than its prefill
instance computes. The prompts of Mooncake's trace begin alike.

    python -m benchmarks.policies.parts FOLDER [--workload room] [--requests 250]

FOLDER has azure_2023_conv.csv and mooncake_conversation.jsonl.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean

from benchmarks.harness.report import heading
from pdmesh.core.config import CoreConfig, KvReservation
from pdmesh.core.scheduler import SchedulerCore
from pdmesh.metrics import Slo
from pdmesh.model import KvLayout
from pdmesh.policy.bundle import Bundle
from pdmesh.policy.bundles import make_bundle
from pdmesh.policy.config import PolicyConfig
from pdmesh.policy.latency import TETRIS_A100_LLAMA_3_8B
from pdmesh.policy.order import Fcfs
from pdmesh.policy.parts import mixed
from pdmesh.policy.placement import Freeness, LeastQueuedTokens
from pdmesh_lab.sim.mesh import MeshShape
from pdmesh_lab.sim.report import report
from pdmesh_lab.sim.simulator import SimConfig, Simulator
from pdmesh_lab.sim.workload import Arrival, with_long_inputs, with_rate_scaled
from pdmesh_lab.traces import read_trace

MODEL = TETRIS_A100_LLAMA_3_8B[1]
POLICY = PolicyConfig(latency=MODEL, link_bytes_per_s=25e9)
SLO = Slo(ttft_s=2.0, tpot_s=0.05)
NO_LIMIT = 1 << 40

#: The bundle without one of its parts, or with a plain one in its place.
WITHOUT: Mapping[str, Callable[[Bundle], Bundle]] = {
    "(all parts)": lambda bundle: bundle,
    "order: by arrival": lambda bundle: replace(bundle, order=Fcfs()),
    "prefill placement: fewest queued tokens": lambda bundle: replace(bundle, prefill_placement=LeastQueuedTokens()),
    "decode placement: the freest": lambda bundle: replace(bundle, decode_placement=Freeness()),
    "batching: mixed": lambda bundle: replace(bundle, batching=mixed(POLICY)),
    "no interruption": lambda bundle: replace(bundle, interruption=None),
    "no local prefill": lambda bundle: replace(bundle, local_prefill=None),
    "no local decode": lambda bundle: replace(bundle, local_decode=None),
    "no run-ahead": lambda bundle: replace(bundle, run_ahead=None),
    "all KV may wait": lambda bundle: replace(bundle, waiting_kv_share=1.0),
    "KV in order of offers": lambda bundle: replace(bundle, sends_computed_first=False),
    "no groups": lambda bundle: replace(bundle, group_policy=None),
    "no rebalancing": lambda bundle: replace(bundle, rebalancing=None),
    "no reuse": lambda bundle: replace(bundle, reuse=None),
}


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests, and the mesh that serves them."""

    arrivals: Sequence[Arrival]
    mesh: MeshShape


def mesh(num_prefill: int, num_decode: int, num_kv_tokens: int) -> MeshShape:
    return MeshShape(
        num_prefill=num_prefill,
        num_decode=num_decode,
        num_mixed=0,
        kv_layout=KvLayout(num_layers=32, num_kv_heads=8, head_dim=128, block_size=16, dtype="bfloat16"),
        num_kv_tokens=num_kv_tokens,
        joins_groups=True,
    )


def workloads(folder: Path, num_requests: int) -> dict[str, Workload]:
    conv = read_trace(folder / "azure_2023_conv.csv", limit=num_requests)
    turns = read_trace(folder / "mooncake_conversation.jsonl", limit=num_requests)
    long = with_long_inputs(conv, 98, (20_000, 60_000), random.Random(0))
    return {
        "long": Workload(long, mesh(2, 2, 200_000)),
        "room": Workload(with_rate_scaled(conv, 1.5), mesh(2, 2, 12_000)),
        "prompts": Workload(with_rate_scaled(conv, 3.0), mesh(1, 3, 100_000)),
        "turns": Workload(turns, mesh(4, 2, 400_000)),
    }


def simulated(workload: Workload, change: Callable[[Bundle], Bundle]) -> tuple[float, float, float]:
    """Return mean TTFT, mean time of a request, and the share within `SLO`."""
    config = CoreConfig(
        max_queue_entries=NO_LIMIT,
        max_queue_tokens=NO_LIMIT,
        max_queue_s=float(NO_LIMIT),
        kv_reservation=KvReservation.ON_DEMAND,
        policy=POLICY,
    )
    core = SchedulerCore(config, change(make_bundle("pdmesh", POLICY)), random.Random(0))
    run = Simulator(core, workload.mesh.instances(MODEL), workload.arrivals, SimConfig(port_bytes_per_s=25e9)).run()
    figures = report(run, long_tokens=POLICY.long_prompt_tokens, slo=SLO).all
    ttfts_s = [each.ttft_s for each in run.requests if each.ttft_s is not None]
    return fmean(ttfts_s), figures.mean_jct_s or 0.0, figures.slo_attainment or 0.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--workload", choices=("long", "room", "prompts", "turns"))
    parser.add_argument("--requests", type=int, default=250)
    options = parser.parse_args()
    print(heading("What each part of `pdmesh` is worth: figures without it"))
    for name, workload in workloads(options.folder, options.requests).items():
        if options.workload not in (None, name):
            continue
        print(f"\n{name}\n| without | mean TTFT, s | mean JCT, s | within targets |\n|---|---|---|---|")
        whole: tuple[float, float, float] | None = None
        for part, change in WITHOUT.items():
            ttft_s, jct_s, share = found = simulated(workload, change)
            whole = whole or found
            more = f"{ttft_s / whole[0] - 1:+.1%} | {jct_s:.3f} {jct_s / whole[1] - 1:+.1%}"
            print(f"| {part} | {ttft_s:.3f} {more} | {share:.1%} |", flush=True)


if __name__ == "__main__":
    main()
