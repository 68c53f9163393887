"""A long time at 80 % of what the mesh can do, a third of the requests cancelled, then many streams at once.

Usage: python -m benchmarks.faults.soak [--minutes M] [--streams N] [--prefill N] [--decode N]

Real processes with a tiny checkpoint; for the streams others, that decode all of them at once. The load is a Poisson
stream at 0.8 of the rate that a closed loop reached just before. Every half minute it takes down each process's
resident memory, descriptors and event-loop tasks; at the end, when all is idle, every block must be free again. Exits
with 1 if anything grew: memory by more than 8 % and 24 MiB from the second quarter of the run to its last, descriptors
or tasks by more than 20 when idle, if a request failed, or if not all of the streams were open at one moment.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory

import anyio
import httpx
import psutil

from benchmarks.harness.report import heading
from pdmesh_testing.checkpoints import write_checkpoint
from pdmesh_testing.mesh import RunningMesh, running_mesh

LOAD = 0.8
CANCELLED_SHARE = 0.3
SAMPLE_S = 30.0
CALIBRATION_S = 20.0
CALIBRATION_CLIENTS = 16

#: So that none waits for the seat of one that has ended and is about to be reported.
SEATS_PER_STREAM = 2

#: Of each of the many streams: enough for the last one to have its first token long before the first ends.
STREAM_TOKENS = 384


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


async def lines_of(response: httpx.Response) -> AsyncIterator[bytes]:
    """As server-sent events have them. ``aiter_lines`` also ends them within a text, at U+0085 or U+2028."""
    rest = b""
    async for data in response.aiter_bytes():
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            yield line


@dataclass(slots=True)
class Streams:
    """Many at once. One is open from its first token, which its client has read, until its last."""

    num_open: int = 0
    most_open: int = 0
    ended: int = 0
    num_tokens: int = 0
    num_tokens_when_most: int = 0  # delivered before the last of them opened
    duration_s: float = 0.0


async def many_streams(mesh: RunningMesh, count: int) -> Streams:
    """So many, each long enough for the last to open before the first ends."""
    streams = Streams()

    async def stream(number: int) -> None:
        body = {
            "model": mesh.model,
            "prompt": [number % 256] * 8,
            "max_tokens": STREAM_TOKENS,
            "ignore_eos": True,
            "stream": True,
            "return_token_ids": True,
        }
        async with client.stream("POST", "/v1/completions", json=body) as response:
            if response.status_code != 200:
                return
            num_tokens = 0
            async for line in lines_of(response):
                if line == b"data: [DONE]":
                    streams.ended += num_tokens == STREAM_TOKENS
                elif line.startswith(b"data: "):
                    (choice,) = json.loads(line.removeprefix(b"data: "))["choices"]
                    num_new = len(choice["token_ids"])
                    if num_new and not num_tokens:
                        streams.num_open += 1
                    num_tokens += num_new
                    streams.num_tokens += num_new
                    if streams.num_open > streams.most_open:
                        streams.most_open, streams.num_tokens_when_most = streams.num_open, streams.num_tokens
                    if choice["finish_reason"] is not None:
                        streams.num_open -= 1

    began_s = time.monotonic()
    async with mesh.client() as client, anyio.create_task_group() as tasks:
        for number in range(count):
            tasks.start_soon(stream, number)
    streams.duration_s = time.monotonic() - began_s
    return streams


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
            restarted = mesh.logs().count("is started again")
        pools = {"prefill": options.prefill, "decode": options.decode}
        seats = {"WORKER_MAX_NUM_SEQS": str(SEATS_PER_STREAM * options.streams)}
        with running_mesh(folder / "streams", model=checkpoint, **pools, settings=seats) as mesh:
            streams = anyio.run(many_streams, mesh, options.streams)
            mesh.wait_until_idle(60)
            restarted += mesh.logs().count("is started again")
    print(
        heading(
            f"Soak, {options.prefill}P+{options.decode}D, {options.minutes:g} minutes at {rate:.0f} requests a second"
        )
    )
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
        f"{options.streams} streams of {STREAM_TOKENS} tokens: {streams.most_open} were open at one moment, all with "
        f"tokens read ({streams.num_tokens_when_most} by then) and more to come; {streams.ended} ended well: "
        f"{streams.num_tokens} tokens in {streams.duration_s:.0f} s; {restarted} restarts"
    )
    bad = [name for name, change in (*fds.items(), *tasks.items()) if change > 20]
    return int(
        bool(
            leaking or bad or outcomes.failed or streams.most_open < options.streams or streams.ended < options.streams
        )
    )


if __name__ == "__main__":
    sys.exit(main())
