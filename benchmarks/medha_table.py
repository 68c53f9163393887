"""Medha's evaluation (§6.2, §6.4) in the simulator: the time to first token under its schedulers and ours, as the load
grows.

    python benchmarks/medha_table.py

Short conversations with 5 % of prompts of 128K to 1M tokens; Llama-3-8B on 16 A100s as one instance (TP 8, SPP 2).
"""

from __future__ import annotations

import argparse
import random
from dataclasses import replace

from report import heading
from simulated import Study, layout, number, run, table

from pdmesh.policy.config import PolicyConfig
from pdmesh.policy.latency import A100, LLAMA_3_8B, analytic_model, tensor_parallel
from pdmesh_lab.sim.mesh import MeshShape
from pdmesh_lab.sim.report import SimReport
from pdmesh_lab.sim.workload import Synthetic, synthetic

LONG_RANGE = (128_000, 1_000_000)
RATES = (0.25, 0.75, 1.25, 1.75)

#: The first four have static chunks of 2,048 tokens, of one prompt or several; the others fill 20 ms with whole ones.
ROWS = ("fcfs", "edf", "lrs", "lars", "medha", "pdmesh")

#: Lengths as in ShareGPT4, capped at 8K tokens (§6.1): median output 415; the prompts' spread is ours.
SHORT = Synthetic(
    max_prompt_tokens=8000, median_prompt_tokens=730, sigma_prompt=1.6, median_output_tokens=415, sigma_output=0.55
)

HEADS = ("requests/s", "", "short p50, s", "p99", "long p50, s", "p99", "makespan, s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rate", type=float, action="append")
    options = parser.parse_args()
    print(heading("Medha's table, simulated"), "\n")
    rows = []
    for rate in options.rate or RATES:
        shape = replace(
            SHORT, num_requests=options.requests, requests_per_s=rate, long_share=0.05, long_range=LONG_RANGE
        )
        arrivals = synthetic(shape, random.Random(options.seed))
        for bundle in ROWS:
            rows.append(row(rate, bundle, run(study(bundle), arrivals, seed=options.seed)))
    print(table(HEADS, rows))


def study(bundle: str) -> Study:
    latency = analytic_model(LLAMA_3_8B, tensor_parallel(A100, 16))
    policy = PolicyConfig(latency=latency, chunk_tokens=2048, prefill_step_s=0.02, slo_tpot_s=0.02)
    mesh = MeshShape(
        num_prefill=0,
        num_decode=0,
        num_mixed=1,
        kv_layout=layout(LLAMA_3_8B),
        num_kv_tokens=8_000_000,
    )
    return Study(name=bundle, bundle=bundle, mesh=mesh, policy=policy)


def row(rate: float, bundle: str, figures: SimReport) -> list[str]:
    short, long = figures.short.ttft_s, figures.long.ttft_s
    return [
        f"{rate:g}",
        bundle,
        number(short.p50),
        number(short.p99),
        number(long.p50),
        number(long.p99),
        number(figures.makespan_s),
    ]


if __name__ == "__main__":
    main()
