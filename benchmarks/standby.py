"""Two schedulers under load: the leader is killed, stopped past its lease, or cut off from the store alone.

Usage: python benchmarks/standby.py [--store etcd|file] [--rounds N] [--streams N] [--lease SECONDS] [--seed N]

A mesh of real processes (2 schedulers, 1 prefill, 2 decode, 1 gateway; steps of a stand-in engine) serves so many
streams at once all the time. In each round one thing is done to whichever scheduler leads: SIGKILL; SIGSTOP for two
leases and then SIGCONT; its way to the store is cut until the other one leads (etcd). One that ends is started again,
as whoever looks after processes does. Each stream is compared with what an undisturbed request gave. For each round:
the longest pause in a stream that had begun before, and the longest wait for the first token of a *probe*: a short
request, of which one is sent four times a second from the fault until a leader is there again, and a second longer.

Exit code 1 if a stream was lost or differs, or if nobody took over.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import signal
import sys
import tempfile
import time
from collections import Counter
from contextlib import AsyncExitStack
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median

import openai

from pdmesh_testing.checkpoints import write_checkpoint
from pdmesh_testing.load import LoadRequest, Stream, StreamLoad, follow, requests_of, running_load
from pdmesh_testing.standby import STAND_IN, StandbyMesh, running_standby_mesh, why_no_etcd

KINDS = {"etcd": ("kill", "stop", "cut"), "file": ("kill", "stop")}

#: For another scheduler to lead.
LIMIT_S = 60.0

#: Of undisturbed load before the next fault, seconds.
PAUSE_S = (2.0, 5.0)

NUM_TOKENS = 100

#: Steps that take long, and little of the processor: streams last, and it is not they that make anybody wait.
STEPS = {"WORKER_FAKE_LATENCY": "a_s=0.003,b_s=2e-5,decode_a_s=0.1"}

#: Between two probes.
PROBE_S = 0.25


@dataclass(frozen=True, slots=True)
class Fault:
    """What was done, and what followed."""

    kind: str
    at_s: float
    led_again_s: float  # after it
    probes: tuple[Stream, ...]


async def disturb(mesh: StandbyMesh, kind: str, lease_s: float, probe: LoadRequest) -> Fault:
    """Do it to the leader, and wait until all is as before."""
    probes: list[Stream] = []
    leader = await mesh.some_leader(LIMIT_S)
    at_s, process = time.monotonic(), leader.process
    match kind:
        case "kill":
            leader.kill()
        case "stop":
            leader.send_signal(signal.SIGSTOP)
        case _:
            assert leader.wire is not None
            leader.wire.cut()
    async with (
        openai.AsyncOpenAI(base_url=f"{mesh.base_url}/v1", api_key="none", timeout=600) as client,
        asyncio.TaskGroup() as tasks,
    ):
        knocking = tasks.create_task(knock(client, probe, probes, tasks))
        while await mesh.some_leader(LIMIT_S) is leader and leader.process is process:  # noqa: ASYNC110  # it does not tell
            await asyncio.sleep(0.02)
        led_again_s = time.monotonic() - at_s
        await asyncio.sleep(1.0)
        knocking.cancel()
    if kind == "stop":
        await asyncio.sleep(max(0.0, 2 * lease_s - led_again_s))
        leader.send_signal(signal.SIGCONT)
    if leader.wire is not None:
        leader.wire.heal()
    async with asyncio.timeout(LIMIT_S):
        while leader.process is process or leader.has_ended:  # noqa: ASYNC110  # a process does not tell
            await asyncio.sleep(0.02)
    return Fault(kind, at_s, led_again_s, tuple(probes))


async def knock(client: openai.AsyncOpenAI, probe: LoadRequest, probes: list[Stream], tasks: asyncio.TaskGroup) -> None:
    """Send probes until cancelled; those that are sent are followed to their end."""
    while True:
        probes.append(stream := Stream(probe, time.monotonic()))
        tasks.create_task(follow(client, "model", stream))
        await asyncio.sleep(PROBE_S)


def longest_pause_s(streams: list[Stream], fault: Fault) -> float:
    """Of streams that had begun when it happened, until ten seconds after."""
    pauses = [
        later - earlier
        for each in streams
        for earlier, later in pairwise(each.token_times_s)
        if each.token_times_s[0] < fault.at_s < later and earlier < fault.at_s + 10.0
    ]
    return max(pauses, default=0.0)


def longest_wait_s(fault: Fault) -> float:
    """Of the probes."""
    return max((each.token_times_s[0] - each.began_s for each in fault.probes if each.token_times_s), default=0.0)


def told(mesh: StandbyMesh, what: str) -> int:
    """How often services have logged it."""
    return len(re.findall(what, mesh.logs()))


async def run(options: argparse.Namespace, folder: Path) -> tuple[StreamLoad, list[Fault], Counter[str]]:
    rng = random.Random(options.seed)
    kinds = [kind for kind in KINDS[options.store] for _ in range(options.rounds)]
    rng.shuffle(kinds)
    model = write_checkpoint(folder / "model", seed=3)
    settings = {**STAND_IN, **STEPS, "STANDBY_LEASE_S": str(options.lease)}
    faults: list[Fault] = []
    async with AsyncExitStack() as stack:
        mesh = await stack.enter_async_context(running_standby_mesh(folder, model, options.store, settings=settings))
        if options.logs is not None:
            stack.callback(lambda: options.logs.write_text(mesh.logs()))
        requests = requests_of(options.seed, [24 + 7 * i for i in range(16)], NUM_TOKENS)
        (probe,) = requests_of(options.seed + 1, [20], 3)
        looking_after = asyncio.create_task(mesh.look_after())  # a busy machine may end a leader before the first fault
        async with running_load(mesh.base_url, "model", [*requests, probe], at_once=options.streams) as load:
            await load.all_draw(options.streams)
            for kind in kinds:
                await asyncio.sleep(rng.uniform(*PAUSE_S))
                faults.append(await disturb(mesh, kind, options.lease, probe))
                print(f"{len(faults):3} of {len(kinds)}  {kind:5} another leads after {faults[-1].led_again_s:.2f} s")
                sys.stdout.flush()
            await asyncio.sleep(PAUSE_S[0])
            looking_after.cancel()
        logged = Counter(
            {
                "instances lost": told(mesh, "instance lost"),
                "gateways lost": told(mesh, "gateway lost"),
                "earlier leaders refused": told(mesh, "an earlier leader was refused"),
                "leaders that ended by themselves": told(mesh, "this scheduler must not lead any more"),
            }
        )
    return load, faults, logged


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--store", choices=sorted(KINDS), default="etcd")
    parser.add_argument("--rounds", type=int, default=10, help="of each kind of fault")
    parser.add_argument("--streams", type=int, default=24)
    parser.add_argument("--lease", type=float, default=3.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--logs", type=Path, help="file for what all services logged")
    options = parser.parse_args()
    if options.store == "etcd" and (why_not := why_no_etcd()) is not None:
        print(why_not)
        return 2
    with tempfile.TemporaryDirectory() as folder:
        load, faults, logged = asyncio.run(run(options, Path(folder)))
    load.streams += [probe for fault in faults for probe in fault.probes]
    result = {
        "store": options.store,
        "streams": len(load.streams),
        "lost": len(load.failed),
        "differ": len(load.differ),
        **logged,
    }
    for kind in KINDS[options.store]:
        mine = [fault for fault in faults if fault.kind == kind]
        pauses = [longest_pause_s(load.streams, fault) for fault in mine]
        waits = [longest_wait_s(fault) for fault in mine]
        if mine:
            result[kind] = {
                "times": len(mine),
                "another leads after, median and longest s": [
                    round(value, 2) for value in (median(f.led_again_s for f in mine), max(f.led_again_s for f in mine))
                ],
                "longest pause of running streams, median and longest s": [
                    round(median(pauses), 2),
                    round(max(pauses), 2),
                ],
                "longest wait of new requests, median and longest s": [
                    round(median(waits), 2),
                    round(max(waits), 2),
                ],
            }
    print(json.dumps(result, indent=1))
    for problem in (*load.failed[:5], *load.differ[:5]):
        print(problem)
    return 1 if load.failed or load.differ else 0


if __name__ == "__main__":
    sys.exit(main())
