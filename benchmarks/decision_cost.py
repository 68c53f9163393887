"""CPU time of a scheduling decision: 32 prefill and 32 decode instances, 1,000 requests always waiting.

Usage: python benchmarks/decision_cost.py [BUNDLE ...]

Prompts are log-normal around 1,000 tokens, 3 % of them 30,000 to 120,000. Steps take what the A100 profile says.
"""

from __future__ import annotations

import heapq
import random
import sys
import time
from collections.abc import Callable
from functools import partial
from itertools import count

from pdmesh.core.config import CoreConfig
from pdmesh.core.events import Event, GatewayJoined, InstanceJoined, RequestArrived
from pdmesh.core.scheduler import SchedulerCore
from pdmesh.metrics import percentile
from pdmesh.model import Epoch, GatewayId, Request, RequestId, Role
from pdmesh.policy.bundles import BUNDLES, make_bundle
from pdmesh.policy.latency import ChunkShape, StepShape
from pdmesh.testing.modelled import ModelledInstance, ModelledMesh, modelled_profile

NUM_EVENTS = 30_000
NUM_WAITING = 1000
DECODE_S = 3.0
GATEWAY = GatewayId("g")


class Bench:
    def __init__(self, bundle: str) -> None:
        self.config = CoreConfig(max_queue_s=1e6)
        self.core = SchedulerCore(self.config, make_bundle(bundle, self.config.policy), random.Random(0))
        self.rng = random.Random(1)
        self.mesh = ModelledMesh(
            modelled_profile(
                f"{role}{index:02}",
                role,
                num_blocks=1 << 14,
                block_size=16,
                max_model_len=1 << 21,
                max_num_seqs=256,
            )
            for role in (Role.PREFILL, Role.DECODE)
            for index in range(32)
        )
        self.now_s = 0.0
        self.num_requests = 0
        self.agenda: list[tuple[float, int, Callable[[], None]]] = []
        self.sequence = count()
        self.costs_us: list[float] = []
        self.feed(GatewayJoined(GATEWAY, ()))
        for instance in self.mesh.instances.values():
            self.feed(InstanceJoined(instance.profile, ()))
        self.refill()
        self.costs_us.clear()

    def feed(self, event: Event) -> None:
        began_ns = time.process_time_ns()
        commands = self.core.handle(event, self.now_s)
        self.costs_us.append((time.process_time_ns() - began_ns) / 1e3)
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
            )
            self.feed(RequestArrived(request))

    def at(self, time_s: float, action: Callable[[], None]) -> None:
        heapq.heappush(self.agenda, (time_s, next(self.sequence), action))

    def run(self) -> None:
        while len(self.costs_us) < NUM_EVENTS:
            self.refill()
            for instance in self.mesh.instances.values():
                self.work(instance)
            for sender, receiver, key in self.mesh.transfers():
                if sender.holds[key].computed:
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


def main() -> None:
    for bundle in sys.argv[1:] or sorted(BUNDLES):
        bench = Bench(bundle)
        bench.run()
        costs_us = bench.costs_us
        p50, p99 = percentile(costs_us, 50), percentile(costs_us, 99)
        mean = sum(costs_us) / len(costs_us)
        print(f"{bundle:10} {len(costs_us)} events: mean {mean:.0f} us, p50 {p50:.0f} us, p99 {p99:.0f} us")


if __name__ == "__main__":
    main()
