"""Tetris's evaluation, simulated (§2.4, §7): its two worked examples, its planner's cost (Table 2), how much load keeps
first tokens in time beside fixed groups (Fig. 8), and what single chunks, a fixed improvement rate and pipelined
prefill change.

    python benchmarks/tetris_table.py

16 A100s compute prompts of Llama-3-8B, as in the paper's cluster; what a chunk takes by the size of its group is fitted
to the paper's Table 1. The paper's traces are not public: lengths are log-normal, cut to its ranges, with its means.
Prompts are planned as they come, and instances do what they are given in order, as in the paper's own simulator: no
decodes, no transfers. The load that is sustained is the largest, in steps of 0.01 requests/s, with 99 % of first tokens
within 25 times the mean that fixed groups of 8 have without load. Ours has prompts wait in line until somebody is free,
and gives instances a price instead of an improvement rate; "with targets" it knows that limit, and lets those pass who
can be in time. Beside it is what nobody can exceed (`tetris_bound.py`). Exits with 1 if a limit is missed: examples
within 7 % beyond the second of waiting, as the fit is of the paper's table, and 20 % more load than fixed groups of 8.

The last table has what the scheduling core makes of the same lengths when it drives simulated instances that compute
long prompts in turn or at once, step by step and with their KV on links, beside the planners alone at the same load.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple, Protocol

from report import Limits, heading, quantile
from simulated import layout, table
from tetris_bound import least_work, num_late

from pdmesh.garbage import rare_collections
from pdmesh.model import InstanceId
from pdmesh.policy.config import PolicyConfig
from pdmesh.policy.improvement import ImprovementInForce, ImprovementTable
from pdmesh.policy.latency import LLAMA_3_8B, TETRIS_A100_LLAMA_3_8B, ChunkShape, StepShape, sequence_parallel
from pdmesh.policy.sequence_parallel import ElasticPlanner, FreeAt, PlannedChunk, SequenceParallelPlanner
from pdmesh_lab.sim.mesh import MeshShape, study_core
from pdmesh_lab.sim.simulator import SimConfig, Simulator
from pdmesh_lab.sim.workload import Arrival
from pdmesh_lab.studies.first_tokens import (
    PricedPlanner,
    PromptArrival,
    first_tokens,
    first_tokens_by_price,
    improvement_table,
    poisson,
)
from pdmesh_lab.studies.planners import ChunkwisePlanner, FixedPlanner

LATENCY = TETRIS_A100_LLAMA_3_8B
NUM_INSTANCES = 16
#: Instances, seconds until they are free, prompts and their sizes, and the paper's first tokens.
EXAMPLES = (((16, 8), (1.53, 1.84)), ((8, 8), (1.58, 1.31)))
PAPER_COST_US = {8: (22.8, 52.5), 16: (25.8, 86.8), 32: (22.9, 53.4), 64: (24.9, 45.1), 128: (30.6, 73.7)}
IMPROVEMENT_RATES = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.75)
SLOWDOWN = 25.0
STEP_PER_S = 0.01

#: About two thirds of what fixed groups of 8 sustain.
CORE_LOADS = {"short": 2.6, "medium": 2.0, "long": 1.1}
CORE_ROWS = (
    ("core, one instance each", "tetris", 1, "pipelined"),
    ("core, `tetris` by pipelined prefill", "tetris", NUM_INSTANCES, "pipelined"),
    ("core, `tetris` by parallel step", "tetris", NUM_INSTANCES, "parallel"),
    ("core, `pdmesh` by pipelined prefill", "pdmesh", NUM_INSTANCES, "pipelined"),
    ("core, `pdmesh` by parallel step", "pdmesh", NUM_INSTANCES, "parallel"),
)
PORT_BYTES_PER_S = 1e11  # between NVLink's and an adapter's for each device


class Lengths(NamedTuple):
    least: int
    most: int
    mean: float

    def drawn(self, rng: random.Random) -> list[int]:
        """Log-normal lengths, those outside of the range drawn again, whose median is chosen for the mean."""
        normals = [rng.gauss(0, SIGMA) for _ in range(40_000)]

        def cut(median: float) -> list[int]:
            lengths = [round(median * math.exp(normal)) for normal in normals]
            return [length for length in lengths if self.least <= length <= self.most]

        low, high = self.least / 4, float(self.most)
        for _ in range(30):
            middle = (low + high) / 2
            low, high = (middle, high) if statistics.fmean(cut(middle)) < self.mean else (low, middle)
        return cut(high)[:20_000]


TRACES = {
    "short": Lengths(4_000, 95_000, 23_600),
    "medium": Lengths(8_000, 142_000, 32_800),
    "long": Lengths(16_000, 190_000, 50_100),
}
SIGMA = 0.8  # of the logarithm
LEAST_WORK_S = least_work(LATENCY)


def alone_s(num_tokens: int) -> float:
    """What a prompt takes one instance."""
    return LATENCY[1].step_s(StepShape((ChunkShape(num_tokens, 0),), 0, 0))


def share_of_work_s(num_tokens: int) -> float:
    """What a prompt takes all instances at the least."""
    return LEAST_WORK_S(num_tokens) / NUM_INSTANCES


@dataclass(frozen=True, slots=True)
class GroupModel:
    """Chunks in turn: each member begins when it is free, and all end together but for a chunk of ``tail_s``.

    So a group costs the sum of what its members give, whenever each begins. A simple model of
    `pdmesh.policy.prefill_groups`, on one instance's latency; what it takes to pass KV on is hidden behind computing.
    """

    tail_s: float = 0.3  # a constant time of 30 ms is a tenth of a chunk
    overhead: float = 0.05  # of the constants of many chunks
    sizes: Sequence[int] = (1, 2, 4, 8, 16)

    def plan(
        self,
        num_tokens: int,
        num_done_tokens: int,
        held: Collection[InstanceId],
        pool: Sequence[FreeAt],
        *,
        price: float,
        within_s: float,
    ) -> tuple[PlannedChunk, ...]:
        """The group of the least cost, as `ElasticPlanner` has it; one entry, from its first member's start."""
        line = sorted(pool)
        whole_s = alone_s(num_tokens)
        costs: list[tuple[bool, float, int, float]] = []
        for size in self.sizes:
            given_s = sum([free_s for free_s, _ in line[:size]])
            extra = self.overhead * whole_s / size + self.tail_s * (1 - 1 / size) if size > 1 else 0.0
            end_s = (given_s + whole_s) / size + extra
            if line[size - 1][0] <= end_s:
                costs.append((end_s > within_s, end_s + price * (size * end_s - given_s), size, end_s))
        _, _, size, end_s = min(costs)
        return (PlannedChunk(num_tokens, tuple([name for _, name in line[:size]]), line[0][0], end_s),)


class Row(Protocol):
    """Who plans, and the first tokens that come of it."""

    def expect(self, lengths: Sequence[int], seed: int) -> None:
        """What it may know before: the lengths that come."""
        ...

    def ttfts_s(self, prompts: Sequence[PromptArrival], per_s: float, limit_s: float) -> list[float]: ...


@dataclass(slots=True)
class AtArrival:
    """Planned as they come, at one improvement rate or (None), as in the paper, at what a table has for the load.

    The table is looked up every 30 s; that it knows the load of the first 30 s, too, is in its favour.
    """

    of_rate: Callable[[float], SequenceParallelPlanner]
    fixed_rate: float | None = 0.0
    table: ImprovementTable | None = None
    known: dict[float, SequenceParallelPlanner] = field(default_factory=dict[float, SequenceParallelPlanner])

    def expect(self, lengths: Sequence[int], seed: int) -> None:
        if self.fixed_rate is None:
            planners = [(rate, self._at(rate)) for rate in IMPROVEMENT_RATES]
            loads = [0.5 * step for step in range(1, 17)]
            self.table = improvement_table(planners, NUM_INSTANCES, lengths, loads, num_requests=300, seed=seed + 100)

    def ttfts_s(self, prompts: Sequence[PromptArrival], per_s: float, limit_s: float) -> list[float]:
        if self.table is None:
            planner = self._at(self.fixed_rate or 0.0)
            return first_tokens(prompts, NUM_INSTANCES, lambda _: planner)
        in_force = ImprovementInForce(self.table)
        in_force.rate = self.table.nearest(per_s)
        return first_tokens(prompts, NUM_INSTANCES, lambda now_s: self._at(in_force.arrived(now_s)))

    def _at(self, rate: float) -> SequenceParallelPlanner:
        if rate not in self.known:
            self.known[rate] = self.of_rate(rate)
        return self.known[rate]


@dataclass(frozen=True, slots=True)
class ByPrice:
    """In line until somebody is free, at the price of that moment; perhaps with the limit as everybody's target."""

    planner: PricedPlanner
    has_target: bool = False

    def expect(self, lengths: Sequence[int], seed: int) -> None:
        pass

    def ttfts_s(self, prompts: Sequence[PromptArrival], per_s: float, limit_s: float) -> list[float]:
        target_s = limit_s if self.has_target else math.inf
        return first_tokens_by_price(prompts, NUM_INSTANCES, self.planner, alone_s, target_s)


BASELINE, OURS = "fixed groups of 8", "ours, parallel step, with targets"


def contenders() -> dict[str, Row]:
    return {
        "fixed groups of 16": AtArrival(lambda _: FixedPlanner(LATENCY, 16)),
        BASELINE: AtArrival(lambda _: FixedPlanner(LATENCY, 8)),
        "greedy (LoongServe, disaggregated)": AtArrival(
            lambda rate: ChunkwisePlanner(LATENCY, rate, single_chunk=True)
        ),
        "Tetris, single chunk": AtArrival(lambda rate: ChunkwisePlanner(LATENCY, rate, single_chunk=True), None),
        "Tetris, rate fixed at 0.1": AtArrival(lambda rate: ChunkwisePlanner(LATENCY, rate), 0.1),
        "Tetris, rate fixed at 0.5": AtArrival(lambda rate: ChunkwisePlanner(LATENCY, rate), 0.5),
        "Tetris (Algorithms 1 to 3)": AtArrival(lambda rate: ChunkwisePlanner(LATENCY, rate), None),
        "ours, parallel step, by improvement rate": AtArrival(lambda rate: ElasticPlanner(LATENCY, rate), None),
        "ours, parallel step, single chunk": ByPrice(ElasticPlanner(LATENCY, min_chunk_tokens=10**9)),
        "ours, parallel step": ByPrice(ElasticPlanner(LATENCY)),
        "ours, pipelined prefill (model)": ByPrice(GroupModel()),
        OURS: ByPrice(ElasticPlanner(LATENCY), has_target=True),
        "ours, pipelined prefill (model), with targets": ByPrice(GroupModel(), has_target=True),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--cost-cases", type=int, default=1000)
    parser.add_argument("--core-requests", type=int, default=150)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--trace", choices=sorted(TRACES), action="append")
    options = parser.parse_args()
    print(heading("Tetris, simulated"), "\n")
    limits = Limits()
    worked_examples(limits)
    with rare_collections():
        planner_cost(options.cost_cases, options.seed)
    rows = [row for name in options.trace or TRACES for row in trace(name, options.requests, options.seed, limits)]
    print(table(HEADS, rows), "\n")
    if options.core_requests:
        cells = [
            cell for name in options.trace or TRACES for cell in by_core(name, options.core_requests, options.seed)
        ]
        print(table(CORE_HEADS, cells), "\n")
    limits.end()


def worked_examples(limits: Limits) -> None:
    """Prompts of 32K and 16K on 16 instances that are busy for a second."""
    rows: list[list[str]] = []
    for sizes, paper_s in EXAMPLES:
        frees_s = {InstanceId(f"prefill-{index:03d}"): 1.0 for index in range(16)}
        ours_s: list[float] = []
        for size, num_tokens in zip(sizes, (32_768, 16_384), strict=True):
            chunk = FixedPlanner(LATENCY, size).plan(num_tokens, 0, (), [(s, name) for name, s in frees_s.items()])[-1]
            frees_s.update(dict.fromkeys(chunk.members, chunk.end_s))
            ours_s.append(chunk.end_s)
        pairs = list(zip(ours_s, paper_s, strict=True))
        off = max(abs((ours - paper) / (paper - 1)) for ours, paper in pairs)
        verdict = limits.at_most(f"example {sizes[0]}, {sizes[1]}", off, 0.07)
        rows.append([f"{sizes[0]}, then {sizes[1]}", *(f"{ours:.2f} ({paper:.2f})" for ours, paper in pairs), verdict])
    heads = ("instances for 32K, then 16K", "first token, s (paper)", "second, s (paper)", "off by")
    print(table(heads, rows), "\n")


def planner_cost(num_cases: int, seed: int) -> None:
    """Table 2: random lengths and queues. Sizes above 16 are derived from one instance."""
    rows: list[list[str]] = []
    for size, (paper_mean_us, paper_worst_us) in PAPER_COST_US.items():
        sizes = [2**power for power in range(size.bit_length())]
        latency = {each: LATENCY.get(each) or sequence_parallel(LATENCY[1], each) for each in sizes}
        cells = [str(size)]
        ours = partial(ElasticPlanner(latency).plan, price=0.5)
        for plan in (ours, ChunkwisePlanner(latency, 0.3).plan):
            rng = random.Random(seed)
            times_us: list[float] = []
            for _ in range(num_cases):
                pool = [(rng.uniform(0, 5), InstanceId(f"prefill-{index}")) for index in range(size)]
                num_tokens = rng.randint(4096, 262_144)
                began_s = time.process_time()
                plan(num_tokens, 0, (), pool)
                times_us.append((time.process_time() - began_s) * 1e6)
            mean_us, p99_us = statistics.fmean(times_us), quantile(times_us, 0.99)
            cells.append(f"{mean_us:.0f} / {p99_us:.0f} / {max(times_us):.0f}")
        rows.append([*cells, f"{paper_mean_us} / - / {paper_worst_us}"])
    heads = ("largest group", "ours, us: mean / p99 / worst", "Algorithms 1 to 3, Python", "the paper's, C++")
    print(table(heads, rows), "\n")


HEADS = ("lengths", "", "requests/s in time", f"beside {BASELINE}", "at the baseline's: mean, s", "p50, s", "p99, s")
BOUND = "nobody serves more (least work, no gaps, fewest late)"


def trace(name: str, num_requests: int, seed: int, limits: Limits) -> list[list[str]]:
    """Every row's figures for one distribution of lengths."""
    lengths = TRACES[name].drawn(random.Random(seed))
    known = contenders()
    limit_s = SLOWDOWN * statistics.fmean(known[BASELINE].ttfts_s(poisson(lengths, 0.02, 300, seed), 0.02, math.inf))
    workloads = [poisson(lengths, 1.0, num_requests, seed + index) for index in range(2)]

    def at(per_s: float) -> list[list[PromptArrival]]:
        return [[PromptArrival(each.arrival_s / per_s, each.num_tokens) for each in prompts] for prompts in workloads]

    def ttfts_s(row: Row, per_s: float) -> list[float]:
        return [found for prompts in at(per_s) for found in row.ttfts_s(prompts, per_s, limit_s)]

    def is_in_time(row: Row, per_s: float) -> bool:
        return quantile(ttfts_s(row, per_s), 0.99) <= limit_s

    def is_possible(per_s: float) -> bool:
        late = sum(num_late(prompts, share_of_work_s, limit_s) for prompts in at(per_s))
        return late <= 0.01 * sum(map(len, workloads))

    for row in known.values():
        row.expect(lengths, seed)
    sustained = {title: largest(partial(is_in_time, row)) for title, row in known.items()}
    baseline = sustained[BASELINE]
    limits.at_least(f"load on {name} lengths", sustained[OURS] / baseline, 1.2)
    cells: list[list[str]] = []
    for title, row in known.items():
        found_s = ttfts_s(row, baseline)
        figures = [statistics.fmean(found_s), quantile(found_s, 0.5), quantile(found_s, 0.99)]
        load = [f"{sustained[title]:.2f}", f"{sustained[title] / baseline - 1:+.0%}"]
        cells.append([name, title, *load, *(f"{each:.2f}" for each in figures)])
    most = largest(is_possible)
    return [*cells, [name, BOUND, f"{most:.2f}", f"{most / baseline - 1:+.0%}", "", "", ""]]


CORE_HEADS = ("lengths", "requests/s", "", "first token: mean, s", "p50, s", "p99, s")


def by_core(name: str, num_requests: int, seed: int) -> list[list[str]]:
    """What comes of the same prompts under the scheduling core, and under planners alone."""
    per_s = CORE_LOADS[name]
    prompts = poisson(TRACES[name].drawn(random.Random(seed)), per_s, num_requests, seed)
    fixed, parallel = FixedPlanner(LATENCY, 8), ElasticPlanner(LATENCY, 0.3)
    found_s = {
        BASELINE: first_tokens(prompts, NUM_INSTANCES, lambda _: fixed),
        "ours, parallel step, rate 0.3": first_tokens(prompts, NUM_INSTANCES, lambda _: parallel),
    }
    arrivals = [
        Arrival(arrival_s=prompt.arrival_s, num_prompt_tokens=prompt.num_tokens, num_output_tokens=2)
        for prompt in prompts
    ]
    mesh = MeshShape(
        num_prefill=NUM_INSTANCES,
        num_decode=4,
        num_mixed=0,
        kv_layout=layout(LLAMA_3_8B),
        num_kv_tokens=2_000_000,
        num_transfer_backends=64,
        joins_groups=True,
    )
    for row, bundle, members, schedule in CORE_ROWS:
        policy = PolicyConfig(
            latency=LATENCY[1],
            long_prompt_tokens=TRACES[name].least,
            max_group_members=members,
            group_improvement=0.3,
            link_bytes_per_s=PORT_BYTES_PER_S,
            sequence_parallel=schedule,
        )
        simulator = Simulator(
            study_core(bundle, policy, seed),
            mesh.instances(LATENCY[1]),
            arrivals,
            SimConfig(port_bytes_per_s=PORT_BYTES_PER_S),
        )
        found_s[row] = [run.ttft_s or math.inf for run in simulator.run().requests]
    return [
        [
            name,
            f"{per_s:g}",
            row,
            *(f"{each:.2f}" for each in (statistics.fmean(s), quantile(s, 0.5), quantile(s, 0.99))),
        ]
        for row, s in found_s.items()
    ]


def largest(is_in_time: Callable[[float], bool]) -> float:
    """The largest load, by bisection over whole steps: more requests are taken never to be served sooner."""
    low, high = 1, 2
    while is_in_time(high * STEP_PER_S):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if is_in_time(middle * STEP_PER_S) else (low, middle)
    return low * STEP_PER_S


if __name__ == "__main__":
    main()
