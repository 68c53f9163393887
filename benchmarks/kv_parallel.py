"""Decodes of contexts that are spread over several instances: simulated with given times, and on the real engine.

Simulated: the time per output token of 1M tokens of context on one instance, and over 4, with the times of
`pdmesh_lab.studies.roofline` for Llama 3 8B on single H100s. In each layer the home asks its members and has their
answers after two latencies of the network and what the bytes take at its port. Real: prompts of up to 32K tokens over 2
instances, each a process, against one engine alone.

    python benchmarks/kv_parallel.py [--tokens 32000]
"""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import replace
from pathlib import Path

import anyio
from report import Limits, heading

from pdmesh.engine.runner import TorchEngine
from pdmesh.model import KvLayout
from pdmesh.policy.config import PolicyConfig
from pdmesh.policy.latency import LinearLatencyModel, ModelShape
from pdmesh_lab.sim.mesh import MeshShape, study_core
from pdmesh_lab.sim.simulator import PART_EXCHANGE_S, SimConfig, Simulator
from pdmesh_lab.sim.workload import Arrival
from pdmesh_lab.studies.roofline import H100, Degrees, Roofline
from pdmesh_testing.checkpoints import TINY, write_checkpoint
from pdmesh_testing.exactness import engine_reference, mismatches, random_prompts
from pdmesh_testing.mesh import running_mesh

LLAMA_3_8B = ModelShape(
    num_parameters=8_030_000_000, num_layers=32, num_heads=32, num_kv_heads=8, head_dim=128, dtype_bytes=2
)
LAYOUT = KvLayout(num_layers=32, num_kv_heads=8, head_dim=128, block_size=16, dtype="bfloat16")
CONTEXT_TOKENS, NUM_MEMBERS = 1 << 20, 4
MOST_OF_ONE = 0.35
MAX_TOKENS = 32


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=32_000)
    arguments = parser.parse_args()
    limits = Limits()
    print(heading("Contexts spread over several instances"))
    one_s = simulated_tpot_s(1)
    exchange_s = star_s(NUM_MEMBERS)
    ratio = simulated_tpot_s(NUM_MEMBERS, exchange_s) / one_s
    what = f"simulated, 1M tokens over {NUM_MEMBERS}"
    print(f"{what}, {exchange_s * 1e6:.1f} us a layer: {ratio:.4f} of one, {limits.at_most(what, ratio, MOST_OF_ONE)}")
    print(f"without the exchange: {simulated_tpot_s(NUM_MEMBERS, 0.0) / one_s:.4f}")
    measured = simulated_tpot_s(NUM_MEMBERS, PART_EXCHANGE_S) / one_s
    print(f"with the exchange measured inside a host, {PART_EXCHANGE_S * 1e6:.0f} us: {measured:.4f}", flush=True)
    found = anyio.run(differences, arguments.tokens)
    what = f"real engine, up to {arguments.tokens} tokens over 2: differ"
    print(f"{what}: {len(found)}, {limits.at_most(what, len(found), 0.5)}")
    for each in found:
        print(f"  {each}")
    limits.end()


def star_s(num_members: int) -> float:
    """Return how long a home waits for its members' answers, beside what they read: one row, and no software."""
    num_bytes = LLAMA_3_8B.num_heads * (LLAMA_3_8B.head_dim * (LLAMA_3_8B.dtype_bytes + 4) + 4)
    return 2 * H100.remote.latency_s + (num_members - 1) * num_bytes / H100.remote.bytes_per_s


def simulated_tpot_s(num_instances: int, exchange_s: float = 0.0) -> float:
    """Return the time per output token of a context that so many instances hold equal ranges of."""
    mesh = MeshShape(
        num_prefill=1,
        num_decode=num_instances,
        num_mixed=0,
        kv_layout=LAYOUT,
        num_kv_tokens=CONTEXT_TOKENS + 4096,
    )
    limit = CONTEXT_TOKENS // num_instances if num_instances > 1 else 0
    model = Roofline(model=LLAMA_3_8B, device=H100, degrees=Degrees(1))
    instances = [(replace(profile, max_kv_tokens=limit), model) for profile, _ in mesh.instances(model)]
    predicted = LinearLatencyModel(a_s=5e-3, b_s=2e-5, c_s=0, d_s=0, decode_a_s=5e-3, decode_s=0)
    core = study_core("pdmesh", PolicyConfig(latency=predicted), 0)
    arrival = Arrival(arrival_s=0.0, num_prompt_tokens=CONTEXT_TOKENS - 64, num_output_tokens=65)
    config = SimConfig(part_exchange_s=exchange_s)
    (run,) = Simulator(core, instances, [arrival], config).run().requests
    times_s = run.token_times_s
    return (times_s[-1] - times_s[1]) / (len(times_s) - 2)


async def differences(num_tokens: int) -> list[str]:
    """What a mesh answers otherwise than one engine that attends to all of a context in one pass."""
    with tempfile.TemporaryDirectory() as folder:
        model = write_checkpoint(
            Path(folder) / "model", architecture="qwen3", seed=3, max_position_embeddings=2 * num_tokens
        )
        lengths = [num_tokens // 2 + 1, num_tokens * 3 // 4, num_tokens]
        engine = TorchEngine(model, num_blocks=num_tokens // 8, num_threads=1)
        prompts = random_prompts(lengths, TINY.vocab_size, seed=2)
        references = [engine_reference(engine, prompt, MAX_TOKENS) for prompt in prompts]
        limit = (num_tokens // 2 + 64) // 16 * 16
        settings = {"WORKER_MAX_KV_TOKENS_PER_INSTANCE": str(limit)}
        with running_mesh(Path(folder) / "mesh", model=model, decode=2, settings=settings) as mesh:
            async with mesh.client() as client:
                return await mismatches(client, mesh.model, references, concurrency=3)


if __name__ == "__main__":
    main()
