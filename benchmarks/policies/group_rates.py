"""Which improvement rate suits a pipelined prefill at which load: the table in `pdmesh.policy.improvement`, made by
simulation.

The same prompts through the scheduling core for each rate, on prefill instances that a load keeps busy for that share
of their time, once with prompts as Tetris has them (4 to 95K tokens, 8 instances) and once with nine of ten short (4
instances). Prints the mean time to first token beside the best rate's.

    python -m benchmarks.policies.group_rates [--requests 250] [--seeds 3]
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable, Mapping
from statistics import fmean

from benchmarks.harness.report import heading
from pdmesh.kv_layout import KvLayout
from pdmesh.policy.config import PolicyConfig
from pdmesh.policy.latency import TETRIS_A100_LLAMA_3_8B, ChunkShape, StepShape
from pdmesh_lab.sim.mesh import MeshShape, study_core
from pdmesh_lab.sim.simulator import SimConfig, Simulator
from pdmesh_lab.sim.workload import Arrival

MODEL = TETRIS_A100_LLAMA_3_8B[1]
LAYOUT = KvLayout(num_layers=32, num_kv_heads=8, head_dim=128, block_size=16, dtype="bfloat16")
RATES = (0.0, 0.02, 0.05, 0.1, 0.2, 0.3)
LOADS = (0.2, 0.35, 0.5, 0.65, 0.8, 0.95)
BYTES_PER_S = 25e9


def long_prompt(rng: random.Random) -> int:
    return rng.randint(4_000, 95_000)


def mixed_prompt(rng: random.Random) -> int:
    return rng.randint(20_000, 100_000) if rng.random() < 0.1 else max(16, min(8_000, int(rng.lognormvariate(6.5, 1))))


MESHES: Mapping[str, tuple[int, Callable[[random.Random], int]]] = {
    "4 to 95K tokens, 8 instances": (8, long_prompt),
    "one of ten long, 4 instances": (4, mixed_prompt),
}


def arrivals(
    load: float, num_prefill: int, draw: Callable[[random.Random], int], number: int, seed: int
) -> list[Arrival]:
    rng = random.Random(seed)
    lengths = [draw(rng) for _ in range(number)]
    work_s = fmean([MODEL.step_s(StepShape((ChunkShape(length, 0),), 0, 0)) for length in lengths])
    found: list[Arrival] = []
    now_s = 0.0
    for length in lengths:
        found.append(Arrival(arrival_s=now_s, num_prompt_tokens=length, num_output_tokens=2))
        now_s += rng.expovariate(load * num_prefill / work_s)
    return found


def mean_ttft_s(workload: list[Arrival], num_prefill: int, rate: float) -> float:
    shape = MeshShape(
        num_prefill=num_prefill, num_decode=2, num_mixed=0, kv_layout=LAYOUT, num_kv_tokens=1 << 21, joins_groups=True
    )
    policy = PolicyConfig(
        latency=MODEL, max_group_members=num_prefill, group_improvement=rate, link_bytes_per_s=BYTES_PER_S
    )
    config = SimConfig(port_bytes_per_s=BYTES_PER_S)
    result = Simulator(study_core("pdmesh", policy, 0), shape.instances(MODEL), workload, config).run()
    return fmean([run.ttft_s for run in result.requests if run.ttft_s is not None])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=250)
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    print(heading("Improvement rates of pipelined groups, by load: mean TTFT over the best rate's"))
    for name, (num_prefill, draw) in MESHES.items():
        columns = ["load", "best rate", "mean TTFT, s", *map(str, RATES)]
        print(f"\n{name}\n| {' | '.join(columns)} |\n|{'---|' * len(columns)}")
        for load in LOADS:
            workloads = [arrivals(load, num_prefill, draw, options.requests, seed) for seed in range(options.seeds)]
            means_s = {rate: fmean([mean_ttft_s(each, num_prefill, rate) for each in workloads]) for rate in RATES}
            best = min(means_s, key=means_s.__getitem__)
            cells = " | ".join(f"{means_s[rate] / means_s[best]:.3f}" for rate in RATES)
            print(f"| {load} | {best} | {means_s[best]:.3f} | {cells} |", flush=True)


if __name__ == "__main__":
    main()
