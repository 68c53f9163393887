"""Receivers killed while KV is on its way to them: how many prompts are computed again?

Usage: python benchmarks/killed_receivers.py [--transfers 50] [--seed N] [--at-once N] [--prompt-tokens N]

A mesh of real processes (1 prefill, 3 decode) serves a few long prompts at once. Once the transfer of one is granted,
and a random moment later, its decode instance is killed (SIGKILL). It goes on until so many transfers were *hit*: their
receiver was killed after the grant and before the KV had landed. What the records of these requests say is counted:
granted to another receiver, or computed again. Each answer is compared with that of the same request, undisturbed.

Exit code 1 if an answer was lost or differs, or if of 50 transfers hit more than 2 prompts were computed again.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import signal
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from report import Limits, heading

from pdmesh.config import SecurityConfig
from pdmesh.errors import PdmeshError
from pdmesh.wire.admin import ask_scheduler
from pdmesh.wire.messages import GetRequest, RecordEntry, RequestRecord
from pdmesh_testing.checkpoints import TINY, write_checkpoint
from pdmesh_testing.exactness import random_prompts
from pdmesh_testing.mesh import RunningMesh, running_mesh

#: Of so many transfers hit, so many prompts may be computed again.
NUM_AGAIN, OF_HIT = 2, 50

#: How long after the first grant the receiver is killed, at most, seconds.
WITHIN_S = 0.4

#: A kill that hits nothing is made good by another; a mesh that is never hit is not what this measures.
MAX_KILLS_PER_HIT = 4

ROUND_LIMIT_S = 120.0

NUM_DECODE = 3


@dataclass(slots=True)
class Seen:
    num_hit: int = 0
    num_kills: int = 0
    num_again: int = 0
    num_elsewhere: int = 0
    lost: list[str] = field(default_factory=list[str])
    differ: list[str] = field(default_factory=list[str])
    why_again: Counter[str] = field(default_factory=Counter[str])


def body_of(prompt: list[int], number: int) -> dict[str, Any]:
    """Greedy and seeded in turns."""
    drawn: dict[str, Any] = {"temperature": 0} if number % 2 == 0 else {"temperature": 0.8, "seed": 7}
    return {"prompt": prompt, "max_tokens": 24, "ignore_eos": True, "return_token_ids": True, **drawn}


async def ask(client: httpx.AsyncClient, body: dict[str, Any], label: str = "") -> list[int]:
    headers = {"x-request-id": label} if label else {}
    response = await client.post("/v1/completions", json=body, headers=headers)
    response.raise_for_status()
    return list(response.json()["choices"][0]["token_ids"])


class Scheduler:
    """What the mesh's scheduler says."""

    def __init__(self, mesh: RunningMesh) -> None:
        self._mesh = mesh
        self._address = mesh.record.scheduler_address
        self._security = SecurityConfig(mesh_token=mesh.record.mesh_token)

    async def record(self, label: str) -> RequestRecord | None:
        try:
            answer = await ask_scheduler(self._address, self._security, GetRequest(request_id=label))
        except PdmeshError:
            return None
        return answer if isinstance(answer, RequestRecord) else None

    async def num_serving(self) -> int:
        return sum(instance.state == "up" for instance in (await self._mesh.state()).instances)


def grants(entries: tuple[RecordEntry, ...]) -> list[str]:
    """To whom a request's KV was granted, in turn."""
    return [entry.detail.removeprefix("to ") for entry in entries if entry.what == "granted"]


def is_hit(record: RequestRecord, victim: str) -> bool:
    """Whether the KV was on its way to the victim, and never landed there."""
    landed = any(entry.what == "landed" and entry.instance_id == victim for entry in record.entries)
    return victim in grants(record.entries) and not landed


async def first_grant(scheduler: Scheduler, labels: list[str]) -> str:
    """The receiver of the first of the requests whose transfer is granted."""
    async with asyncio.timeout(ROUND_LIMIT_S):
        while True:
            for label in labels:
                record = await scheduler.record(label)
                if record is not None and (to := grants(record.entries)):
                    return to[0]
            await asyncio.sleep(0.002)


async def kill(mesh: RunningMesh, name: str) -> None:
    """Its process of now. One that was started again serves a moment before the supervisor's record names it."""
    async with asyncio.timeout(ROUND_LIMIT_S):
        while True:
            if (pid := mesh.pids().get(name)) is not None:
                os.kill(pid, signal.SIGKILL)
                return
            await asyncio.sleep(0.01)


async def answer(client: httpx.AsyncClient, body: dict[str, Any], label: str) -> list[int] | Exception:
    """Its tokens, or why there are none."""
    try:
        async with asyncio.timeout(ROUND_LIMIT_S):
            return await ask(client, body, label)
    except (httpx.HTTPError, TimeoutError) as error:
        return error


async def hit(
    mesh: RunningMesh,
    client: httpx.AsyncClient,
    asked: list[tuple[dict[str, Any], list[int]]],
    rng: random.Random,
    seen: Seen,
) -> None:
    """One kill, while all that is ``asked`` is answered; with each body the tokens of its undisturbed answer."""
    scheduler = Scheduler(mesh)
    bodies, expected = [body for body, _ in asked], [tokens for _, tokens in asked]
    async with asyncio.timeout(ROUND_LIMIT_S):
        while True:
            if await scheduler.num_serving() >= NUM_DECODE:  # with the prefill instance: one may be starting yet
                break
            await asyncio.sleep(0.1)
    labels = [f"kill-{seen.num_kills}-{number}" for number in range(len(bodies))]
    seen.num_kills += 1
    async with asyncio.TaskGroup() as group:
        answers = [group.create_task(answer(client, *both)) for both in zip(bodies, labels, strict=True)]
        victim = await first_grant(scheduler, labels)
        await asyncio.sleep(rng.uniform(0, WITHIN_S))
        await kill(mesh, victim)
    for label, task, reference in zip(labels, answers, expected, strict=True):
        got = task.result()
        if isinstance(got, Exception):
            seen.lost.append(f"{label}: {got!r}")
            continue
        if got != reference:
            seen.differ.append(label)
        record = await scheduler.record(label)
        if record is None or not is_hit(record, victim):
            continue
        seen.num_hit += 1
        again = [entry.detail for entry in record.entries if entry.what == "restarted"]
        if any(entry.what.startswith("queued again") for entry in record.entries):
            seen.num_again += 1
            seen.why_again[again[0] if again else "by its gateway"] += 1
        else:
            seen.num_elsewhere += 1


async def run(mesh: RunningMesh, options: argparse.Namespace) -> Seen:
    seen, rng = Seen(), random.Random(options.seed)
    lengths = [options.prompt_tokens + 16 * number for number in range(options.at_once)]
    bodies = [
        body_of(prompt, number)
        for number, prompt in enumerate(random_prompts(lengths, TINY.vocab_size, seed=options.seed))
    ]
    async with mesh.client() as client:
        asked = [(body, await ask(client, body)) for body in bodies]
        while seen.num_hit < options.transfers and seen.num_kills < MAX_KILLS_PER_HIT * options.transfers:
            await hit(mesh, client, asked, rng, seen)
            print(
                f"  kill {seen.num_kills}: {seen.num_hit} transfers hit so far, {seen.num_again} computed again",
                flush=True,
            )
    return seen


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--transfers", type=int, default=OF_HIT)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--at-once", type=int, default=6)
    parser.add_argument("--prompt-tokens", type=int, default=1500)
    options = parser.parse_args()
    print(heading("Receivers killed while KV is on its way to them"))
    began_s = time.monotonic()
    with tempfile.TemporaryDirectory() as temporary:
        checkpoint = write_checkpoint(Path(temporary) / "model", seed=3, max_position_embeddings=8192)
        cold = {"GATEWAY_PREFIX_REUSE": "off"}  # the same prompts are handed over again and again, whole
        with running_mesh(Path(temporary), model=checkpoint, prefill=1, decode=NUM_DECODE, settings=cold) as mesh:
            seen = asyncio.run(run(mesh, options))
    limits = Limits()
    print(f"{seen.num_kills} kills in {time.monotonic() - began_s:.0f} s")
    print(f"transfers hit: {seen.num_hit}; {limits.at_least('transfers hit', seen.num_hit, options.transfers)}")
    print(f"granted to another receiver, or kept: {seen.num_elsewhere}")
    allowed = NUM_AGAIN * max(1.0, seen.num_hit / OF_HIT)
    print(f"prompts computed again: {seen.num_again}; {limits.at_most('computed again', seen.num_again, allowed)}")
    for why, count in seen.why_again.most_common():
        print(f"  {count} x {why}")
    for what, which in (("lost", seen.lost), ("differ", seen.differ)):
        print(f"answers that were {what}" if what == "lost" else "answers that differ", end="")
        print(f": {len(which)}; {limits.at_most(f'answers {what}', len(which), 0.5)} {which[:3] or ''}")
    limits.end()


if __name__ == "__main__":
    main()
