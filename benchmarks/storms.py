"""Abort storms, one very long stream, and a tenant with very long prompts.

The first two use 1P+1D with the stand-in engine. The third is the simulator, with the scheduler that a mesh has.

* Storm: steady requests arrive at a fixed rate. ``--clients`` more open streams and all leave within a second.
* Stream: one stream of ``--tokens`` tokens. Six hours at 30 tokens a second are 648,000, which take about 12 minutes.
  ``--tokens 72000 --step-s 0.05`` is one of a real hour.
* Tenant: a prompt of 600K tokens every 90 s beside interactive tenants, over the same without those prompts.

    python benchmarks/storms.py [storm] [stream] [tenant] [--clients 300] [--tokens 60000] [--step-s 0.05]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import tempfile
import time
from dataclasses import dataclass, field, replace
from pathlib import Path

import psutil
from report import Limits, heading

from pdmesh.metrics import percentile
from pdmesh.model import KvLayout
from pdmesh.policy.config import PolicyConfig
from pdmesh.policy.latency import LinearLatencyModel
from pdmesh_lab.sim.mesh import MeshShape, study_core
from pdmesh_lab.sim.simulator import Simulator
from pdmesh_lab.sim.workload import Arrival
from pdmesh_testing.checkpoints import TINY, write_checkpoint
from pdmesh_testing.mesh import STAND_IN, RunningMesh, running_mesh

PARTS = ("storm", "stream", "tenant")

STEADY_PER_S = 15.0
STEADY_TOKENS = 32
STEADY_TARGET_S = 1.0
BEFORE_S, STORM_S, AFTER_S = 10.0, 4.0, 10.0
RECOVERY_S, RELEASE_S = 5.0, 2.0
LEAST_GOODPUT = 0.95

MAX_GROWTH = 1.25  # of a process's memory, from a quarter of the stream to all of it
MAX_SLOWDOWN = 1.2  # of CPU time for a token, the last quarter over the second

LONG_PROMPT_TOKENS, LONG_EVERY_S, TENANT_S = 600_000, 90.0, 900.0
SHORT_PER_S, NUM_TENANTS = 4.0, 4
SEED = 7
MAX_TTFT_RATIO = 1.5


def request(mesh: RunningMesh, num_tokens: int) -> bytes:
    body = json.dumps(
        {
            "model": mesh.model,
            "prompt": list(range(33, 65)),
            "max_tokens": num_tokens,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        }
    ).encode()
    head = f"Host: {mesh.record.http_address}\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n"
    return f"POST /v1/completions HTTP/1.1\r\n{head}".encode() + body


async def connect(mesh: RunningMesh, num_tokens: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, _, port = mesh.record.http_address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(request(mesh, num_tokens))
    return reader, writer


@dataclass(slots=True)
class Steady:
    """Requests at a fixed rate. ``met`` has the arrival times of the requests that ended within the target."""

    mesh: RunningMesh
    met: list[float] = field(default_factory=list[float])

    async def ask(self) -> None:
        began_s = time.monotonic()
        reader, writer = await connect(self.mesh, STEADY_TOKENS)
        answer = await reader.read()
        writer.close()
        if b"[DONE]" in answer and time.monotonic() - began_s <= STEADY_TARGET_S:
            self.met.append(began_s)

    async def arrive(self, over: asyncio.Event) -> None:
        async with asyncio.TaskGroup() as tasks:
            next_s = time.monotonic()
            while not over.is_set():
                tasks.create_task(self.ask())
                next_s += 1 / STEADY_PER_S
                await asyncio.sleep(next_s - time.monotonic())

    def per_s(self, begin_s: float, end_s: float) -> float:
        return sum(begin_s <= at_s < end_s for at_s in self.met) / (end_s - begin_s)


async def held_blocks(mesh: RunningMesh) -> int:
    return sum(each.num_blocks - each.num_free_blocks for each in (await mesh.state()).instances)


async def storm(mesh: RunningMesh, num_clients: int, limits: Limits) -> None:
    steady, over = Steady(mesh), asyncio.Event()
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(steady.arrive(over))
        await asyncio.sleep(3)
        begin_s, most_before = time.monotonic(), 0
        while time.monotonic() < begin_s + BEFORE_S:
            await asyncio.sleep(0.25)
            most_before = max(most_before, await held_blocks(mesh))
        storm_s = time.monotonic()
        opened = await asyncio.gather(*(connect(mesh, 4000) for _ in range(num_clients)))
        await asyncio.sleep(STORM_S)
        state, held = await mesh.state(), await held_blocks(mesh)
        leave_s = time.monotonic()
        for _, writer in opened:
            writer.transport.abort()
        await asyncio.sleep(RELEASE_S)
        left = await held_blocks(mesh)
        await asyncio.sleep(AFTER_S + RECOVERY_S - RELEASE_S)
        end_s = time.monotonic()
        over.set()
    before = steady.per_s(begin_s, storm_s)
    during, after = steady.per_s(storm_s, leave_s), steady.per_s(leave_s + RECOVERY_S, end_s - STEADY_TARGET_S)
    print(f"{num_clients} clients: {state.num_running} ran, {state.num_waiting} waited, {held} blocks held")
    print(
        f"goodput a second: before {before:.2f}, during {during:.2f}, from {RECOVERY_S:g} s after {after:.2f} "
        f"({limits.at_least('goodput', after / before, LEAST_GOODPUT)} of {LEAST_GOODPUT:g})"
    )
    print(
        f"blocks held {RELEASE_S:g} s after they left: {left}; by steady requests alone before: at most {most_before}"
    )
    limits.at_most("blocks", left, max(1, most_before))
    await asyncio.to_thread(mesh.wait_until_idle)
    print("blocks held once the steady requests ended: 0")


async def stream(mesh: RunningMesh, num_tokens: int, limits: Limits) -> None:
    reader, writer = await connect(mesh, num_tokens)
    memory: list[dict[str, float]] = []
    cpu_s = [mesh.cpu_s()]
    num_events, end, began_s = 0, b"", time.monotonic()
    while piece := await reader.read(1 << 16):
        num_events += piece.count(b"data: ")
        end = (end + piece)[-2000:]
        counts = re.findall(rb'"completion_tokens":(\d+)', end)
        if counts and int(counts[-1]) >= len(cpu_s) * num_tokens // 4 and len(memory) < 4:
            memory.append({name: float(psutil.Process(pid).memory_info().rss) for name, pid in mesh.pids().items()})
            cpu_s.append(mesh.cpu_s())
    writer.close()
    took_s = time.monotonic() - began_s
    is_whole = f'"completion_tokens":{num_tokens},'.encode() in end and b"[DONE]" in end
    if not is_whole:
        print(end.decode(errors="replace")[-400:])
    print(f"{num_events:,} events for {num_tokens:,} tokens in {took_s:.0f} s, whole: {is_whole}")
    limits.at_least("whole", is_whole, 1)
    if len(memory) < 4:
        return
    for name in memory[0]:
        growth = memory[3][name] / memory[0][name]
        slowdown = (cpu_s[4][name] - cpu_s[3][name]) / max(0.1, cpu_s[2][name] - cpu_s[1][name])
        print(
            f"{name}: {memory[0][name] / 1e6:.1f} MB at 25 %, {memory[3][name] / 1e6:.1f} MB at 100 % "
            f"({limits.at_most(f'memory of {name}', growth, MAX_GROWTH)}); CPU time a token, last quarter over second: "
            f"{slowdown:.2f} ({limits.at_most(f'CPU time of {name}', slowdown, MAX_SLOWDOWN)})"
        )


def tenant_ttfts_s(*, has_long: bool) -> tuple[list[float], list[float], int]:
    """Return the first-token times of the short and of the long requests, and how many requests did not end."""
    latency = LinearLatencyModel(a_s=4e-3, b_s=2e-5, c_s=1e-10, d_s=5e-11, decode_a_s=1e-2, decode_s=1e-4)
    layout = KvLayout(num_layers=32, num_kv_heads=8, head_dim=128, block_size=16, dtype="bfloat16")
    shape = MeshShape(num_prefill=1, num_decode=1, num_mixed=0, kv_layout=layout, num_kv_tokens=1 << 21)
    rng, now_s = random.Random(SEED), 0.0
    arrivals: list[Arrival] = []
    while (now_s := now_s + rng.expovariate(SHORT_PER_S)) < TENANT_S:
        name = f"interactive-{rng.randrange(NUM_TENANTS)}"
        arrivals.append(Arrival(arrival_s=now_s, num_prompt_tokens=500, num_output_tokens=64, tenant=name))
    if has_long:
        arrivals += [
            Arrival(
                arrival_s=10 + number * LONG_EVERY_S,
                num_prompt_tokens=LONG_PROMPT_TOKENS,
                num_output_tokens=64,
                tenant="long",
            )
            for number in range(int(TENANT_S / LONG_EVERY_S))
        ]
    arrivals.sort(key=lambda each: each.arrival_s)
    core = study_core("pdmesh", PolicyConfig(latency=latency), 0)
    runs = Simulator(core, shape.instances(latency), arrivals).run().requests
    short, long = [
        [run.ttft_s for run in runs if (run.request.tenant == "long") is is_long and run.ttft_s is not None]
        for is_long in (False, True)
    ]
    return short, long, sum(len(run.token_times_s) < run.num_output_tokens for run in runs)


def tenant(limits: Limits) -> None:
    (alone, _, left), (beside, long, left_beside) = tenant_ttfts_s(has_long=False), tenant_ttfts_s(has_long=True)
    p99s = [percentile(each, 99) for each in (alone, beside)]
    assert p99s[0] is not None
    assert p99s[1] is not None
    print(
        f"short requests, TTFT p99: {p99s[0]:.3f} s alone, {p99s[1]:.3f} s beside {LONG_PROMPT_TOKENS:,} tokens every "
        f"{LONG_EVERY_S:g} s: {p99s[1] / p99s[0]:.2f} x ({limits.at_most('TTFT', p99s[1] / p99s[0], MAX_TTFT_RATIO)})"
    )
    print(f"first token of a long prompt: {min(long):.1f} to {max(long):.1f} s")
    print(f"requests that did not end: {left} alone, {left_beside} beside")
    limits.at_most("starved", left + left_beside, 0.5)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", help=f"of {', '.join(PARTS)}; default: all")
    parser.add_argument("--clients", type=int, default=300)
    parser.add_argument("--tokens", type=int, default=60_000)
    parser.add_argument("--step-s", type=float, default=0.0, help="of the stream, which otherwise is as fast as it can")
    options, limits = parser.parse_args(), Limits()
    print(heading("Abort storms and long streams, stand-in engine, 1P+1D"))
    parts = options.parts or PARTS
    with tempfile.TemporaryDirectory() as name:
        if "storm" in parts:
            with running_mesh(Path(name) / "storm", model=None, settings=STAND_IN) as mesh:
                asyncio.run(storm(mesh, options.clients, limits))
        if "stream" in parts:
            shape = replace(TINY, max_position_embeddings=1 << 20)
            settings = {
                "WORKER_ENGINE": "fake",
                "WORKER_FAKE_LATENCY": f"a_s=0,decode_a_s={options.step_s}",
                "WORKER_KV_CACHE_BYTES": str(4 << 30),
                "WORKER_MAX_MODEL_LEN": str(1 << 20),
            }
            model = write_checkpoint(Path(name) / "model", shape=shape)
            with running_mesh(Path(name) / "stream", model=model, settings=settings) as mesh:
                asyncio.run(stream(mesh, options.tokens, limits))
    if "tenant" in parts:
        tenant(limits)
    limits.end()


if __name__ == "__main__":
    main()
