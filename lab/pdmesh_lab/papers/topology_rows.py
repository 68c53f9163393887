"""Rows of the page's table about the topology that `pdmesh pool advise` chooses, beside pure pools.

A mesh of four instances serves requests with targets, and its decisions are recorded. From the recording alone, the
roles of the instances are chosen. Then each choice, all splits into prefill and decode pools, and mixed instances serve
the same requests with the true step times.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import cycle, groupby, product
from math import inf
from statistics import fmean
from typing import NamedTuple

from pdmesh.core.commands import Command
from pdmesh.core.config import CoreConfig, KvReservation, LatencyLearning
from pdmesh.core.events import Event
from pdmesh.core.scheduler import SchedulerCore
from pdmesh.decisions import Decision
from pdmesh.metrics import Slo
from pdmesh.model import InstanceProfile, MeasuredStep, Role
from pdmesh.operations import PoolCounts
from pdmesh.policy.bundles import make_bundle
from pdmesh.policy.config import PolicyConfig
from pdmesh.policy.latency import ChunkShape, LatencyModel, StepShape
from pdmesh.policy.latency_profile import self_measured
from pdmesh_lab.papers.ebplus_rows import GPUS
from pdmesh_lab.papers.saturation import LAYOUT, StepConstants
from pdmesh_lab.sim.advice import Proposal, RecordedLoad, recent, splits
from pdmesh_lab.sim.faults import NoisyModel
from pdmesh_lab.sim.mesh import MeshShape
from pdmesh_lab.sim.recorded import recorded_run
from pdmesh_lab.sim.report import report
from pdmesh_lab.sim.result import SimResult
from pdmesh_lab.sim.samples import fitted_model, step_noise
from pdmesh_lab.sim.simulator import Core, SimConfig, Simulator
from pdmesh_lab.sim.workload import Arrival

BUNDLE = "pdmesh"
NUM_INSTANCES = 4
NUM_REQUESTS = 120

#: Runs with other step times that judge pools.
NUM_RUNS = 2

#: Mean prompt and output, and the standard deviation of their logarithms.
LENGTHS: Mapping[str, tuple[int, int, float]] = {
    "prefill-heavy": (2048, 64, 0.4),
    "balanced": (1024, 256, 0.4),
    "decode-heavy": (256, 768, 0.4),
    "uneven": (768, 192, 1.0),
}

#: Targets for the time to the first token and for the time per output token, in seconds.
TARGETS = ((0.3, 0.05), (1.0, 0.035), (2.0, 0.02))

#: Requests a second, as a share of what the instances could compute with `BATCH` decodes in each step.
LOADS = (0.6, 0.85, 1.1)
BATCH = 128

#: The longest prompt and output.
MOST_TOKENS = 8192, 2048

#: Parameters of Qwen3-8B; prompts from this length on are long.
NUM_PARAMETERS, LONG = 8_000_000_000, 8192

#: Standard deviation of a step's time, relative.
NOISE = 0.1

#: Pools of the recorded mesh, in turn.
STARTS = (
    PoolCounts(prefill=NUM_INSTANCES // 2, decode=NUM_INSTANCES // 2),
    PoolCounts(prefill=0, decode=0, mixed=NUM_INSTANCES),
)

#: Least gain by which `pdmesh pool advise` changes roles.
MIN_GAIN = 0.02

#: Steps that an instance times when it starts.
START_STEPS = (
    *(StepShape((ChunkShape(*chunk),), 0, 0) for chunk in ((256, 0), (32, 0), (512, 512))),
    *(StepShape((), num_decodes, context) for num_decodes, context in ((1, 64), (8, 4096))),
    *(StepShape((ChunkShape(tokens, 0),), decodes, 64 * decodes) for tokens, decodes in ((256, 32), (64, 8), (256, 8))),
)


class Cell(NamedTuple):
    """A load and its targets."""

    gpu: str
    lengths: str
    targets: tuple[float, float]
    load: float

    @property
    def costs(self) -> StepConstants:
        return GPUS[self.gpu]

    def arrivals(self, seed: int) -> list[Arrival]:
        """Draw requests, which arrive by a Poisson process."""
        rng, now_s = random.Random(f"{self} {seed}"), 0.0
        *means, sigma = LENGTHS[self.lengths]
        prompt, output = means
        token_s = self.costs.decode_token_s + self.costs.decode_step_s / BATCH
        rate = self.load * NUM_INSTANCES / (prompt * self.costs.prompt_token_s + output * token_s)
        arrivals: list[Arrival] = []
        for _ in range(NUM_REQUESTS):
            now_s += rng.expovariate(rate)
            drawn = [
                max(2, min(most, round(mean * rng.lognormvariate(-(sigma**2) / 2, sigma))))
                for mean, most in zip(means, MOST_TOKENS, strict=True)
            ]
            arrivals.append(
                Arrival(
                    arrival_s=now_s,
                    num_prompt_tokens=drawn[0],
                    num_output_tokens=drawn[1],
                    max_tokens=MOST_TOKENS[1],
                    slo_ttft_s=self.targets[0],
                    slo_tpot_s=self.targets[1],
                )
            )
        return arrivals


CELLS = [Cell(*each) for each in product(GPUS, LENGTHS, TARGETS, LOADS)]


class Recorder:
    """A core whose decisions are kept."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self.check_integrity = core.check_integrity
        self.decisions: list[Decision] = []

    def handle(self, event: Event, now_s: float) -> list[Command]:
        commands = self._core.handle(event, now_s)
        self.decisions.append(Decision(now_s, event, commands))
        return commands


@dataclass(frozen=True, slots=True)
class Mesh:
    """Four instances of a GPU, with the settings of a service."""

    costs: StepConstants

    def core(self) -> SchedulerCore:
        policy = PolicyConfig(link_bytes_per_s=self.costs.link_bytes_per_s)
        config = CoreConfig(
            refuses_early=True,
            kv_reservation=KvReservation.ON_DEMAND,
            learning=LatencyLearning.MEASURED,
            policy=policy,
        )
        return SchedulerCore(config, make_bundle(BUNDLE, policy), random.Random(0))

    def profiles(self, pools: PoolCounts) -> list[InstanceProfile]:
        """Return the instances' profiles, each with the steps that it timed when it started."""
        shape = MeshShape(
            num_prefill=pools.prefill,
            num_decode=pools.decode,
            num_mixed=pools.mixed,
            kv_layout=LAYOUT,
            num_kv_tokens=self.costs.num_kv_tokens,
            joins_groups=True,
        )
        noisy = NoisyModel(self.costs.prefill_model, NOISE, random.Random(0))
        return [
            replace(profile, num_parameters=NUM_PARAMETERS, measured_steps=tuple(_timed(START_STEPS, noisy)))
            for profile, _ in shape.instances(self.costs.prefill_model)
        ]

    def serve(self, core: Core, pools: PoolCounts, arrivals: Sequence[Arrival], seed: int = 0) -> SimResult:
        """Simulate the arrivals with the true step times, and noise drawn with ``seed``."""
        instances = [
            (profile, NoisyModel(self.costs.prefill_model, NOISE, random.Random(f"{seed} {profile.instance_id}")))
            for profile in self.profiles(pools)
        ]
        return Simulator(core, instances, arrivals, SimConfig(port_bytes_per_s=self.costs.link_bytes_per_s)).run()

    def attainment(self, pools: PoolCounts, arrivals: Sequence[Arrival]) -> float:
        """Return the share of the arrivals that are served within their targets, as the mean of some runs."""
        runs = [self.serve(self.core(), pools, arrivals, seed) for seed in range(1, NUM_RUNS + 1)]
        return fmean([report(run, long_tokens=LONG, slo=Slo()).all.slo_attainment or 0.0 for run in runs])

    def advised(self, now: PoolCounts, arrivals: Sequence[Arrival]) -> PoolCounts:
        """Return the pools that are chosen from a recording of the mesh with the pools ``now``."""
        recorder = Recorder(self.core())
        self.serve(recorder, now, arrivals)
        run = recorded_run(recorder.decisions)
        like = self.profiles(now)[0]
        latency = fitted_model(run, self_measured(like))
        load = RecordedLoad(
            runs=recent(run, inf),
            like=like,
            latency=latency,
            noise=step_noise(run, latency),
            slo=Slo(),
            long_tokens=LONG,
            new_core=lambda _: self.core(),
        )
        advice = load.advise(Proposal(now, BUNDLE), [BUNDLE], min_gain=MIN_GAIN, default_tpot_s=inf)
        return (advice.best or advice.now).proposal.pools


def _timed(shapes: Iterable[StepShape], model: LatencyModel) -> Iterator[MeasuredStep]:
    for shape in shapes:
        chunk = shape.chunks[0] if shape.chunks else ChunkShape(0, 0)
        yield MeasuredStep(
            num_tokens=chunk.num_tokens,
            num_history_tokens=chunk.num_history_tokens,
            num_decodes=int(shape.num_decodes),
            num_decode_context_tokens=int(shape.num_decode_context_tokens),
            duration_s=model.step_s(shape),
        )


class Judged(NamedTuple):
    """Shares of a cell's requests that are served within their targets, by pools, and the chosen pools."""

    chosen: PoolCounts
    attainments: Mapping[PoolCounts, float]

    @property
    def split(self) -> float:
        """The share of the best split into prefill and decode pools."""
        return max(share for pools, share in self.attainments.items() if not pools.mixed)

    @property
    def mixed(self) -> float:
        return self.attainments[PoolCounts(prefill=0, decode=0, mixed=NUM_INSTANCES)]

    @property
    def over_better(self) -> float:
        """The share of the chosen pools over the better of the best split and mixed instances."""
        better = max(self.split, self.mixed)
        return self.attainments[self.chosen] / better if better else 1.0


def judged(cell: Cell, now: PoolCounts, judge_seed: int = 0) -> Judged:
    """Choose pools from a recording of the cell's requests, and judge them on requests drawn with ``judge_seed``."""
    mesh = Mesh(cell.costs)
    chosen = mesh.advised(now, cell.arrivals(0))
    tried = dict.fromkeys([*splits(NUM_INSTANCES), chosen])
    return Judged(chosen, {pools: mesh.attainment(pools, cell.arrivals(judge_seed)) for pools in tried})


HEADS = ("GPU", "prompt, output", "targets, s", *(f"load {load:g}: split; mixed; chosen" for load in LOADS), "least")


def topologies() -> Iterator[Sequence[str]]:
    """Yield the shares of requests in time, by load, and the least of the chosen pools' over the better of the two."""
    for (gpu, lengths, targets), cells in groupby(zip(CELLS, cycle(STARTS), strict=False), lambda each: each[0][:3]):
        found = [judged(cell, start) for cell, start in cells]
        shown = [
            f"{each.split:.0%}; {each.mixed:.0%}; {short(each.chosen)} {each.attainments[each.chosen]:.0%}"
            for each in found
        ]
        least = min(each.over_better for each in found)
        yield (gpu, lengths, f"{targets[0]:g}; {targets[1]:g}", *shown, f"{least:.3f}")


def short(pools: PoolCounts) -> str:
    """Return, for instance, "2P+1D+1M"."""
    return "+".join(f"{pools.of(role)}{role[0].upper()}" for role in Role if pools.of(role))
