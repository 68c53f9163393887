"""Hand-over under pressure: `pdmesh` beside fixed settings, where decode has a quarter of what the load needs.

Usage: python benchmarks/pressure.py [--requests 600] [--seeds 3] [--first-seed 0] [--shape NAME ...]

Simulated, the same core: three prefill instances and one that decodes, whose KV and seats serve a quarter of the load.
The fixed settings are: room promised as a prompt begins, or prompts computed ahead of it as long as so much of an
instance's KV waits (five bounds). `pdmesh` begins a prompt when it is predicted to have room, or would be late if it
waited for that. The shapes of load are clients in a closed loop, bursts, and a steady overload of which what would be
late is refused. (`benchmarks/local_prefill.py` is about where prompts are computed: here decode has no room to spare.)

Prints goodput (requests that kept their targets, a second), relative to the best fixed setting of the shape, and the
most KV without room to decode that ever was on an instance that prefills. Exits 1 if `pdmesh` has less than 0.95 of the
best, in the mean of the seeds, or had more such KV than its bound.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from report import heading
from simulated import layout, table

from pdmesh.core.commands import Command
from pdmesh.core.config import CoreConfig, KvReservation
from pdmesh.core.events import Event
from pdmesh.core.scheduler import SchedulerCore
from pdmesh.metrics import Slo
from pdmesh.model import InstanceProfile, Request, Role
from pdmesh.policy.bundle import Bundle
from pdmesh.policy.bundles import make_bundle
from pdmesh.policy.config import PolicyConfig
from pdmesh.policy.handover import RunAhead
from pdmesh.policy.latency import LLAMA_3_8B, PROFILES, LatencyModel
from pdmesh.policy.views import InstanceView
from pdmesh_lab.sim.mesh import MeshShape
from pdmesh_lab.sim.report import report
from pdmesh_lab.sim.simulator import SimConfig, Simulator
from pdmesh_lab.sim.workload import Arrival, ClosedLoop, Synthetic, synthetic

WANTED = 0.95
TARGETS = Slo(ttft_s=3.0, tpot_s=0.05)
POLICY = PolicyConfig(latency=PROFILES["h100-llama3-8b"], slo_ttft_s=3.0, slo_tpot_s=0.05)
LENGTHS = Synthetic(max_prompt_tokens=6000, max_output_tokens=600)

#: Of the decode instance: about 10 requests a second.
NUM_SEATS, NUM_KV_TOKENS = 16, 24_000
REQUESTS_PER_S = 40.0
NUM_PREFILL_KV_TOKENS = 60_000

BOUNDS = (0.05, 0.1, 0.25, 0.5, 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class AlwaysAhead(RunAhead):
    """Whatever is predicted."""

    def begins(
        self, request: Request, prefill: InstanceView, num_reused_tokens: int = 0, *, room_s: float, now_s: float
    ) -> bool:
        return True


def fixed(bundle: Bundle, bound: float) -> Bundle:
    """``bound`` 0: room is promised as a prompt begins."""
    ahead = bundle.run_ahead
    assert ahead is not None
    always = AlwaysAhead(**{name: getattr(ahead, name) for name in RunAhead.__dataclass_fields__})
    return replace(bundle, run_ahead=always if bound else None, waiting_kv_share=bound or 1.0)


def settings() -> Mapping[str, Bundle]:
    bundle = make_bundle("pdmesh", POLICY)
    ahead = {f"ahead up to {bound:g}": fixed(bundle, bound) for bound in BOUNDS}
    return {"pdmesh": bundle, "room at the offer": fixed(bundle, 0.0)} | ahead


# --- loads --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    arrivals: Sequence[Arrival]
    closed_loop: ClosedLoop | None = None
    refuses_early: bool = False


def drawn(num_requests: int, seed: int, requests_per_s: float) -> list[Arrival]:
    shape = replace(LENGTHS, num_requests=num_requests, requests_per_s=requests_per_s)
    arrivals = synthetic(shape, random.Random(seed))
    return [replace(each, max_tokens=600, slo_ttft_s=TARGETS.ttft_s, slo_tpot_s=TARGETS.tpot_s) for each in arrivals]


def closed(num_requests: int, seed: int) -> Load:
    return Load(
        arrivals=drawn(num_requests, seed, REQUESTS_PER_S), closed_loop=ClosedLoop(num_clients=((0, 4 * NUM_SEATS),))
    )


def bursts(num_requests: int, seed: int) -> Load:
    """Of 60 requests each, a quarter of the time."""
    arrivals = drawn(num_requests, seed, REQUESTS_PER_S)
    length_s = 60 / REQUESTS_PER_S
    return Load(
        arrivals=[replace(each, arrival_s=each.arrival_s + 3 * length_s * (i // 60)) for i, each in enumerate(arrivals)]
    )


def steady(num_requests: int, seed: int) -> Load:
    return Load(arrivals=drawn(num_requests, seed, REQUESTS_PER_S), refuses_early=True)


SHAPES: Mapping[str, Callable[[int, int], Load]] = {"closed loop": closed, "bursts": bursts, "steady": steady}


# --- runs ---------------------------------------------------------------------------------------------------------


class WatchedCore:
    """In the place of a core: looks at how much KV without room to decode is on instances that prefill."""

    def __init__(self, core: SchedulerCore) -> None:
        self._core = core
        self.most_ahead = 0.0

    def handle(self, event: Event, now_s: float) -> list[Command]:
        commands = self._core.handle(event, now_s)
        self.most_ahead = max(self.most_ahead, self._core.max_awaiting_decode_kv_share)
        return commands

    def check_integrity(self) -> None:
        self._core.check_integrity()


def instances() -> list[tuple[InstanceProfile, LatencyModel]]:
    mesh = MeshShape(
        num_prefill=3,
        num_decode=1,
        num_mixed=0,
        kv_layout=layout(LLAMA_3_8B),
        num_kv_tokens=NUM_PREFILL_KV_TOKENS,
        max_num_seqs=NUM_SEATS,
    )
    return [
        (
            replace(profile, num_blocks=NUM_KV_TOKENS // profile.kv_layout.block_size)
            if profile.role is Role.DECODE
            else profile,
            model,
        )
        for profile, model in mesh.instances(POLICY.latency)
    ]


def run(bundle: Bundle, load: Load, seed: int) -> tuple[float, float]:
    """Goodput, and the largest share of an instance's KV that was computed ahead of room."""
    limit = 10**15
    config = CoreConfig(
        max_queue_entries=limit,
        max_queue_tokens=limit,
        max_queue_s=float(limit),
        refuses_early=load.refuses_early,
        kv_reservation=KvReservation.ON_DEMAND,
        policy=POLICY,
    )
    core = WatchedCore(SchedulerCore(config, bundle, random.Random(seed)))
    simulator = Simulator(core, instances(), load.arrivals, SimConfig(), closed_loop=load.closed_loop)
    figures = report(simulator.run(), long_tokens=POLICY.long_prompt_tokens, slo=TARGETS)
    return figures.goodput_per_s or 0.0, core.most_ahead


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=600)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--shape", action="append", choices=sorted(SHAPES), help="by default all")
    options = parser.parse_args()
    print(heading("pressure"))
    holds = True
    rows: dict[str, list[str]] = {name: [name] for name in settings()}
    shapes = options.shape or list(SHAPES)
    seeds = range(options.first_seed, options.first_seed + options.seeds)
    for shape in shapes:
        goodput: dict[str, float] = {}
        for name, bundle in settings().items():
            found = [run(bundle, SHAPES[shape](options.requests, seed), seed) for seed in seeds]
            goodput[name] = statistics.fmean(good for good, _ in found)
            most = max(share for _, share in found)
            rows[name] += [f"{goodput[name]:.2f}", f"{most:.2f}"]
            print(f"{shape}, {name}: {goodput[name]:.2f} requests/s, {most:.2f} ahead", file=sys.stderr, flush=True)
            holds &= name != "pdmesh" or most <= bundle.waiting_kv_share
        best = max(value for name, value in goodput.items() if name != "pdmesh")
        ratio = goodput["pdmesh"] / best if best else 1.0
        name_of_best = max(goodput, key=lambda name: goodput[name])
        print(f"{shape}: {ratio:.3f} of the best fixed setting ({name_of_best} is best)", flush=True)
        holds &= ratio >= WANTED
    heads = [f"{shape}: {what}" for shape in shapes for what in ("goodput/s", "most ahead")]
    print(table(["setting", *heads], [*rows.values()]))
    sys.exit(0 if holds else 1)


if __name__ == "__main__":
    main()
