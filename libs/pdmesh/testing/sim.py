"""Small simulated meshes for tests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypedDict

from pdmesh.model import KvLayout
from pdmesh.policy.base import PolicyConfig
from pdmesh.policy.latency import LatencyModel, LinearLatencyModel
from pdmesh.sim.mesh import MeshShape, study_core
from pdmesh.sim.result import SimResult
from pdmesh.sim.simulator import SimConfig, Simulator
from pdmesh.sim.workload import Arrival

#: 128 bytes of KV for a token, in two layers.
TINY_LAYOUT = KvLayout(num_layers=2, num_kv_heads=1, head_dim=8, block_size=4, dtype="float32")

#: A step with chunks takes 1/4 s and 1/64 s a token, one of decodes alone 1/8 s and 1/64 s a decode: exact in binary.
BINARY_MODEL = LinearLatencyModel(a_s=0.25, b_s=2**-6, c_s=0.0, d_s=0.0, decode_a_s=0.125, decode_s=2**-6)


class Pools(TypedDict, total=False):
    """Instances of each role."""

    prefill: int
    decode: int
    mixed: int


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
    group_size: int = 0,
    group_model: LatencyModel | None = None,
) -> SimResult:
    """Serve ``arrivals`` on a tiny mesh."""
    mesh = MeshShape(
        num_prefill=prefill,
        num_decode=decode,
        num_mixed=mixed,
        kv_layout=TINY_LAYOUT,
        num_kv_tokens=num_kv_tokens,
        max_num_seqs=max_num_seqs,
        group_size=group_size,
        num_transfer_backends=num_transfer_backends,
    )
    core = study_core(bundle, policy or PolicyConfig(chunk_tokens=chunk_tokens), seed)
    return Simulator(core, mesh.instances(model), arrivals, config, group_model=group_model).run()
