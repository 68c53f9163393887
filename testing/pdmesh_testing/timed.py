"""A mesh of processes whose engine is the stand-in with steps that take time, and a load of requests that come at given
times, whatever became of those before: what pools make of a load can be seen on few cores.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import anyio
import httpx

from pdmesh_testing.mesh import RunningMesh, running_mesh

#: Token ids of prompts are below it.
_NUM_IDS = 200


@dataclass(frozen=True, slots=True)
class TimedRequest:
    """A request, and when it comes."""

    at_s: float
    num_prompt_tokens: int
    num_output_tokens: int


@dataclass(frozen=True, slots=True)
class TimedAnswer:
    """How it fared."""

    ttft_s: float
    duration_s: float


def poisson(seed: int, *, per_s: float, seconds: float, prompt: range, num_output_tokens: int) -> list[TimedRequest]:
    """Requests that come by chance, with prompts of lengths of a range."""
    rng, at_s, asked = random.Random(seed), 0.0, list[TimedRequest]()
    while (at_s := at_s + rng.expovariate(per_s)) < seconds:
        asked.append(TimedRequest(at_s, rng.choice(prompt), num_output_tokens))
    return asked


@contextmanager
def timed_mesh(
    folder: Path, latency: str, *, prefill: int, decode: int, max_num_seqs: int, gateways: int = 1
) -> Generator[RunningMesh]:
    """Steps take what ``latency`` says (`worker.fake_latency`); the scheduler writes `event_log_of` the mesh."""
    settings = {
        "WORKER_ENGINE": "fake",
        "WORKER_FAKE_LATENCY": latency,
        "WORKER_MAX_NUM_SEQS": str(max_num_seqs),
        "SCHEDULER_EVENT_LOG": str(folder / "events.log"),
        "POLICY_CHUNK_TOKENS": "512",
    }
    pools = {"prefill": prefill, "decode": decode, "gateways": gateways}
    with running_mesh(folder, model=None, settings=settings, **pools) as mesh:
        yield mesh


async def send(mesh: RunningMesh, load: Sequence[TimedRequest]) -> list[TimedAnswer]:
    """Send them, from now on, and wait for all; raises httpx.HTTPError if one is refused."""
    answered: list[TimedAnswer] = []
    began_s = time.monotonic()

    async def ask(client: httpx.AsyncClient, asked: TimedRequest) -> None:
        await anyio.sleep(max(0.0, began_s + asked.at_s - time.monotonic()))
        sent_s = time.monotonic()
        body = {
            "model": mesh.model,
            "prompt": [number % _NUM_IDS for number in range(asked.num_prompt_tokens)],
            "max_tokens": asked.num_output_tokens,
            "ignore_eos": True,
            "stream": True,
        }
        first_s: float | None = None
        async with client.stream("POST", "/v1/completions", json=body) as response:
            response.raise_for_status()
            async for line in response.aiter_lines():
                if first_s is None and line.startswith("data: "):
                    first_s = time.monotonic()
        assert first_s is not None
        answered.append(TimedAnswer(first_s - sent_s, time.monotonic() - sent_s))

    async with mesh.client() as client, anyio.create_task_group() as tasks:
        for asked in load:
            tasks.start_soon(ask, client, asked)
    return answered


def ttft_p50_s(answered: Sequence[TimedAnswer]) -> float:
    return statistics.median(each.ttft_s for each in answered)
