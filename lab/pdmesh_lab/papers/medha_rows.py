"""Rows of the papers' page for Medha: its schedulers and ours on one instance of two stages."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from pdmesh.model import Request
from pdmesh.policy.batching_theory import StepLimit
from pdmesh.policy.config import PolicyConfig
from pdmesh.policy.latency import A100, LLAMA_3_8B, analytic_model, tensor_parallel
from pdmesh.policy.seams import Packing
from pdmesh.policy.views import InstanceView, PartialStep
from pdmesh_lab.papers.open_loop import OpenLoop, layout_of, shown
from pdmesh_lab.sim.mesh import MeshShape
from pdmesh_lab.sim.workload import Synthetic, synthetic

HEADS = ("scheduler", "short TTFT p50, s", "p99", "long TTFT p50, s", "TPOT p50, ms", "p99")

#: Conversations like ShareGPT4's, 5 % of them with 128K to 1M tokens (§6.1).
LOAD = Synthetic(
    num_requests=60,
    requests_per_s=0.75,
    max_prompt_tokens=8000,
    median_prompt_tokens=730,
    sigma_prompt=1.6,
    median_output_tokens=415,
    sigma_output=0.55,
    long_share=0.05,
    long_range=(128_000, 1_000_000),
)

#: Llama-3 8B on 16 A100s, as two stages of eight (§6.2).
MESH = MeshShape(
    num_prefill=0,
    num_decode=0,
    num_mixed=1,
    prefill_stages=2,
    kv_layout=layout_of(LLAMA_3_8B),
    num_kv_tokens=8_000_000,
)
POLICY = PolicyConfig(
    latency=analytic_model(LLAMA_3_8B, tensor_parallel(A100, 8)),
    num_stages=2,
    prefill_step_s=0.02,
    slo_tpot_s=0.02,
)


@dataclass(frozen=True, slots=True)
class OnePrompt:
    """Packing ``of`` without multi-prefill batching and space sharing: a step has the chunk of one prompt."""

    of: Packing

    def num_tokens(
        self,
        instance: InstanceView,
        step: PartialStep,
        request: Request,
        start: int,
        *,
        num_reused_tokens: int = 0,
        least_other_tokens: int = 0,
    ) -> int:
        if step.chunks:
            return 0
        return self.of.num_tokens(instance, step, request, start, num_reused_tokens=num_reused_tokens)

    def step_limit(self, instance: InstanceView) -> StepLimit:
        return self.of.step_limit(instance)

    def takes_local(self, instance: InstanceView) -> bool:
        return self.of.takes_local(instance)

    def local_s(self, instance: InstanceView, num_tokens: int, start: int = 0) -> float:
        return self.of.local_s(instance, num_tokens, start)


#: Row of Medha's order with adaptive chunks alone, the paper's "LARS" (§6.4).
ONE_PROMPT = "`medha`, one prompt a step"

#: Bundle and static chunk of each row; `medha` and `pdmesh` have adaptive chunks.
ROWS: Mapping[str, tuple[str, int]] = {
    "Sarathi, chunks of 512 (`fcfs`)": ("fcfs", 512),
    "Sarathi, chunks of 2,048 (`fcfs`)": ("fcfs", 2048),
    "`lars`, chunks of 2,048": ("lars", 2048),
    ONE_PROMPT: ("medha", 2048),
    "`medha`": ("medha", 2048),
    "`pdmesh`": ("pdmesh", 2048),
}


def schedulers() -> Iterator[Sequence[str]]:
    """Yield the latencies under each scheduler."""
    arrivals = synthetic(LOAD, random.Random(0))
    for name, (bundle, chunk_tokens) in ROWS.items():
        policy = replace(POLICY, chunk_tokens=chunk_tokens)
        study = OpenLoop(bundle=bundle, policy=policy, mesh=MESH, long_tokens=LOAD.long_range[0])
        if name == ONE_PROMPT:
            study = replace(study, adapt=lambda built: replace(built, packing=OnePrompt(built.packing)))
        figures = study.run(arrivals)
        first, later = figures.short.ttft_s, figures.all.tpot_s
        tpots = [shown(None if each is None else 1e3 * each) for each in (later.p50, later.p99)]
        yield (name, shown(first.p50), shown(first.p99), shown(figures.long.ttft_s.p50), *tpots)
