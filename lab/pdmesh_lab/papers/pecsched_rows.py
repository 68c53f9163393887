"""Rows of the papers' page for PecSched: the bundle, its baselines and its ablations on 32 A100s."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from pdmesh.metrics import Slo
from pdmesh.policy.config import PolicyConfig
from pdmesh.policy.latency import A100, LLAMA_3_70B, ModelShape, analytic_model, tensor_parallel
from pdmesh_lab.papers.open_loop import OpenLoop, layout_of
from pdmesh_lab.sim.mesh import MeshShape
from pdmesh_lab.sim.report import SimReport, report
from pdmesh_lab.sim.simulator import SimConfig
from pdmesh_lab.sim.workload import Synthetic, synthetic

NUM_GPUS, GPUS_OF_NODE = 32, 8

#: The Azure trace's lengths and rate, with 5 % of the prompts replaced (§6.2).
LOAD = Synthetic(num_requests=100, long_share=0.05)

#: Wait of a parallel step for a layer and a member of a ring; the middle of what Tetris's Table 1 shows.
HOP_S = 0.6e-3


class Model(NamedTuple):
    """A model, its tensor parallelism (Table 5), and its instances for short decodes and for reservation (§6.2)."""

    shape: ModelShape
    degree: int
    num_decode: int
    num_reserved: int


MODELS: Mapping[str, Model] = {
    "Mistral 7B": Model(
        ModelShape(num_parameters=7.1e9, num_layers=32, num_heads=32, num_kv_heads=8, head_dim=128), 1, 4, 24
    ),
    "Llama 70B": Model(LLAMA_3_70B, 4, 1, 5),
}

#: Bundle of each method. Without fast SP, every instance of a group is a member of the ring, instead of every node.
METHODS = {
    "FIFO": "fcfs",
    "Reservation": "reservation",
    "Priority": "short-first",
    "PecSched": "pecsched",
    "/PE": "pecsched-no-preemption",
    "/Dis": "pecsched-no-disaggregation",
    "/CoL": "pecsched-no-colocation",
    "/FSP": "pecsched",
}

#: Methods whose short requests decode on instances of their own.
DISAGGREGATED = ("PecSched", "/PE", "/CoL", "/FSP")


@dataclass(frozen=True)
class Found:
    """Figures of a method, and the share of long requests without a first token when the last request arrives."""

    figures: SimReport
    starved: float


def run(model: Model, method: str) -> Found:
    """Simulate a method. A group is a node's instances, or all of them if each takes several GPUs."""
    num_decode = model.num_decode if method in DISAGGREGATED else 0
    num_mixed = NUM_GPUS // model.degree - num_decode
    size = num_mixed // (4 if model.degree == 1 else 1)
    if method == "Reservation":
        size = min(GPUS_OF_NODE, model.num_reserved)
    num_nodes = max(1, size * model.degree // GPUS_OF_NODE)
    num_hops = model.shape.num_layers * (size if method == "/FSP" else num_nodes)
    sim = SimConfig(parallel_step_s=HOP_S * num_hops)
    policy = PolicyConfig(
        latency=analytic_model(model.shape, tensor_parallel(A100, model.degree)),
        long_prompt_tokens=LOAD.long_range[0],
        chunk_tokens=2048,
        prefill_step_s=1.0,
        group_size=size,
        reserved_instances=model.num_reserved,
        sequence_parallel="parallel",
        link_bytes_per_s=sim.port_bytes_per_s,
    )
    mesh = MeshShape(
        num_prefill=0,
        num_decode=num_decode,
        num_mixed=num_mixed,
        kv_layout=layout_of(model.shape),
        num_kv_tokens=1 << 21,
        joins_groups=True,
    )
    arrivals = synthetic(LOAD, random.Random(0))
    study = OpenLoop(bundle=METHODS[method], policy=policy, mesh=mesh, config=sim)
    result = study.simulate(arrivals)
    last_s = arrivals[-1].arrival_s
    longs = [each for each in result.requests if each.request.num_prompt_tokens >= LOAD.long_range[0]]
    late = sum(not each.token_times_s or each.token_times_s[0] > last_s for each in longs)
    return Found(report(result, long_tokens=LOAD.long_range[0], slo=Slo()), late / len(longs))


SHORT_P99, SHORT_RATE, LONG_JCT, PREEMPTIONS = "short queueing p99", "short requests/s", "long JCT", "preemptions"
FIGURES: Mapping[str, Callable[[SimReport], float | None]] = {
    SHORT_P99: lambda figures: figures.short.queueing_s.p99,
    SHORT_RATE: lambda figures: figures.short.requests_per_s,
    LONG_JCT: lambda figures: figures.long.mean_jct_s,
    PREEMPTIONS: lambda figures: figures.long.num_preemptions,
}


class Claim(NamedTuple):
    """The paper's range of a method's figure over another's, over the four models."""

    method: str
    base: str
    what: str
    least: float
    most: float

    def cells(self, runs: Sequence[Mapping[str, Found]]) -> Sequence[str]:
        """Return the row: our figure by model, and whether all of them are like the paper's."""
        ours: list[float] = []
        for run_of in runs:
            value, base = (FIGURES[self.what](run_of[each].figures) for each in (self.method, self.base))
            ours.append((value or 0.0) / base - 1 if base else 0.0)
        is_sign = all(each * self.least > 0 for each in ours)
        is_like = all((1 + self.least) * 0.85 <= 1 + each <= (1 + self.most) * 1.15 for each in ours)
        name = f"{self.method} over {self.base}: {self.what}"
        theirs = f"{self.least:+.0%} to {self.most:+.0%}"
        verdict = "yes" if is_sign and is_like else "sign" if is_sign else "**no**"
        return (name, theirs, *(f"{each:+.0%}" for each in ours), verdict)


CLAIMS = (
    Claim("PecSched", "FIFO", SHORT_P99, -0.87, -0.58),
    Claim("PecSched", "Reservation", SHORT_P99, -0.92, -0.61),
    Claim("Reservation", "FIFO", SHORT_P99, 0.2, 0.94),
    Claim("PecSched", "FIFO", SHORT_RATE, 0.42, 3.18),
    Claim("PecSched", "FIFO", LONG_JCT, 0.04, 0.07),
    Claim("/PE", "PecSched", SHORT_P99, 0.75, 3.76),
    Claim("/PE", "PecSched", LONG_JCT, -0.18, -0.14),
    Claim("/Dis", "PecSched", LONG_JCT, 0.21, 0.29),
    Claim("/CoL", "PecSched", LONG_JCT, 0.23, 0.26),
    Claim("/FSP", "PecSched", LONG_JCT, 0.39, 0.55),
    Claim("/Dis", "PecSched", PREEMPTIONS, 0.13, 0.19),
    Claim("/CoL", "PecSched", PREEMPTIONS, 0.39, 0.53),
    Claim("/FSP", "PecSched", PREEMPTIONS, 0.77, 1.22),
)

HEADS = ("claim", "paper", *MODELS, "like the paper's")


def claims() -> Iterator[Sequence[str]]:
    """Yield the paper's claims and tables, with our figures by model."""
    runs = [{method: run(model, method) for method in METHODS} for model in MODELS.values()]
    for claim in CLAIMS:
        yield claim.cells(runs)
    fifo, reserved = ([1 - (each[name].figures.busy_share or 0.0) for each in runs] for name in ("FIFO", "Reservation"))
    verdict = "yes" if max(fifo) <= 0.15 else "**no**"
    yield ("FIFO: idle time (Table 1)", "0.0%", *(f"{each:.1%}" for each in fifo), verdict)
    verdict = "sign" if all(a < b for a, b in zip(fifo, reserved, strict=True)) else "**no**"
    yield ("Reservation: idle time (Table 1)", "16% to 41%", *(f"{each:.0%}" for each in reserved), verdict)
    starved = [each["Priority"].starved for each in runs]
    verdict = "yes" if min(starved) >= 0.92 * 0.85 else "**no**"
    yield ("Priority: long requests starved (Table 2)", "92% to 100%", *(f"{each:.0%}" for each in starved), verdict)
