"""A simulated mesh that a closed loop of clients keeps busy, as in the evaluation of EB+.

Constants of steps are fitted to a few of that paper's figures. The scheduling core learns lengths, switch costs and
modes from the simulated steps, as it does in a service.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Any, NamedTuple

from pdmesh.kv_layout import KvLayout
from pdmesh.policy.batching import Mode
from pdmesh.policy.config import PolicyConfig
from pdmesh.policy.latency import LinearLatencyModel
from pdmesh_lab.sim.mesh import MeshShape, study_core
from pdmesh_lab.sim.result import RequestRun, SimResult, StepSpan
from pdmesh_lab.sim.simulator import SimConfig, Simulator
from pdmesh_lab.sim.workload import Arrival, ClosedLoop

#: KV of Qwen3-8B.
LAYOUT = KvLayout(num_layers=36, num_kv_heads=8, head_dim=128, block_size=16, dtype="bfloat16")

#: A duration that limits nothing.
NO_LIMIT_S = 1e4

#: Share of a run's requests that have ended at the start and at the end of the time that is measured.
STEADY = (0.3, 0.85)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepConstants:
    """Constants of the steps of Qwen3-8B on one GPU, and the GPU's room and link.

    ``crossover``: share of decodes above which a token of a mixed step costs more than one of a decode step.
    ``switch_steps``: cost of a prefill phase beside decodes, beyond its tokens, in decode steps without decodes.
    """

    decode_step_s: float
    prompt_token_s: float
    decode_token_s: float
    crossover: float
    num_kv_tokens: int
    link_bytes_per_s: float
    switch_steps: float

    @property
    def model(self) -> LinearLatencyModel:
        """Latency model of an instance that prefills and decodes: each phase is one step, which pays the switch."""
        return replace(self.prefill_model, a_s=self.switch_steps * self.decode_step_s)

    @property
    def prefill_model(self) -> LinearLatencyModel:
        """Latency model of an instance that only prefills, and never switches."""
        return LinearLatencyModel(
            a_s=self.decode_step_s,
            b_s=self.prompt_token_s,
            c_s=0.0,
            d_s=0.0,
            decode_a_s=self.decode_step_s,
            decode_s=self.decode_token_s,
            mixed_a_s=self.decode_step_s,
            interference_s=(self.decode_token_s - self.prompt_token_s) / self.crossover,
        )


Law = Callable[[random.Random, float], float]


def geometric(rng: random.Random, mean: float) -> float:
    """Draw a length with a constant hazard rate."""
    return 1 + math.log(1 - rng.random()) / math.log(1 - 1 / mean)


def uniform(rng: random.Random, mean: float) -> float:
    """Draw a length between 1 and twice the mean."""
    return rng.uniform(1, 2 * mean)


def gamma(shape: float) -> Law:
    """Return the law with this shape; the hazard rate grows with the output if the shape is above 1."""
    return lambda rng, mean: rng.gammavariate(shape, mean / shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadPart:
    """Some requests of a closed loop, with the number of clients and the mean lengths."""

    num_clients: int
    num_requests: int
    prompt: float
    output: float
    law: Law = uniform
    prompt_law: Law = uniform

    def arrivals(self, rng: random.Random) -> list[Arrival]:
        return [
            Arrival(
                arrival_s=0.0,
                num_prompt_tokens=max(1, int(self.prompt_law(rng, self.prompt))),
                num_output_tokens=max(2, int(self.law(rng, self.output))),
            )
            for _ in range(self.num_requests)
        ]


class InstanceSplit(NamedTuple):
    """Number of instances of each role."""

    prefill: int = 0
    decode: int = 0
    mixed: int = 1

    def __str__(self) -> str:
        return f"{self.prefill}P+{self.decode}D" if self.prefill else f"{self.mixed} mixed"


ONE_MIXED = InstanceSplit()


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedLoad:
    """Figures of a run. Latencies are means over requests; ``steady_tokens_per_s`` leaves out start and end.

    ``idle_share`` is the mean threshold in force, and ``exclusive_share`` the share of time in exclusive mode.
    """

    tokens_per_s: float
    steady_tokens_per_s: float
    ttft_s: float
    tpot_s: float
    idle_share: float
    exclusive_share: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Saturation:
    """A mesh, its policy and its load. ``changes`` are fields of `PolicyConfig`."""

    costs: StepConstants
    parts: Sequence[LoadPart]
    batching: str = "ebplus"
    pools: InstanceSplit = ONE_MIXED
    max_num_seqs: int = 1024
    changes: dict[str, Any] = field(default_factory=dict[str, Any])

    def run(self, seed: int = 0) -> ServedLoad:
        policy = PolicyConfig(
            latency=self.costs.prefill_model if self.pools.prefill else self.costs.model,
            batching=self.batching,
            link_bytes_per_s=self.costs.link_bytes_per_s,
            **(_UNLIMITED | self.changes),
        )
        mesh = MeshShape(
            num_prefill=self.pools.prefill,
            num_decode=self.pools.decode,
            num_mixed=self.pools.mixed,
            kv_layout=LAYOUT,
            num_kv_tokens=self.costs.num_kv_tokens,
            max_num_seqs=self.max_num_seqs,
        )
        core = study_core("pdmesh", policy, 0)
        instances = mesh.instances(policy.latency)
        rng = random.Random(seed)
        arrivals: list[Arrival] = []
        clients: list[tuple[int, int]] = []
        for part in self.parts:
            clients.append((len(arrivals), part.num_clients))
            arrivals += part.arrivals(rng)
        views: list[tuple[float, bool]] = []
        from_, until = (int(share * len(arrivals)) for share in STEADY)

        def on_ended(number: int) -> None:
            view = core.batching_of(instances[0][0].instance_id)
            if view is not None and from_ <= number < until:
                views.append((view.idle_share, view.mode is Mode.EXCLUSIVE))

        config = SimConfig(port_bytes_per_s=self.costs.link_bytes_per_s)
        loop = ClosedLoop(num_clients=clients)
        result = Simulator(core, instances, arrivals, config, closed_loop=loop).run(on_ended)
        ends_s = sorted(_end_s(run) for run in result.requests)
        shares = views or [(0.0, False)]
        return ServedLoad(
            tokens_per_s=sum(a.num_prompt_tokens + a.num_output_tokens for a in arrivals) / ends_s[-1],
            steady_tokens_per_s=_tokens_per_s(result, ends_s[from_], ends_s[until]),
            ttft_s=fmean([run.ttft_s or 0.0 for run in result.requests]),
            tpot_s=fmean([run.tpot_s or 0.0 for run in result.requests]),
            idle_share=fmean([share for share, _ in shares]),
            exclusive_share=fmean([exclusive for _, exclusive in shares]),
        )


#: Settings without targets, so that throughput alone decides, and a prefill phase is one step.
_UNLIMITED: dict[str, Any] = {
    "slo_tpot_s": NO_LIMIT_S,
    "slo_ttft_s": NO_LIMIT_S,
    "max_stall_s": NO_LIMIT_S,
    "prefill_step_s": NO_LIMIT_S,
    "max_chunk_tokens": 1 << 20,
}


def _end_s(run: RequestRun) -> float:
    return run.token_times_s[-1]


def _tokens_per_s(result: SimResult, from_s: float, until_s: float) -> float:
    """Return the tokens a second of all steps between the first starts of phases after ``from_s`` and ``until_s``."""
    begin_s, end_s = (_phase_start_s(result.instances[0].steps, at_s) for at_s in (from_s, until_s))
    num_tokens = 0.0
    for instance in result.instances:
        for step in instance.steps:
            inside_s = min(step.end_s, end_s) - max(step.start_s, begin_s)
            if inside_s > 0:
                whole = sum([chunk.num_tokens for chunk in step.chunks]) + step.num_decodes * step.num_steps
                num_tokens += whole * inside_s / (step.end_s - step.start_s)
    return num_tokens / (end_s - begin_s)


def _phase_start_s(steps: Sequence[StepSpan], at_s: float) -> float:
    """Return the start of the first prefill phase from ``at_s`` on; ``at_s`` without one."""
    decoded = False
    for step in steps:
        if step.chunks and not step.num_decodes and decoded and step.start_s >= at_s:
            return step.start_s
        decoded = step.num_decodes > 0
    return at_s
