"""Small simulated meshes for tests."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import TypedDict

from pdmesh.kv_layout import KvLayout
from pdmesh.policy.config import PolicyConfig
from pdmesh.policy.latency import LatencyModel, LinearLatencyModel
from pdmesh_lab.sim.mesh import MeshShape, study_core
from pdmesh_lab.sim.result import SimResult
from pdmesh_lab.sim.simulator import SimConfig, Simulator
from pdmesh_lab.sim.workload import Arrival, Synthetic, synthetic

#: 128 bytes of KV for a token, in two layers.
TINY_LAYOUT = KvLayout(num_layers=2, num_kv_heads=1, head_dim=8, block_size=4, dtype="float32")

#: A step with chunks takes 1/4 s and 1/64 s a token, one of decodes alone 1/8 s and 1/64 s a decode: exact in binary.
BINARY_MODEL = LinearLatencyModel(a_s=0.25, b_s=2**-6, c_s=0.0, d_s=0.0, decode_a_s=0.125, decode_s=2**-6)


#: No two sums of its steps are equal by chance.
UNEVEN_MODEL = LinearLatencyModel(
    a_s=0.013, b_s=0.0021, c_s=3.1e-6, d_s=1.7e-6, decode_a_s=0.011, decode_s=0.0017, decode_context_s=2.3e-6
)


#: Mixed steps cost half as much again as decode steps: phases of prefill alone win.
PHASES_PAY_MODEL = LinearLatencyModel(
    a_s=0.006, b_s=0.00015, c_s=0.0, d_s=0.0, decode_a_s=0.004, decode_s=0.0002, mixed_a_s=0.006, interference_s=0.0001
)


class InstanceCounts(TypedDict, total=False):
    """Instances of each role."""

    prefill: int
    decode: int
    mixed: int


def without_targets(batching: str) -> PolicyConfig:
    """Return policies by `PHASES_PAY_MODEL` without targets that limit the choice of ``batching``."""
    never_s = 1e4
    return PolicyConfig(
        latency=PHASES_PAY_MODEL,
        batching=batching,
        slo_tpot_s=never_s,
        slo_ttft_s=never_s,
        max_stall_s=never_s,
        prefill_step_s=never_s,
    )


def a_workload(seed: int, *, num_requests: int, requests_per_s: float) -> list[Arrival]:
    """Return a random workload in which one prompt in eight is long, with 200 to 500 tokens."""
    shape = Synthetic(
        num_requests=num_requests,
        requests_per_s=requests_per_s,
        median_prompt_tokens=40,
        median_output_tokens=12,
        max_prompt_tokens=90,
        max_output_tokens=60,
        long_share=0.125,
        long_range=(200, 500),
    )
    return synthetic(shape, random.Random(seed))


def tiny_mesh(
    pools: InstanceCounts,
    *,
    num_kv_tokens: int = 4096,
    max_num_seqs: int = 8,
    num_transfer_backends: int = 4,
    joins_groups: bool = False,
) -> MeshShape:
    return MeshShape(
        num_prefill=pools.get("prefill", 0),
        num_decode=pools.get("decode", 0),
        num_mixed=pools.get("mixed", 0),
        kv_layout=TINY_LAYOUT,
        num_kv_tokens=num_kv_tokens,
        max_num_seqs=max_num_seqs,
        num_transfer_backends=num_transfer_backends,
        joins_groups=joins_groups,
    )


def simulate(
    arrivals: Sequence[Arrival],
    *,
    prefill: int = 0,
    decode: int = 0,
    mixed: int = 0,
    bundle: str = "fcfs",
    model: LatencyModel = BINARY_MODEL,
    chunk_tokens: int = 16,
    policy: PolicyConfig | None = None,
    num_kv_tokens: int = 4096,
    max_num_seqs: int = 8,
    num_transfer_backends: int = 4,
    seed: int = 0,
    config: SimConfig | None = None,
    joins_groups: bool = False,
) -> SimResult:
    """Serve ``arrivals`` on a tiny mesh."""
    mesh = tiny_mesh(
        {"prefill": prefill, "decode": decode, "mixed": mixed},
        num_kv_tokens=num_kv_tokens,
        max_num_seqs=max_num_seqs,
        num_transfer_backends=num_transfer_backends,
        joins_groups=joins_groups,
    )
    core = study_core(bundle, policy or PolicyConfig(chunk_tokens=chunk_tokens), seed)
    return Simulator(core, mesh.instances(model), arrivals, config).run()
