"""Rows of the papers' page for Mnemosyne and Medha's parallelism: one prompt, or one decode, on simulated H100s."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from pdmesh.metrics import percentile
from pdmesh.policy.config import PolicyConfig
from pdmesh.policy.latency import (
    H100,
    LLAMA_3_8B,
    LLAMA_3_70B,
    ChunkShape,
    ModelShape,
    StepShape,
    analytic_model,
    tensor_parallel,
)
from pdmesh_lab.papers.open_loop import OpenLoop, layout_of
from pdmesh_lab.sim.mesh import MeshShape
from pdmesh_lab.sim.result import RequestRun
from pdmesh_lab.sim.simulator import PART_EXCHANGE_S
from pdmesh_lab.sim.workload import Arrival

M = 1_000_000

#: Largest difference from the paper that counts as equal.
WITHIN = 0.15

HEADS = ("figure", "paper", "ours", "like the paper's")


class Claim(NamedTuple):
    """A figure of the paper, or a bound ("<", ">"), and ours."""

    what: str
    paper: float
    ours: float
    bound: str = ""

    def cells(self) -> Sequence[str]:
        if self.bound:
            holds = self.ours <= self.paper if self.bound == "<" else self.ours >= self.paper
        else:
            holds = abs(self.ours / self.paper - 1) <= WITHIN
        sign = {"<": "at most ", ">": "at least "}.get(self.bound, "")
        return (self.what, f"{sign}{self.paper:g}", f"{self.ours:.3g}", "yes" if holds else "**no**")


def alone(
    model: ModelShape, num_tokens: int, stages: int = 1, members: int = 1, num_output_tokens: int = 1
) -> RequestRun:
    """Return the run of one request on instances of eight H100s for each stage and for each member of its context."""
    latency = analytic_model(model, tensor_parallel(H100, 8))
    limit = -(-num_tokens // members) + num_output_tokens if members > 1 else 0
    mesh = MeshShape(
        num_prefill=1,
        num_decode=members,
        num_mixed=0,
        prefill_stages=stages,
        kv_layout=layout_of(model),
        num_kv_tokens=2 * num_tokens,
        max_kv_tokens=limit,
    )
    policy = PolicyConfig(latency=latency, num_stages=stages, decodes_locally=False)
    arrival = Arrival(arrival_s=0.0, num_prompt_tokens=num_tokens, num_output_tokens=num_output_tokens)
    return OpenLoop(bundle="pdmesh", policy=policy, mesh=mesh).requests([arrival])[0]


def ttft_s(model: ModelShape, num_tokens: int, stages: int) -> float:
    """Return the TTFT of a prompt alone on an instance of several stages."""
    return alone(model, num_tokens, stages).ttft_s or 0.0


def efficiency(model: ModelShape, num_tokens: int, stages: int) -> float:
    """Return how much of ``stages`` times the speed of one stage a prefill reaches."""
    return ttft_s(model, num_tokens, 1) / ttft_s(model, num_tokens, stages) / stages


def tpot_s(model: ModelShape, num_tokens: int, members: int) -> float:
    """Return the TPOT of a decode whose context is spread over several instances."""
    return alone(model, num_tokens, members=members, num_output_tokens=50).tpot_s or 0.0


def steps_s(num_tokens: int, chunk: int, *, degree: int, members: int = 1) -> list[float]:
    """Return the step times of a prompt of the 8B model alone, in equal chunks on ``degree`` H100s for each member.

    Each member holds an equal range of the prompt, and all members with a range attend at the same time. The times are
    through all stages.
    """
    model = analytic_model(LLAMA_3_8B, tensor_parallel(H100, degree), overlaps=True)
    exchange_s, range_tokens = PART_EXCHANGE_S * LLAMA_3_8B.num_layers, num_tokens // members
    found: list[float] = []
    for start in range(0, num_tokens, chunk):
        shape = ChunkShape(min(chunk, num_tokens - start), min(start, range_tokens))
        found.append(model.step_s(StepShape((shape,), 0, 0)) + (exchange_s if start >= range_tokens else 0.0))
    return found


def software() -> Iterator[Claim]:
    """Yield Mnemosyne's Fig. 13: vLLM beside Mnemosyne, on eight GPUs and 1M tokens.

    vLLM's software takes as much longer for each step as makes its decodes 3.8 times slower, the paper's figure.
    """
    model = analytic_model(LLAMA_3_8B, tensor_parallel(H100, 8), overlaps=True)
    small, large = steps_s(M, 32, degree=8), steps_s(M, 4096, degree=8)
    more_s = (3.8 - 1) * model.step_s(StepShape((), 1, M))
    yield Claim("8B, 1M tokens: TTFT in chunks of 32 over 4,096 (§4.2)", 1.75, sum(small) / sum(large))
    yield Claim(
        "8B, 1M tokens, chunks of 32: TTFT of vLLM over Mnemosyne (Fig. 13)", 6, 1 + more_s * len(small) / sum(small)
    )


def shared_chunks() -> Iterator[Claim]:
    """Yield Mnemosyne's Fig. 18: prompts in chunks on instances of TP 4 and four stages, and members that share KV."""
    for millions, paper, bound in ((1, 1.0, ">"), (2, 1.0, ""), (4, 1.0, "<")):
        one, four = (sum(steps_s(millions * M, 32, degree=4, members=each)) for each in (1, 4))
        yield Claim(
            f"8B, {millions}M tokens, chunks of 32: TTFT of 4 members over 1 (Fig. 18)", paper, four / one, bound
        )
    one_s, four_s = (percentile(steps_s(4 * M, 128, degree=4, members=each), 95) or 0.0 for each in (1, 4))
    yield Claim("8B, 4M tokens, chunks of 128: P95 TBT beside it, ms (§4.4)", 100, 1e3 * one_s)
    yield Claim("8B, 4M tokens, chunks of 128: P95 TBT of 4 members over 1 (Fig. 18)", 1, four_s / one_s, "<")


def parallelism() -> Iterator[Sequence[str]]:
    """Yield the figures of prompts and decodes alone."""
    one_s = tpot_s(LLAMA_3_8B, 10 * M, 1)
    claims = (
        Claim("8B, 1M tokens on 128 GPUs: TTFT, s", 15, ttft_s(LLAMA_3_8B, M, 16), "<"),
        Claim("8B, 2M tokens on 128 GPUs: TTFT, s", 30, ttft_s(LLAMA_3_8B, 2 * M, 16), "<"),
        Claim("8B, 1M tokens: efficiency of 16 stages", 0.8, efficiency(LLAMA_3_8B, M, 16), ">"),
        Claim("70B, 1M tokens: efficiency of 8 stages (Medha)", 0.85, efficiency(LLAMA_3_70B, M, 8)),
        Claim("8B, 10M tokens: TPOT of 2 members over 1", 0.6, tpot_s(LLAMA_3_8B, 10 * M, 2) / one_s),
        Claim("8B, 10M tokens: 1 member over 4 (Mnemosyne)", 2.5, one_s / tpot_s(LLAMA_3_8B, 10 * M, 4)),
    )
    for claim in (*claims, *software(), *shared_chunks()):
        yield claim.cells()
