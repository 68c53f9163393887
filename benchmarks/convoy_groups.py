"""The convoy with long prompts computed in turn: two prefill instances, live beside what the simulator foretells.

The load of `benchmarks/convoy.py` on 2P+1D with the stand-in engine, whose steps sleep for what a latency model says,
so that cores hardly count: each prompt computed by one instance, then long ones by both in turn. The same arrivals and
policies are simulated with that latency model. Exits with 1 if a limit is missed: the p99 of the short requests' times
to first token at most 1.1 times what it is without pipelined prefill, and long prompts done sooner by what the
simulator foretells, within 15 %.

    python benchmarks/convoy_groups.py [--requests 200]
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from convoy import KV_CACHE_BYTES, LONG_TOKENS, OUTPUT_TOKENS, Figures, Planned, drive, figures_of, make_load
from report import Limits, heading

from pdmesh.metrics import percentile
from pdmesh.model import KvLayout
from pdmesh.policy.config import PolicyConfig
from pdmesh.policy.latency import LinearLatencyModel
from pdmesh_lab.sim.mesh import MeshShape, study_core
from pdmesh_lab.sim.simulator import Simulator
from pdmesh_lab.sim.workload import Arrival
from pdmesh_testing.checkpoints import TINY, write_checkpoint
from pdmesh_testing.mesh import running_mesh

#: 16K tokens take 8.6 s alone, in steps of 0.2 s; a decode step 10 ms.
MODEL = LinearLatencyModel(a_s=4e-3, b_s=4e-4, c_s=1.5e-8, d_s=7.5e-9, decode_a_s=1e-2, decode_s=1e-4)
TERMS = ("a_s", "b_s", "c_s", "d_s", "decode_a_s", "decode_s")
NUM_PREFILL = 2
SHORT_LIMIT, FORETOLD_LIMIT = 1.1, 0.15
VOCABULARY = 8192


def live(members: int, load: Sequence[Planned], seed: int) -> Figures:
    settings = {
        "WORKER_ENGINE": "fake",
        "WORKER_FAKE_LATENCY": ",".join(f"{term}={getattr(MODEL, term)!r}" for term in TERMS),
        "WORKER_KV_CACHE_BYTES": str(KV_CACHE_BYTES),
        "POLICY_MAX_GROUP_MEMBERS": str(members),
    }
    with tempfile.TemporaryDirectory() as name:
        shape = replace(TINY, max_position_embeddings=2 * LONG_TOKENS, vocab_size=VOCABULARY)
        model = write_checkpoint(Path(name) / "model", shape=shape)
        with running_mesh(Path(name), model=model, prefill=NUM_PREFILL, settings=settings) as mesh:
            return figures_of(asyncio.run(drive(mesh.base_url, mesh.model, load, seed)))


def simulated(members: int, load: Sequence[Planned]) -> Figures:
    shape = MeshShape(
        num_prefill=NUM_PREFILL,
        num_decode=1,
        num_mixed=0,
        kv_layout=KvLayout(num_layers=16, num_kv_heads=1, head_dim=16, block_size=16, dtype="bfloat16"),
        num_kv_tokens=KV_CACHE_BYTES // 1024,
        joins_groups=True,
    )
    arrivals = [
        Arrival(arrival_s=each.at_s, num_prompt_tokens=each.num_prompt_tokens, num_output_tokens=OUTPUT_TOKENS)
        for each in load
    ]
    core = study_core("pdmesh", PolicyConfig(latency=MODEL, max_group_members=members), 0)
    requests = Simulator(core, shape.instances(MODEL), arrivals).run().requests
    short_s = [run.ttft_s for run in requests if run.request.num_prompt_tokens < LONG_TOKENS and run.ttft_s is not None]
    long_s = [run.jct_s for run in requests if run.request.num_prompt_tokens == LONG_TOKENS and run.jct_s is not None]
    return Figures(
        num_finished=len(short_s) + len(long_s),
        num_requests=len(load),
        ttft_p50_s=percentile(short_s, 50) or 0.0,
        ttft_p99_s=percentile(short_s, 99) or 0.0,
        itl_p99_s=0.0,
        long_mean_s=sum(long_s) / len(long_s),
        makespan_s=0.0,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    load = make_load(options.requests, options.seed)
    print(heading(f"The convoy with pipelined prefill, stand-in engine, {NUM_PREFILL}P+1D"))
    print(f"{len(load)} requests, {sum(each.is_long for each in load)} of {LONG_TOKENS} tokens; seed {options.seed}")
    gains: dict[str, float] = {}
    ratios: dict[str, float] = {}
    for name in ("simulated", "live"):
        runs = [simulated(n, load) if name == "simulated" else live(n, load, options.seed) for n in (1, NUM_PREFILL)]
        for words, figures in zip(("alone", "in turn"), runs, strict=True):
            assert figures.long_mean_s is not None
            print(
                f"{name:10} {words:8} finished {figures.num_finished} of {figures.num_requests}, short TTFT p50 "
                f"{figures.ttft_p50_s * 1e3:.0f}, p99 {figures.ttft_p99_s * 1e3:.0f} ms, "
                f"long {figures.long_mean_s:.2f} s",
                flush=True,
            )
        alone, in_turn = runs
        assert alone.long_mean_s is not None
        assert in_turn.long_mean_s is not None
        gains[name] = alone.long_mean_s / in_turn.long_mean_s
        ratios[name] = in_turn.ttft_p99_s / alone.ttft_p99_s
    limits = Limits()
    stands = limits.at_most("short TTFT p99", ratios["live"], SHORT_LIMIT)
    live_ratio, foretold_ratio = ratios["live"], ratios["simulated"]
    print(
        f"short TTFT p99 {live_ratio:.2f} x without groups ({stands} of {SHORT_LIMIT}); foretold {foretold_ratio:.2f}"
    )
    off = abs(gains["live"] / gains["simulated"] - 1)
    stands = limits.at_most("long completion", off, FORETOLD_LIMIT)
    print(
        f"long completion {gains['live']:.2f} x sooner, foretold {gains['simulated']:.2f} x: off by {off:.1%} "
        f"({stands} of {FORETOLD_LIMIT:.0%})"
    )
    limits.end()


if __name__ == "__main__":
    main()
