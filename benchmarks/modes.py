"""EB+ is never worse than the better of its modes: simulated, closed loop, against `mb` and against `eb` at its best.

Usage: python benchmarks/modes.py [--full [--sample N [--draw SEED]]] [--seeds N] [--only TEXT]
                                  [--requests-per-client N]

Every cell has so many clients at once, lengths of one law, steps of one set of costs. It is simulated under `mb`, under
`eb` at several thresholds and under `ebplus`, with the same requests. What is compared is the *rate*: seconds of work
that every request costs under any mode (its prompt tokens and decodes times what one costs), for each second of the
steady part of the run. Exits 1 if `ebplus` has less than 0.995 of the better of the two anywhere, less than 0.99 where
lengths and clients change on the way, or if one of the two named cases is not decided as the theory has it. Without
``--full`` a part of the grid is run, with ``--sample`` so many cells of the whole. Each figure is a ratio: it says
nothing of a machine.
"""

from __future__ import annotations

import argparse
import itertools
import math
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from pdmesh.garbage import rare_collections
from pdmesh.model import KvLayout
from pdmesh.policy.config import PolicyConfig
from pdmesh.policy.latency import LinearLatencyModel
from pdmesh_lab.sim.mesh import MeshShape, study_core
from pdmesh_lab.sim.result import SimResult
from pdmesh_lab.sim.simulator import Simulator
from pdmesh_lab.sim.workload import Arrival, ClosedLoop

LEAST, LEAST_WITH_SHIFTS = 0.995, 0.99

#: The part of a run that is compared, by the share of its requests that have ended: the rest is start and end.
STEADY = (0.3, 0.85)

LAYOUT = KvLayout(num_layers=2, num_kv_heads=1, head_dim=8, block_size=16, dtype="bfloat16")

#: A target that nobody has, so that throughput alone decides.
NO_TARGET_S = 1e4


@dataclass(frozen=True, slots=True)
class Costs:
    """Of steps, in milliseconds; tokens and interference per token."""

    name: str
    prefill: float
    mixed: float
    decode: float
    interference: float = 0.0
    prompt_token: float = 0.15
    decode_token: float = 0.2

    @property
    def model(self) -> LinearLatencyModel:
        return LinearLatencyModel(
            a_s=self.prefill / 1e3,
            b_s=self.prompt_token / 1e3,
            c_s=0.0,
            d_s=0.0,
            decode_a_s=self.decode / 1e3,
            decode_s=self.decode_token / 1e3,
            mixed_a_s=self.mixed / 1e3,
            interference_s=self.interference / 1e3,
        )


ALIKE = Costs("alike", 6, 4, 4)
NAMED = Costs("named", 6, 6, 4, 0.1)
COSTS = (
    ALIKE,
    NAMED,
    Costs("mixed constant", 6, 6, 4),
    Costs("interference", 6, 4, 4, 0.1),
    Costs("worst interference", 6, 6, 4, 0.5),
    Costs("dear switches", 68, 6, 4, 0.1),
    Costs("mixed steps cost less", 6, 4, 4, -0.05),
)

Law = Callable[[random.Random, float], int]


def geometric(rng: random.Random, mean: float) -> int:
    return 1 + int(math.log(1 - rng.random()) / math.log(1 - 1 / mean)) if mean > 1 else 1


def gamma(rng: random.Random, mean: float) -> int:
    return max(1, round(rng.gammavariate(2.0, mean / 2)))


def bimodal(rng: random.Random, mean: float) -> int:
    return max(1, round(mean * (0.2 if rng.random() < 0.5 else 1.8)))


LAWS: dict[str, Law] = {"geometric": geometric, "gamma": gamma, "bimodal": bimodal}


@dataclass(frozen=True, slots=True)
class Cell:
    """One point of the grid. ``parts`` are (clients, mean prompt, mean output), one after the other."""

    costs: Costs
    law: str
    parts: tuple[tuple[int, int, int], ...]
    seed: int

    @property
    def name(self) -> str:
        parts = " then ".join(f"N {number} {prompt}/{output}" for number, prompt, output in self.parts)
        return f"{parts}, {self.law}, {self.costs.name}, seed {self.seed}"

    def workload(self, per_client: int) -> tuple[list[Arrival], ClosedLoop]:
        rng, law = random.Random(self.seed), LAWS[self.law]
        arrivals: list[Arrival] = []
        clients: list[tuple[int, int]] = []
        for number, prompt, output in self.parts:
            clients.append((len(arrivals), number))
            arrivals += [
                Arrival(
                    arrival_s=0.0,
                    num_prompt_tokens=min(4000, geometric(rng, prompt)),
                    num_output_tokens=min(8000, law(rng, output)),
                    max_tokens=8000,
                )
                for _ in range(max(1500, per_client * number) // len(self.parts))
            ]
        return arrivals, ClosedLoop(num_clients=clients)


def rate(cell: Cell, batching: str, threshold: float | None, per_client: int) -> tuple[float, str]:
    """Seconds of work a second, and what was done in most of the steady part."""
    model = cell.costs.model
    policy = PolicyConfig(
        latency=model,
        batching=batching,
        eb_threshold=threshold,
        slo_tpot_s=NO_TARGET_S,
        slo_ttft_s=NO_TARGET_S,
        max_stall_s=NO_TARGET_S,
        prefill_step_s=NO_TARGET_S,
        max_chunk_tokens=1 << 20,
    )
    mesh = MeshShape(num_prefill=0, num_decode=0, num_mixed=1, kv_layout=LAYOUT, num_kv_tokens=1 << 22)
    core = study_core("pdmesh", policy, 0)
    arrivals, clients = cell.workload(per_client)
    profiles = mesh.instances(model)
    result = Simulator(core, profiles, arrivals, closed_loop=clients).run()
    return work_rate(result, cell.costs), mode_of(result)


def steady(result: SimResult) -> tuple[float, float]:
    """From when, until when."""
    ends_s = sorted(run.token_times_s[-1] for run in result.requests)
    return ends_s[int(STEADY[0] * len(ends_s))], ends_s[int(STEADY[1] * len(ends_s))]


def mode_of(result: SimResult) -> str:
    """Exclusive, if most steps with chunks had no decodes."""
    from_s, until_s = steady(result)
    steps = [step for step in result.instances[0].steps if step.chunks and from_s <= step.start_s < until_s]
    return "eb" if sum(step.num_decodes == 0 for step in steps) > len(steps) / 2 else "mb"


def work_rate(result: SimResult, costs: Costs) -> float:
    from_s, until_s = steady(result)
    work_s = 0.0
    for step in result.instances[0].steps:
        inside_s = min(step.end_s, until_s) - max(step.start_s, from_s)
        if inside_s > 0 and step.end_s > step.start_s:
            num_tokens = sum(chunk.num_tokens for chunk in step.chunks)
            whole_s = costs.prompt_token * num_tokens + costs.decode_token * step.num_decodes * step.num_steps
            work_s += whole_s / 1e3 * inside_s / (step.end_s - step.start_s)
    return work_s / (until_s - from_s)


def grid(full: bool, seeds: int) -> Iterator[Cell]:
    if full:
        sizes, shares, laws = (8, 16, 32, 64, 128, 256), (0.1, 0.5, 0.9), tuple(LAWS)
        for costs, number, share, law, seed in itertools.product(COSTS, sizes, shares, laws, range(seeds)):
            yield Cell(costs, law, ((number, round(512 * (1 - share)), round(512 * share)),), seed)
        return
    rng = random.Random(7)
    for costs, number in itertools.product(COSTS, (8, 32, 128)):
        share, law = rng.choice((0.1, 0.5, 0.9)), rng.choice(tuple(LAWS))
        yield Cell(costs, law, ((number, round(512 * (1 - share)), round(512 * share)),), rng.randrange(seeds))


def shifting(full: bool, seeds: int) -> Iterator[Cell]:
    shifts = (
        ((64, 128, 128), (24, 256, 64), (96, 64, 256)),
        ((16, 400, 100), (128, 64, 64), (16, 400, 100)),
    )
    for costs in COSTS if full else COSTS[1:5]:
        for parts, seed in itertools.product(shifts, range(seeds if full else 1)):
            yield Cell(costs, "geometric", parts, seed)


def compare(cell: Cell, thresholds: Sequence[float], per_client: int, least: float) -> bool:
    mixed, _ = rate(cell, "mb", None, per_client)
    best_known, _ = rate(cell, "eb", None, per_client)
    shown = "theory"
    exclusive = best_known
    for threshold in thresholds:
        tried, _ = rate(cell, "eb", threshold, per_client)
        if tried > exclusive:
            exclusive, shown = tried, f"{threshold:g}"
    both, mode = rate(cell, "ebplus", None, per_client)
    ratio = both / max(mixed, exclusive)
    met = ratio >= least
    print(
        f"{'ok  ' if met else 'MISS'} {ratio:.4f}  eb/mb {exclusive / mixed:.4f} (best at {shown})  "
        f"theory/best {best_known / exclusive:.4f}  mostly {mode}  {cell.name}",
        flush=True,
    )
    return met


def named(per_client: int) -> Iterator[bool]:
    """The two cases of which the theory says the answer."""
    for number in (16, 64, 256):
        cell = Cell(ALIKE, "geometric", ((number, 128, 128),), 0)
        mixed, both = rate(cell, "mb", None, per_client), rate(cell, "ebplus", None, per_client)
        stays = both[1] == "mb" and both[0] / mixed[0] >= 0.9999
        print(
            f"{'ok  ' if stays else 'MISS'} nothing is gained: {both[1]}, {both[0] / mixed[0]:.4f} of mb  {cell.name}"
        )
        yield stays
    cell = Cell(NAMED, "geometric", ((64, 128, 128),), 0)
    mixed, both = rate(cell, "mb", None, per_client), rate(cell, "ebplus", None, per_client)
    finds = both[1] == "eb" and 1.06 < both[0] / mixed[0] < 1.10
    print(f"{'ok  ' if finds else 'MISS'} about 8 % ahead: {both[1]}, {both[0] / mixed[0]:.4f} of mb  {cell.name}")
    yield finds


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--full", action="store_true", help="the whole grid, which takes hours")
    parser.add_argument("--sample", type=int, help="so many cells of each part of the grid, drawn at random")
    parser.add_argument("--draw", type=int, help="another sample of as many cells for each number; without, as it was")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--only", default="", help="cells whose name has this")
    parser.add_argument("--requests-per-client", type=int, default=30)
    options = parser.parse_args()
    began_s, met = time.perf_counter(), []
    per_client = options.requests_per_client
    with rare_collections():
        if not options.only:
            met += list(named(per_client))
        for cells, least in ((grid, LEAST), (shifting, LEAST_WITH_SHIFTS)):
            chosen = list(cells(options.full, options.seeds))
            if options.sample is not None:
                drawn = random.Random(options.sample if options.draw is None else options.draw)
                chosen = drawn.sample(chosen, min(len(chosen), options.sample))
            for cell in chosen:
                if options.only in cell.name:
                    thresholds = (0.05, 0.1, 0.2, 0.35, 0.5) if least == LEAST else ()
                    met.append(compare(cell, thresholds, per_client, least))
    print(f"{sum(met)} of {len(met)} hold, {time.perf_counter() - began_s:.0f} s")
    return 0 if all(met) else 1


if __name__ == "__main__":
    sys.exit(main())
