"""How many agents ours and vLLM hold: AIPerf's AgentX scenario, the same checkpoint, sessions and bytes of KV.

    python -m benchmarks.speed.agents_held --vllm VENV --aiperf VENV [--systems mixed 1p1d] [--agents 6 9 12 18 24]

A system holds a number of agents if in 60 s, the p90 of TTFT is at most 2 s, and the p10 of tokens a second and user at
least 15. Each system is asked for more agents until it holds them no longer. Every number brings new sessions. Lengths
are divided by 32. The model has 13M parameters in bf16, and 1 GiB of KV, which 1P+1D halves. vLLM computes in fp32 or
bf16, with its settings of threads; ours on all cores or one. Exit code 1 if one of ours holds less than twice as many.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from dataclasses import replace
from pathlib import Path

from benchmarks.harness.report import Limits, heading, unavailable
from benchmarks.harness.vllm_server import THREADS, running_pdmesh, running_vllm
from pdmesh_testing.agentx import run_agentx
from pdmesh_testing.checkpoints import LLAMA_82M, write_checkpoint

SHAPE = replace(LLAMA_82M, hidden_size=384, intermediate_size=1024, num_layers=6, num_heads=6, num_kv_heads=2)
MOST_TTFT_S, LEAST_RATE, LEAST_RATIO = 2.0, 15.0, 2.0
MIXED, KV = {"prefill": 0, "decode": 0, "mixed": 1}, {"WORKER_KV_CACHE_BYTES": "1GiB"}
OURS = {
    "mixed": (MIXED, KV),
    "mixed-1": (MIXED, {**KV, "WORKER_NUM_THREADS": "1"}),
    "1p1d": ({"prefill": 1, "decode": 1, "mixed": 0}, {"WORKER_KV_CACHE_BYTES": "512MiB"}),
}
VLLM = {f"vllm-{dtype}-{n}": (dtype, threads) for dtype in ("float32", "bfloat16") for n, threads in enumerate(THREADS)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm", default=os.environ.get("PEER_VENV", "."), help="environment of vLLM")
    parser.add_argument("--aiperf", default=".", help="environment of AIPerf")
    parser.add_argument("--systems", nargs="+", choices=[*VLLM, *OURS], default=[*VLLM, *OURS])
    parser.add_argument("--agents", nargs="+", type=int, default=[6, 9, 12, 18, 24, 36])
    options = parser.parse_args()
    print(heading("Agents held: AIPerf's AgentX with lengths / 32, Llama 13M"), flush=True)
    vllm, aiperf = Path(options.vllm, "bin", "vllm"), Path(options.aiperf, "bin", "aiperf")
    if not vllm.exists() or not aiperf.exists():
        unavailable("give the environments of vLLM and AIPerf with --vllm and --aiperf")
    os.environ["VLLM_CPU_KVCACHE_SPACE"] = "1"
    limits, held = Limits(), dict.fromkeys(options.systems, 0)
    print("| system | agents | TTFT p90, s | tokens/s/user p10 |\n|---|---|---|---|", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        model = write_checkpoint(Path(folder, "model"), shape=SHAPE, dtype="bfloat16", initializer_gain=1.0)
        for system in options.systems:
            if system in OURS:
                name, server = model.name, running_pdmesh(model, OURS[system][1], **OURS[system][0])
            else:
                name, server = str(model), running_vllm(vllm, model, VLLM[system][1], dtype=VLLM[system][0])
            with server as url:
                for n in options.agents:
                    run = run_agentx(aiperf, Path(folder, f"{system} {n}"), url, name, model, num_agents=n, seconds=60)
                    ttft_s = run.figure("time_to_first_token", "p90") / 1e3
                    rate = run.figure("output_token_throughput_per_user", "p10")
                    print(f"| {system} | {n} | {ttft_s:.2f} | {rate:.1f} |", flush=True)
                    if ttft_s > MOST_TTFT_S or rate < LEAST_RATE:
                        break
                    held[system] = n
    peer = max((held[system] for system in held if system in VLLM), default=0)
    for system in held.keys() & OURS if peer else ():
        print(f"{system} over vLLM: {limits.at_least(system, held[system] / peer, LEAST_RATIO)}")
    limits.end()


if __name__ == "__main__":
    main()
