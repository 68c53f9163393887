"""Faults and operations at random while KV is reused, copied between instances and loaded from tiers: is anything lost?

    python -m benchmarks.faults.reuse_faults [--faults 100] [--seed 1] [--streams 6]
        [--architecture NAME] [--dtype float32|bfloat16]

A mesh of real processes (2 prefill, 2 decode, 1 mixed) whose caches hold a few prompts, with a tier of host memory and
disk behind each. Streams are conversations of several users, whose turns come one user after the other: what a turn
reuses has been given up for others' by then, or is elsewhere. Again and again an instance or the scheduler is killed or
stopped for 0.3 to 6 s, an instance is drained or gets another role, or running decodes are told to move. Each answer is
compared with that of an undisturbed request: tokens, text, finish reasons and log-probabilities, to the bit. Without
``--architecture`` the model is a llama. One whose layers have windows or states has no tier.

Exit code 1 if an answer was lost or differs, if a request was refused for KV that was not there before the first fault,
if blocks are not free at the end, or if nothing was reused, copied or loaded.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count, cycle, islice
from pathlib import Path
from typing import Any

import httpx
import msgspec

from benchmarks.exactness.exactness import checkpoint_of
from benchmarks.faults.answers import (
    SECOND_TURN,
    Answer,
    Answers,
    add_model_arguments,
    ask,
    ask_undisturbed,
    bodies_of,
    exact_settings,
    judge_none,
    kill_or_stop,
    leaks,
)
from benchmarks.harness.report import Limits, heading
from pdmesh.cli.state_folder import MeshRecord
from pdmesh.engine.files import load_model_config
from pdmesh.errors import PdmeshError
from pdmesh.kv_layout import cache_bytes
from pdmesh.model import Role
from pdmesh.operations import OperationKind
from pdmesh_testing.checkpoints import CheckpointShape
from pdmesh_testing.mesh import RunningMesh, running_mesh
from pdmesh_testing.operating import operator_of

POOLS = {"prefill": 2, "decode": 2, "mixed": 1}
SHAPE = CheckpointShape(hidden_size=128, intermediate_size=512, num_layers=4)

#: Tokens of each instance's cache, and of what is behind it.
CACHED, IN_HOST_MEMORY, ON_DISK = 6_000, 6_000, 30_000

#: What is done, how often: killed, stopped for so long (seconds), or an operation.
FAULTS: tuple[tuple[float | OperationKind | None, int], ...] = (
    (None, 5),
    (0.3, 3),
    (1.5, 2),
    (6.0, 1),
    (OperationKind.DRAIN, 2),
    (OperationKind.ROLE, 2),
    (OperationKind.MOVE, 2),
)

#: Between the end of one fault and the beginning of the next, seconds.
PAUSE_S = (0.2, 1.5)
BACK_LIMIT_S = 120.0

#: So long nothing is done at first, and nothing may be refused.
HEALTHY_S = 20.0

#: Users of each stream, whose turns come in turn.
NUM_USERS = 4

#: Decodes that one fault moves.
NUM_MOVED = 4

#: What is asked: prompt tokens, and the fields of the body.
KINDS: dict[str, tuple[int, dict[str, Any]]] = {
    "greedy": (300, {"temperature": 0}),
    "seeded": (700, {"temperature": 0.8, "seed": 7}),
    "greedy, logprobs": (1_100, {"temperature": 0, "logprobs": 2}),
    "seeded, n = 2": (420, {"temperature": 0.7, "seed": 11, "n": 2}),
    "greedy, long prompt": (1_700, {"temperature": 0}),
}

COUNTERS = ("prefix_cache_hits", "prefix_cache_fetched_tokens", "kv_offload_loaded_tokens", "num_stale_prefixes")


@dataclass(slots=True)
class Seen(Answers):
    faults: Counter[str] = field(default_factory=Counter[str])
    #: By process and counter: what it said last. Processes end, and their counters with them.
    counters: dict[tuple[int, str], float] = field(default_factory=dict[tuple[int, str], float])
    num_stale_in_health: float = 0.0

    def total(self, counter: str) -> float:
        return sum(value for (_, name), value in self.counters.items() if name == counter)

    async def take_counters(self, mesh: RunningMesh, client: httpx.AsyncClient) -> None:
        """Read the counters of the processes that answer."""
        record = msgspec.json.decode((mesh.folder / "mesh.json").read_bytes(), type=MeshRecord)
        for service in record.services:
            with suppress(httpx.HTTPError, KeyError):
                url = f"http://127.0.0.1:{service.facts['metrics_port']}/metrics"
                for line in (await client.get(url, timeout=1)).text.splitlines():
                    name, _, value = line.removeprefix("pdmesh:").partition("_total ")
                    if name in COUNTERS:
                        self.counters[service.process.pid, name] = float(value)


async def converse(
    client: httpx.AsyncClient, bodies: Mapping[str, dict[str, Any]], number: int, seen: Answers, over: asyncio.Event
) -> None:
    """Ask for turns of some users until it is ``over``: the first of each, the second of each, and that once more."""
    first_turns = cycle([kind for kind in bodies if not kind.endswith(SECOND_TURN)])
    kinds = islice(first_turns, number, None)
    for conversation in count():
        users = [(next(kinds), f"{number} {conversation} {user}") for user in range(NUM_USERS)]
        for turn in ("", SECOND_TURN, SECOND_TURN):
            for kind, salt in users:
                if over.is_set():
                    return
                if kind + turn in bodies:
                    body = bodies[kind + turn] | {"cache_salt": salt}
                    seen.answers.append((kind + turn, await ask(client, body)))


class Faults:
    """One after the other, each drawn from a seed."""

    def __init__(self, mesh: RunningMesh, client: httpx.AsyncClient, seen: Seen, seed: int) -> None:
        self._mesh = mesh
        self._client = client
        self._seen = seen
        self._rng = random.Random(seed)
        self._operator = operator_of(mesh)

    async def do(self, num_faults: int) -> None:
        while self._seen.faults.total() < num_faults:
            await asyncio.sleep(self._rng.uniform(*PAUSE_S))
            await self.most_serve()
            await self._seen.take_counters(self._mesh, self._client)
            began_s = time.monotonic()
            (what,) = self._rng.choices([what for what, _ in FAULTS], [weight for _, weight in FAULTS])
            try:
                if isinstance(what, OperationKind):
                    said = await self._operate(what)
                else:
                    said = await self._strike(what)
            except (PdmeshError, TimeoutError):  # the scheduler, or who was drained, was killed before that
                said = None
            if said is not None:
                self._seen.faults[said] += 1
                number, took_s = self._seen.faults.total(), time.monotonic() - began_s
                print(f"  {number:3} {said:16} {took_s:5.1f} s, {len(self._seen.answers)} answers", flush=True)

    async def most_serve(self) -> None:
        """Wait until all instances but one are up; those that were drained are used again."""
        async with asyncio.timeout(BACK_LIMIT_S):
            while True:
                with suppress(PdmeshError):
                    instances = (await self._mesh.state()).instances
                    for each in instances:
                        if each.draining:
                            await self._operator.operate(OperationKind.UNDRAIN, each.instance_id)
                    if sum(each.state == "up" for each in instances) >= sum(POOLS.values()) - 1:
                        return
                await asyncio.sleep(0.1)

    async def _strike(self, stop_s: float | None) -> str:
        pids = {name: pid for name, pid in self._mesh.pids().items() if name != "gateway"}
        victim = self._rng.choice(sorted(pids))
        await kill_or_stop([pids[victim]], stop_s)
        kind = "scheduler" if victim == "scheduler" else "instance"
        return f"{kind} killed" if stop_s is None else f"{kind} stopped"

    async def _operate(self, kind: OperationKind) -> str | None:
        """What was done, or None if the scheduler would not do it."""
        instances = (await self._mesh.state()).instances
        chosen = self._rng.choice(
            [each for each in instances if kind is not OperationKind.MOVE or each.role is not Role.PREFILL]
        )
        match kind:
            case OperationKind.MOVE:
                running = await self._operator.running()
                moved = self._rng.sample(running, min(NUM_MOVED, len(running)))
                async with asyncio.TaskGroup() as tasks:
                    moves = [tasks.create_task(self._move(chosen.instance_id, each)) for each in moved]
                return "moved" if any(move.result() for move in moves) else None
            case OperationKind.ROLE:
                role = self._rng.choice([role for role in Role if role != chosen.role])
                done = await self._operator.operate(kind, chosen.instance_id, role=role)
                return "role changed" if done.state == "done" else None
            case _:
                done = await self._operator.operate(kind, chosen.instance_id)
                return "drained" if done.state == "done" else None

    async def _move(self, target: str, request_id: str) -> bool:
        try:
            return (await self._operator.operate(OperationKind.MOVE, target, request_id)).state == "done"
        except PdmeshError:  # it has ended meanwhile, is there already, or nobody decodes there
            return False


async def storm(mesh: RunningMesh, options: argparse.Namespace) -> tuple[dict[str, Answer], Seen, list[str]]:
    """Undisturbed answers, one of each kind and turn; what was seen after them; and what was not free at the end."""
    bodies, seen, over = bodies_of(1, KINDS, max_tokens=150), Seen(), asyncio.Event()
    async with mesh.client() as client:
        undisturbed = await ask_undisturbed(client, bodies, conversations=True)
        async with asyncio.TaskGroup() as tasks:
            for number in range(options.streams):
                tasks.create_task(converse(client, bodies, number, seen, over))
            await asyncio.sleep(HEALTHY_S)
            await seen.take_counters(mesh, client)
            seen.num_stale_in_health = seen.total("num_stale_prefixes")
            print(f"  before faults: {said(seen)}", flush=True)
            faults = Faults(mesh, client, seen, options.seed)
            await faults.do(options.faults)
            await faults.most_serve()
            over.set()
        await seen.take_counters(mesh, client)
    return undisturbed, seen, await leaks(mesh)


def said(seen: Seen) -> str:
    reused, fetched, loaded, stale = (seen.total(counter) for counter in COUNTERS)
    return (
        f"{reused:,.0f} tokens reused, {fetched:,.0f} copied, {loaded:,.0f} loaded; "
        f"{stale:.0f} requests refused for KV that was not there"
    )


def memory_of(checkpoint: Path, dtype: str, folder: Path) -> dict[str, str]:
    """Settings of a cache that holds a few prompts, and of a tier behind it unless layers have windows or states."""
    config = load_model_config(checkpoint)
    layout = config.kv_layout(dtype=dtype, block_size=128 if config.has_states else 16, frees_windows=True)
    if layout.window:
        num_blocks = CACHED // layout.block_size
        num_frames = 32 if layout.has_states else num_blocks  # of two decodes and a chunk
        num_bytes = cache_bytes(layout, num_blocks, num_frames)
        return {"WORKER_KV_CACHE_BYTES": str(num_bytes), "WORKER_MAX_NUM_SEQS": "2", "WORKER_MAX_MODEL_LEN": "2048"}
    return {
        "WORKER_KV_CACHE_BYTES": str(CACHED * layout.token_bytes),
        "WORKER_KV_OFFLOAD_HOST_BYTES": str(IN_HOST_MEMORY * layout.token_bytes),
        "WORKER_KV_OFFLOAD_DISK_BYTES": str(ON_DISK * layout.token_bytes),
        "WORKER_KV_OFFLOAD_DIR": str(folder / "tier"),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--streams", type=int, default=6, help="at once")
    add_model_arguments(parser)
    parser.add_argument("--keep", type=Path, help="keep the mesh's folder, with its logs, here")
    options = parser.parse_args()
    print(heading("Faults while KV is reused, copied and loaded"), flush=True)
    began_s = time.monotonic()
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.keep or Path(temporary)
        checkpoint = checkpoint_of(options.architecture, folder / "model", SHAPE, options.dtype)
        settings = {
            "WORKER_MAX_MODEL_LEN": "4096",
            **exact_settings(options),
            **memory_of(checkpoint, options.dtype, folder),
            "WORKER_NUM_THREADS": "1",
            "SCHEDULER_EVENT_LOG": str(folder / "events.log"),
        }
        with running_mesh(folder, model=checkpoint, **POOLS, settings=settings) as mesh:
            undisturbed, seen, leaked = asyncio.run(storm(mesh, options))
    counters = COUNTERS[: 2 + ("WORKER_KV_OFFLOAD_DIR" in settings)]
    report(undisturbed, seen, leaked, time.monotonic() - began_s, counters)


def report(undisturbed: dict[str, Answer], seen: Seen, leaked: list[str], took_s: float, used: Sequence[str]) -> None:
    limits = Limits()
    faults = ", ".join(f"{number} {what}" for what, number in sorted(seen.faults.items()))
    print(f"{seen.faults.total()} faults ({faults}) in {took_s:.0f} s, {len(seen.answers)} answers")
    print(said(seen))
    for what, counter in zip(("reused", "copied", "loaded"), used, strict=False):
        limits.at_least(f"tokens {what}", seen.total(counter), 1)
    found = {"answers lost": seen.lost(), "answers that differ": seen.differ(undisturbed), "leaks": leaked}
    judge_none(found, limits)
    stale = seen.num_stale_in_health
    print(f"refused before the first fault: {stale:.0f}; {limits.at_most('refused in health', stale, 0.5)}")
    limits.end()


if __name__ == "__main__":
    main()
