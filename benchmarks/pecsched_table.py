"""PecSched's evaluation (§6) in the simulator: short and long requests under its baselines, itself, its ablations and
ours, on 32 A100s with its four models.

    python benchmarks/pecsched_table.py --trace azure_2023_conv.csv

The trace is the Azure 2023 conversation trace; its prompts above the 95th percentile get 100K to 500K tokens.

Groups are those of the core, formed as a prompt is placed: PecSched's and its baselines' of a fixed size and at once
(`policy.group_size`, parallel step), ours as they pay, in turn. Each member holds the KV of the whole prompt, where the
paper's hold shares of it: so instances have room for it here, more than an A100 has beside the larger weights.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from report import heading, unavailable
from simulated import Study, change, layout, number, run, table

from pdmesh.policy.config import PolicyConfig
from pdmesh.policy.latency import A100, LLAMA_3_70B, ModelShape, analytic_model, tensor_parallel
from pdmesh_lab.sim.mesh import MeshShape
from pdmesh_lab.sim.report import SimReport
from pdmesh_lab.sim.simulator import SimConfig
from pdmesh_lab.sim.workload import Arrival, with_long_inputs, with_rate_scaled
from pdmesh_lab.studies.fast_sp import ring_lag
from pdmesh_lab.traces import read_trace

NUM_GPUS = 32
LONG_RANGE = (100_000, 500_000)

#: Of a layer and a member of a ring, which a step waits for them; the middle of what Tetris's Table 1 shows.
HOP_S = 0.6e-3

#: Each member of a group holds the KV of the whole prompt, and memory limits nothing here (docs/results/papers.md).
NUM_KV_TOKENS = 1 << 21


class Replicas(NamedTuple):
    """How the paper lays models out on the GPUs."""

    degree: int  # of tensor parallelism (Table 5)
    num_decode: int  # for short decodes (§6.2)
    num_reserved: int  # kept for long prompts by `reservation`


SMALL, LARGE = Replicas(degree=1, num_decode=4, num_reserved=24), Replicas(degree=4, num_decode=1, num_reserved=5)


class Model(NamedTuple):
    name: str
    shape: ModelShape
    replicas: Replicas


MODELS = (
    Model(
        "Mistral-v0.3 7B",
        ModelShape(num_parameters=7.1e9, num_layers=32, num_heads=32, num_kv_heads=8, head_dim=128),
        SMALL,
    ),
    Model(
        "Phi-3 14B",
        ModelShape(num_parameters=13.8e9, num_layers=40, num_heads=40, num_kv_heads=10, head_dim=128),
        SMALL,
    ),
    Model(
        "Yi 34B", ModelShape(num_parameters=33.9e9, num_layers=60, num_heads=56, num_kv_heads=8, head_dim=128), LARGE
    ),
    Model("Llama-3.1 70B", LLAMA_3_70B, LARGE),
)

#: The paper's ablations are without preemption, disaggregation of short decodes, colocation, fast sequence parallelism.
ROWS = (
    ("fifo", "fcfs"),
    ("reservation", "reservation"),
    ("priority", "short-first"),
    ("pecsched", "pecsched"),
    ("/PE", "pecsched-no-preemption"),
    ("/Dis", "pecsched-no-disaggregation"),
    ("/CoL", "pecsched-no-colocation"),
    ("/FSP", "pecsched"),
    ("pdmesh", "pdmesh"),
)


def study(model: Model, name: str, bundle: str) -> Study:
    replicas = model.replicas
    device = tensor_parallel(A100, replicas.degree)
    latency = analytic_model(model.shape, device)
    num_replicas = NUM_GPUS // replicas.degree
    num_decode = replicas.num_decode if bundle in DISAGGREGATED else 0
    # A long prompt takes the replicas of a node without tensor parallelism, else all of them.
    num_mixed = num_replicas - num_decode
    group_size = num_mixed // (4 if replicas.degree == 1 else 1)
    if bundle == "reservation":
        group_size = 8 if replicas.degree == 1 else replicas.num_reserved
    num_nodes = max(1, group_size * replicas.degree // 8)
    # Fast SP has a ring between nodes only; without it every replica is a member of the ring.
    ring = group_size if name == "/FSP" else num_nodes
    # Its segments are contiguous, so more members wait longer for the last one's attention.
    later = ring_lag(ring) / ring_lag(num_nodes)
    policy = PolicyConfig(
        latency=replace(latency, c_s=latency.c_s * later, d_s=latency.d_s * later),
        long_prompt_tokens=LONG_RANGE[0],
        chunk_tokens=2048,
        prefill_step_s=1.0,
        group_size=group_size,
        reserved_instances=replicas.num_reserved,
        sequence_parallel="pipelined" if bundle == "pdmesh" else "parallel",
        max_group_members=group_size,
        link_bytes_per_s=SIM.port_bytes_per_s,
    )
    mesh = MeshShape(
        num_prefill=0,
        num_decode=num_decode,
        num_mixed=num_mixed,
        kv_layout=layout(model.shape),
        num_kv_tokens=NUM_KV_TOKENS,
        joins_groups=True,
    )
    config = replace(SIM, parallel_step_s=HOP_S * model.shape.num_layers * ring)
    return Study(name=name, bundle=bundle, mesh=mesh, policy=policy, config=config)


SIM = SimConfig()
DISAGGREGATED = {"pecsched", "pecsched-no-preemption", "pecsched-no-colocation", "pdmesh"}


def workload(path: Path, limit: int | None, rate_scale: float, seed: int) -> list[Arrival]:
    arrivals = with_long_inputs(read_trace(path, limit=limit), 95, LONG_RANGE, random.Random(seed))
    return with_rate_scaled(arrivals, rate_scale)


def short_p99_s(figures: SimReport) -> float | None:
    return figures.short.queueing_s.p99


def short_throughput(figures: SimReport) -> float | None:
    return figures.short.requests_per_s


def long_jct_s(figures: SimReport) -> float | None:
    return figures.long.mean_jct_s


#: What the paper says of a row against another (§3.2, §6.3, §6.4), over its models.
CLAIMS: tuple[tuple[str, str, str, Callable[[SimReport], float | None], str], ...] = (
    ("pecsched", "fifo", "short queueing p99", short_p99_s, "-58 to -87 %"),
    ("pecsched", "fifo", "short throughput", short_throughput, "+42 to +318 %"),
    ("pecsched", "fifo", "long JCT", long_jct_s, "+4 to +7 %"),
    ("reservation", "fifo", "short queueing p99", short_p99_s, "+20 to +94 %"),
    ("reservation", "fifo", "short throughput", short_throughput, "-51 to -56 %"),
    ("pecsched", "reservation", "long JCT", long_jct_s, "+6 to +13 %"),
    ("priority", "pecsched", "short queueing p99", short_p99_s, "similar"),
    ("priority", "pecsched", "long JCT", long_jct_s, "unbounded"),
    ("/PE", "pecsched", "short queueing p99", short_p99_s, "+75 to +376 %"),
    ("/PE", "pecsched", "short throughput", short_throughput, "-21 to -48 %"),
    ("/PE", "pecsched", "long JCT", long_jct_s, "-14 to -18 %"),
    ("/Dis", "pecsched", "long JCT", long_jct_s, "+21 to +29 %"),
    ("/CoL", "pecsched", "long JCT", long_jct_s, "+23 to +26 %"),
    ("/FSP", "pecsched", "long JCT", long_jct_s, "+39 to +55 %"),
    ("pdmesh", "pecsched", "short queueing p99", short_p99_s, ""),
    ("pdmesh", "pecsched", "short throughput", short_throughput, ""),
    ("pdmesh", "pecsched", "long JCT", long_jct_s, ""),
)


def comparison(runs: Mapping[str, Mapping[str, SimReport]]) -> str:
    """Ours beside theirs; ``runs`` by model and row."""
    rows = [
        [f"{name} to {base}: {what}", theirs, *(change(figure(run[name]), figure(run[base])) for run in runs.values())]
        for name, base, what, figure, theirs in CLAIMS
        if all(name in run and base in run for run in runs.values())
    ]
    return table(("", "paper", *runs), rows)


def row(name: str, figures: SimReport, base: SimReport) -> list[str]:
    short, long = figures.short, figures.long
    return [
        name,
        number(short.queueing_s.p50),
        number(short.queueing_s.p99),
        change(short.queueing_s.p99, base.short.queueing_s.p99),
        number(short.requests_per_s),
        change(short.requests_per_s, base.short.requests_per_s),
        number(long.mean_jct_s),
        change(long.mean_jct_s, base.long.mean_jct_s),
        f"{long.num_preemptions:,}",
        number(figures.makespan_s),
    ]


HEADS = (
    "",
    "short queueing p50, s",
    "p99, s",
    "p99 to fifo",
    "short requests/s",
    "to fifo",
    "long JCT mean, s",
    "to fifo",
    "preemptions",
    "makespan, s",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trace", type=Path, help="azure_2023_conv.csv, without which it cannot run")
    parser.add_argument("--limit", type=int)
    parser.add_argument("--rate-scale", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--model", choices=[model.name for model in MODELS])
    parser.add_argument("--row", action="append")
    options = parser.parse_args()
    if options.trace is None:
        unavailable("give the Azure 2023 conversation trace with --trace FILE")
    arrivals = workload(options.trace, options.limit, options.rate_scale, options.seed)
    print(heading("PecSched's table, simulated"))
    all_runs: dict[str, dict[str, SimReport]] = {}
    for model in MODELS:
        if options.model in (None, model.name):
            runs = {
                name: run(study(model, name, bundle), arrivals, seed=options.seed)
                for name, bundle in ROWS
                if not options.row or name in options.row
            }
            all_runs[model.name] = runs
            base = next(iter(runs.values()))
            print(f"\n### {model.name}\n")
            print(table(HEADS, [row(name, figures, base) for name, figures in runs.items()]))
    print(f"\n### Ours beside theirs\n\n{comparison(all_runs)}")


if __name__ == "__main__":
    main()
