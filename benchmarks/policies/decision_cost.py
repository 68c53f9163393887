"""What a scheduling decision costs: at 64 instances, and what it adds to requests' completion times up to 8,192.

Usage: python -m benchmarks.policies.decision_cost [--bundle NAME ...] [--scale N ...]
    [--instances 128 --ranks 1 --ranks 8]

The first table is of CPU time of `SchedulerCore.handle` with 1,000 requests always waiting, 64 instances or as many as
``--instances``, half of them for prefill, of so many ``--ranks``; several are measured in turn, there and back. A
*decision* is a call that gives a command; the ends of steps are the dearest of them.

The second is of a simulated mesh at every ``--scale``, half of its instances for prefill, one request a second for each
instance. A request's scheduling time is the whole time of every call that names it in its event or in a command, also
where others share it. The 99th percentile of its ratio to the completion time is the figure of PecSched's Table 7 and
Fig. 15 (at most 5.2 % at 8,192 GPUs). *Busy* is all time of the core over the simulated time: above 100 % one core
could not keep up, and the mesh would need more than one scheduler.
"""

from __future__ import annotations

import argparse
import heapq
import random
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import count
from typing import Any

from benchmarks.harness.report import heading
from pdmesh.core.commands import Command, RunStep
from pdmesh.core.config import CoreConfig
from pdmesh.core.events import Event, GatewayJoined, InstanceJoined, RequestArrived, StepDone
from pdmesh.core.scheduler import SchedulerCore
from pdmesh.garbage import rare_collections
from pdmesh.kv_layout import GRANULE_TOKENS, KvLayout
from pdmesh.metrics import percentile
from pdmesh.model import Epoch, GatewayId, PrefixHash, PrefixHashes, Request, RequestId, RequestKey, Role
from pdmesh.policy.bundles import make_bundle
from pdmesh.policy.config import PolicyConfig
from pdmesh.policy.latency import LLAMA_3_8B, ChunkShape, StepShape
from pdmesh_lab.sim.mesh import MeshShape, study_core
from pdmesh_lab.sim.simulator import Simulator
from pdmesh_lab.sim.workload import Synthetic, synthetic
from pdmesh_testing.modelled import ModelledInstance, modelled_profile
from pdmesh_testing.modelled_mesh import ModelledMesh

KV_LAYOUT = KvLayout(
    num_layers=LLAMA_3_8B.num_layers,
    num_kv_heads=LLAMA_3_8B.num_kv_heads,
    head_dim=LLAMA_3_8B.head_dim,
    block_size=16,
    dtype="bfloat16",
)
NUM_INSTANCES = 64
NUM_EVENTS = 30_000
NUM_WAITING = 1000
DECODE_S = 3.0
SIMULATED_S = 1.0
GATEWAY = GatewayId("g")


class Bench:
    """Prompts are log-normal around 1,000 tokens, 3 % of them 30,000 to 120,000; steps take what the profile says."""

    def __init__(
        self, bundle: str, *, with_hashes: bool = False, num_instances: int = NUM_INSTANCES, num_ranks: int = 1
    ) -> None:
        self.with_hashes = with_hashes
        self.config = CoreConfig(max_queue_s=1e6)
        self.core = SchedulerCore(self.config, make_bundle(bundle, self.config.policy), random.Random(0))
        self.rng, self.hash_rng = random.Random(1), random.Random(2)
        self.mesh = ModelledMesh(
            replace(
                modelled_profile(
                    f"{role}{index:02}",
                    role,
                    num_blocks=1 << 14,
                    block_size=16,
                    max_model_len=1 << 21,
                    max_num_seqs=256,
                ),
                rank_pids=tuple(range(2, 2 + num_ranks)) if num_ranks > 1 else (),
            )
            for role in (Role.PREFILL, Role.DECODE)
            for index in range(num_instances // 2)
        )
        self.chain_of: dict[RequestKey, PrefixHashes] = {}
        for instance in self.mesh.instances.values():
            instance.chain_of = self.chain_of
        self.now_s = 0.0
        self.num_requests = 0
        self.agenda: list[tuple[float, int, Callable[[], None]]] = []
        self.sequence = count()
        self.costs_us: dict[str, list[float]] = {}
        self.feed(GatewayJoined(GATEWAY, ()))
        for instance in self.mesh.instances.values():
            self.feed(InstanceJoined(instance.profile, ()))
        self.refill()
        self.costs_us = {"events": [], "decisions": [], "ends of steps": []}

    def feed(self, event: Event) -> None:
        began_ns = time.process_time_ns()
        commands = self.core.handle(event, self.now_s)
        cost_us = (time.process_time_ns() - began_ns) / 1e3
        if self.costs_us:
            self.costs_us["events"].append(cost_us)
            if commands:
                self.costs_us["decisions"].append(cost_us)
            if isinstance(event, StepDone):
                self.costs_us["ends of steps"].append(cost_us)
        for command in commands:
            self.mesh.send(command)

    def refill(self) -> None:
        while self.core.num_waiting < NUM_WAITING:
            self.num_requests += 1
            is_long = self.rng.random() < 0.03
            prompt = self.rng.randrange(30_000, 120_000) if is_long else int(self.rng.lognormvariate(6.9, 1.0)) + 1
            request = Request(
                request_id=RequestId(f"r{self.num_requests:06}"),
                epoch=Epoch(0),
                gateway_id=GATEWAY,
                num_prompt_tokens=prompt,
                max_tokens=128,
                arrival_s=self.now_s,
                prefix=tuple([self.new_hash() for _ in range(prompt // GRANULE_TOKENS)]) if self.with_hashes else (),
            )
            self.chain_of[request.request_id, request.epoch] = request.chain
            self.feed(RequestArrived(request))

    def new_hash(self) -> PrefixHash:
        return PrefixHash(self.hash_rng.randbytes(16))

    def at(self, time_s: float, action: Callable[[], None]) -> None:
        heapq.heappush(self.agenda, (time_s, next(self.sequence), action))

    def run(self) -> None:
        while len(self.costs_us["events"]) < NUM_EVENTS:
            self.refill()
            for instance in self.mesh.instances.values():
                self.work(instance)
            for sender, receiver, key in self.mesh.transfers():
                if sender.sequences[key].is_computed:
                    self.mesh.land(sender, receiver, key)
                    self.at(self.now_s + DECODE_S, partial(receiver.finish, key))
            if not any(instance.commands or instance.events for instance in self.mesh.instances.values()):
                self.now_s, _, action = heapq.heappop(self.agenda)
                action()

    def work(self, instance: ModelledInstance) -> None:
        while instance.commands:
            instance.take_command()
        while instance.events:
            self.feed(instance.events.popleft())
        if instance.can_begin:
            chunks = tuple(ChunkShape(chunk.num_tokens, chunk.start) for chunk in instance.begin_step().chunks)
            step_s = self.config.policy.latency.step_s(StepShape(chunks, 0, 0))
            self.at(self.now_s + step_s, instance.end_step)


class TimedCore:
    """A core that takes down what each request cost."""

    def __init__(self, core: SchedulerCore) -> None:
        self._core = core
        self.total_s = 0.0
        self.request_s: defaultdict[str, float] = defaultdict(float)

    def handle(self, event: Event, now_s: float) -> list[Command]:
        began_ns = time.process_time_ns()
        commands = self._core.handle(event, now_s)
        cost_s = (time.process_time_ns() - began_ns) / 1e9
        self.total_s += cost_s
        for request_id in {name for each in (event, *commands) for name in _named(each)}:
            self.request_s[request_id] += cost_s
        return commands

    def check_integrity(self) -> None:
        self._core.check_integrity()


def _named(each: Any) -> Iterator[str]:
    """The requests that an event or a command is about."""
    match each:
        case RequestArrived():
            yield each.request.request_id
        case StepDone():
            yield from (chunk.request_id for chunk in each.chunks)
        case RunStep():
            yield from (chunk.request_id for chunk in each.plan.chunks)
        case _:
            if (request_id := getattr(each, "request_id", None)) is not None:
                yield request_id


def decisions(
    bundle: str, *, with_hashes: bool = False, num_instances: int = NUM_INSTANCES, num_ranks: int = 1
) -> list[list[str]]:
    bench = Bench(bundle, with_hashes=with_hashes, num_instances=num_instances, num_ranks=num_ranks)
    with rare_collections():
        bench.run()
    rows: list[list[str]] = []
    for name, costs_us in bench.costs_us.items():
        figures = [sum(costs_us) / len(costs_us), *(percentile(costs_us, p) or 0.0 for p in (50, 99)), max(costs_us)]
        rows.append(
            [
                _row_name(bundle, with_hashes, num_instances, num_ranks),
                name,
                f"{len(costs_us):,}",
                *(f"{figure:.0f}" for figure in figures),
            ]
        )
    return rows


def _row_name(bundle: str, with_hashes: bool, num_instances: int, num_ranks: int) -> str:
    words = [bundle]
    if with_hashes:
        words.append("hashes")
    if num_instances != NUM_INSTANCES or num_ranks > 1:
        words.append(f"{num_instances} x {num_ranks}")
    return ", ".join(words)


def at_scale(bundle: str, num_instances: int) -> list[str]:
    policy = PolicyConfig()
    mesh = MeshShape(
        num_prefill=num_instances // 2,
        num_decode=num_instances // 2,
        num_mixed=0,
        kv_layout=KV_LAYOUT,
        num_kv_tokens=1 << 19,
    )
    arrivals = synthetic(
        Synthetic(
            num_requests=round(num_instances * SIMULATED_S),
            requests_per_s=num_instances,
            long_share=0.01,
            long_range=(30_000, 120_000),
        ),
        random.Random(0),
    )
    core = TimedCore(study_core(bundle, policy, seed=0))
    with rare_collections():
        result = Simulator(core, mesh.instances(policy.latency), arrivals).run()
    jcts_s = {run.request.request_id: run.jct_s for run in result.requests if run.jct_s is not None}
    ratios = [core.request_s[request_id] / jct_s for request_id, jct_s in jcts_s.items()]
    span_s = max(run.token_times_s[-1] for run in result.requests if run.token_times_s)
    mean_s = core.total_s / result.num_events
    return [
        bundle,
        f"{num_instances:,}",
        f"{len(jcts_s):,}",
        f"{mean_s * 1e6:.0f}",
        f"{core.total_s / sum(jcts_s.values()):.3%}",
        f"{percentile(ratios, 99) or 0.0:.3%}",
        f"{core.total_s / span_s:.0%}",
    ]


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table in Markdown."""
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bundle", action="append", help="default: fcfs, lars, pecsched and pdmesh")
    parser.add_argument("--scale", action="append", type=int, help="instances; default: 64, 512 and 8,192; 0 for none")
    parser.add_argument("--hashes", action="store_true", help="also with hashes of granules, none of which repeats")
    parser.add_argument("--instances", type=int, default=NUM_INSTANCES, help="of the first table")
    parser.add_argument("--ranks", action="append", type=int, help="of each of them; default: 1")
    options = parser.parse_args()
    bundles = options.bundle or ["fcfs", "lars", "pecsched", "pdmesh"]
    scales = [scale for scale in options.scale or [64, 512, 8192] if scale]
    print(heading("Cost of a scheduling decision"))
    head = ["bundle", "of", "number", "mean, us", "p50", "p99", "max"]
    ranks = options.ranks or [1]
    in_turn = ranks if len(ranks) == 1 else [*ranks, *reversed(ranks)]
    rows = [
        row
        for bundle in bundles
        for num_ranks in in_turn
        for row in decisions(bundle, num_instances=options.instances, num_ranks=num_ranks)
    ]
    rows += [row for bundle in bundles if options.hashes for row in decisions(bundle, with_hashes=True)]
    print(table(head, rows))
    if scales:
        head = ["bundle", "instances", "requests", "event, us", "time / JCT, all", "p99", "busy"]
        print(table(head, [at_scale(bundle, scale) for bundle in bundles for scale in scales]))


if __name__ == "__main__":
    main()
