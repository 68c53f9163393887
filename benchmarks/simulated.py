"""What the benchmarks that repeat a paper's table have in common: bundles through a simulated mesh, side by side."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from pdmesh.metrics import Slo
from pdmesh.model import KvLayout
from pdmesh.policy.config import PolicyConfig
from pdmesh.policy.latency import ModelShape
from pdmesh_lab.sim.mesh import MeshShape, study_core
from pdmesh_lab.sim.report import SimReport, report
from pdmesh_lab.sim.simulator import SimConfig, Simulator
from pdmesh_lab.sim.workload import Arrival


@dataclass(frozen=True, slots=True, kw_only=True)
class Study:
    """One bundle on one mesh."""

    name: str  # the row's
    bundle: str
    mesh: MeshShape
    policy: PolicyConfig
    config: SimConfig = field(default_factory=SimConfig)


def run(study: Study, arrivals: Sequence[Arrival], *, seed: int = 0) -> SimReport:
    """Simulate to the end; progress and wall time go to stderr."""
    started_s = time.perf_counter()
    core = study_core(study.bundle, study.policy, seed)
    instances = study.mesh.instances(study.policy.latency)
    result = Simulator(core, instances, arrivals, study.config).run()
    figures = report(result, long_tokens=study.policy.long_prompt_tokens, slo=Slo())
    print(f"  {study.name}: {time.perf_counter() - started_s:.1f} s", file=sys.stderr, flush=True)
    return figures


def layout(shape: ModelShape) -> KvLayout:
    return KvLayout(
        num_layers=shape.num_layers,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        block_size=16,
        dtype="bfloat16",
    )


def num_kv_tokens(shape: ModelShape, num_devices: int, device_bytes: float = 80e9, share: float = 0.9) -> int:
    """What fits beside the weights in ``share`` of the memory (vLLM's default)."""
    token_bytes = layout(shape).token_bytes
    weights = shape.num_parameters * shape.dtype_bytes
    return int((num_devices * device_bytes * share - weights) / token_bytes) // 16 * 16


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Markdown."""
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def number(value: float | None) -> str:
    """Three significant digits."""
    if value is None:
        return "-"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def change(value: float | None, base: float | None) -> str:
    """In per cent of ``base``."""
    return "-" if value is None or not base else f"{(value / base - 1) * 100:+.0f} %"
