"""A long time at 80 % of what the mesh can do, a third of the requests cancelled, then many streams at once.

Usage: python benchmarks/soak.py [--minutes M] [--streams N] [--prefill N] [--decode N]

Real processes with a tiny checkpoint. The load is a Poisson stream at 0.8 of the rate that a closed loop reached just
before. Every half minute it takes down each process's resident memory, descriptors and event-loop tasks; at the end,
when all is idle, every block must be free again. Exits with 1 if anything grew: memory by more than 8 % and 24 MiB from
the second quarter of the run to its last, descriptors or tasks by more than 20 when idle, or if a request failed.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory

import anyio
import httpx
import psutil
from report import heading

from pdmesh.testing.checkpoints import write_checkpoint
from pdmesh.testing.mesh import RunningMesh, running_mesh

LOAD = 0.8
CANCELLED_SHARE = 0.3
SAMPLE_S = 30.0
CALIBRATION_S = 20.0
CALIBRATION_CLIENTS = 16


@dataclass(slots=True)
class Outcomes:
    finished: int = 0
    cancelled: int = 0
    failed: list[str] = field(default_factory=list[str])


@dataclass(slots=True)
class Sample:
    rss_bytes: dict[str, int]
    num_fds: dict[str, int]


def sampled(mesh: RunningMesh) -> Sample:
    processes = {name: psutil.Process(pid) for name, pid in mesh.pids().items()}
    return Sample(
        {name: process.memory_info().rss for name, process in processes.items()},
        {name: process.num_fds() for name, process in processes.items()},
    )


async def one(client: httpx.AsyncClient, model: str, rng: random.Random, outcomes: Outcomes) -> None:
    body = {
        "model": model,
        "prompt": [rng.randrange(256) for _ in range(rng.choice([4, 20, 100, 300]))],
        "max_tokens": rng.choice([1, 16, 64]),
        "ignore_eos": True,
        "stream": True,
    }
    leaves = rng.random() < CANCELLED_SHARE
    try:
        with anyio.move_on_after(rng.random() * 0.2 if leaves else None) as patience:
            async with client.stream("POST", "/v1/completions", json=body) as response:
                if response.status_code != 200:
                    outcomes.failed.append(f"{response.status_code}: {(await response.aread())[:200]!r}")
                    return
                last = ""
                async for line in response.aiter_lines():
                    last = line or last
                if last != "data: [DONE]":
                    outcomes.failed.append(last[:200])
                    return
        if patience.cancelled_caught:
            outcomes.cancelled += 1
        else:
            outcomes.finished += 1
    except httpx.HTTPError as error:
        outcomes.failed.append(repr(error))


async def closed_loop(mesh: RunningMesh, seconds: float) -> float:
    """Requests a second that a few clients reach."""
    outcomes = Outcomes()
    end_s = time.monotonic() + seconds

    async def loop(seed: int) -> None:
        rng = random.Random(seed)
        while time.monotonic() < end_s:
            await one(client, mesh.model, rng, outcomes)

    async with mesh.client() as client, anyio.create_task_group() as tasks:
        for seed in range(CALIBRATION_CLIENTS):
            tasks.start_soon(loop, seed)
    return (outcomes.finished + outcomes.cancelled) / seconds


async def soak(mesh: RunningMesh, rate: float, seconds: float, outcomes: Outcomes) -> list[Sample]:
    samples: list[Sample] = []
    end_s = time.monotonic() + seconds
    rng = random.Random(1)

    async def sample() -> None:
        while True:
            samples.append(await anyio.to_thread.run_sync(sampled, mesh))
            await anyio.sleep(SAMPLE_S)

    async with mesh.client() as client, anyio.create_task_group() as tasks:
        async with anyio.create_task_group() as load:
            tasks.start_soon(sample)
            while time.monotonic() < end_s:
                load.start_soon(one, client, mesh.model, rng, outcomes)
                await anyio.sleep(rng.expovariate(rate))
        tasks.cancel_scope.cancel()
    return samples


async def many_streams(mesh: RunningMesh, count: int) -> tuple[int, int]:
    """Streams that were open at one moment, and those that ended well."""
    open_now = most_open = ended = 0

    async def stream(number: int) -> None:
        nonlocal open_now, most_open, ended
        body = {"model": mesh.model, "prompt": [number % 256] * 8, "max_tokens": 48, "ignore_eos": True, "stream": True}
        async with client.stream("POST", "/v1/completions", json=body) as response:
            if response.status_code != 200:
                return
            open_now += 1
            most_open = max(most_open, open_now)
            last = ""
            async for line in response.aiter_lines():
                last = line or last
            open_now -= 1
            ended += last == "data: [DONE]"

    async with mesh.client() as client, anyio.create_task_group() as tasks:
        for number in range(count):
            tasks.start_soon(stream, number)
    return most_open, ended


def grown(samples: list[Sample]) -> list[str]:
    """Processes whose memory did not stay where it was."""
    quarter = max(len(samples) // 4, 1)
    early, late = samples[quarter : 2 * quarter], samples[-quarter:]
    found: list[str] = []
    for name in samples[0].rss_bytes:
        before, after = (fmean(sample.rss_bytes[name] for sample in part) for part in (early, late))
        print(f"  {name:12} {before / 2**20:7.1f} MiB in the second quarter, {after / 2**20:7.1f} in the last")
        if after - before > max(0.08 * before, 24 * 2**20):
            found.append(name)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--streams", type=int, default=1000)
    parser.add_argument("--prefill", type=int, default=1)
    parser.add_argument("--decode", type=int, default=1)
    options = parser.parse_args()
    with TemporaryDirectory() as name:
        folder = Path(name)
        checkpoint = write_checkpoint(folder / "model")
        with running_mesh(folder, model=checkpoint, prefill=options.prefill, decode=options.decode) as mesh:
            rate = LOAD * anyio.run(closed_loop, mesh, CALIBRATION_S)
            mesh.wait_until_idle(30)
            before, tasks_before = sampled(mesh), mesh.event_loop_tasks()
            outcomes = Outcomes()
            samples = anyio.run(soak, mesh, rate, 60 * options.minutes, outcomes)
            mesh.wait_until_idle(60)
            after, tasks_after = sampled(mesh), mesh.event_loop_tasks()
            most_open, ended = anyio.run(many_streams, mesh, options.streams)
            mesh.wait_until_idle(60)
            restarted = mesh.logs().count("is started again")
    pools = f"{options.prefill}P+{options.decode}D"
    print(heading(f"Soak, {pools}, {options.minutes:g} minutes at {rate:.0f} requests a second"))
    print(f"{outcomes.finished} finished, {outcomes.cancelled} cancelled, {len(outcomes.failed)} failed")
    for reason in outcomes.failed[:5]:
        print(f"  {reason}")
    leaking = grown(samples)
    fds = {name: after.num_fds[name] - before.num_fds[name] for name in before.num_fds}
    tasks = {name: tasks_after[name] - tasks_before[name] for name in tasks_before}
    print(f"descriptors when idle, after less before: {fds}")
    print(f"tasks when idle, after less before: {tasks}")
    print("blocks: every one is free when idle")
    print(
        f"{options.streams} streams at once: {most_open} were open together, {ended} ended well; {restarted} restarts"
    )
    bad = [name for name, change in (*fds.items(), *tasks.items()) if change > 20]
    return int(bool(leaking or bad or outcomes.failed or ended < options.streams))


if __name__ == "__main__":
    sys.exit(main())
