"""Studies of requests that arrive at times of their own, through the scheduling core."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from pdmesh.kv_layout import KvLayout
from pdmesh.metrics import Slo
from pdmesh.policy.bundle import Bundle
from pdmesh.policy.config import PolicyConfig
from pdmesh.policy.latency import ModelShape
from pdmesh_lab.sim.mesh import MeshShape, study_core
from pdmesh_lab.sim.report import SimReport, report
from pdmesh_lab.sim.result import RequestRun, SimResult
from pdmesh_lab.sim.simulator import SimConfig, Simulator
from pdmesh_lab.sim.workload import Arrival


def layout_of(model: ModelShape) -> KvLayout:
    """Return the KV layout of a model, in blocks of 16 tokens."""
    return KvLayout(
        num_layers=model.num_layers,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        block_size=16,
        dtype="bfloat16",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenLoop:
    """A mesh, a bundle that ``adapt`` may change, and its settings. Prompts from ``long_tokens`` on are long."""

    bundle: str
    policy: PolicyConfig
    mesh: MeshShape
    long_tokens: int = 8192
    config: SimConfig = field(default_factory=SimConfig)
    adapt: Callable[[Bundle], Bundle] = lambda bundle: bundle

    def requests(self, arrivals: Sequence[Arrival]) -> Sequence[RequestRun]:
        """Simulate the arrivals and return each request's run."""
        return self.simulate(arrivals).requests

    def run(self, arrivals: Sequence[Arrival]) -> SimReport:
        """Simulate the arrivals and return their figures."""
        return report(self.simulate(arrivals), long_tokens=self.long_tokens, slo=Slo())

    def simulate(self, arrivals: Sequence[Arrival]) -> SimResult:
        """Simulate the arrivals."""
        core = study_core(self.bundle, self.policy, 0, adapt=self.adapt)
        return Simulator(core, self.mesh.instances(self.policy.latency), arrivals, self.config).run()


def shown(value: float | None) -> str:
    """Return a figure with three digits, or a dash."""
    return "-" if value is None else f"{value:.3g}"
