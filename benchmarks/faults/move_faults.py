"""Source or target of a running decode's move is killed or stopped, at each point of the move: does anybody notice?

    python -m benchmarks.faults.move_faults [--faults 300] [--seed 1] [--streams 6] [--conversations]
        [--architecture NAME] [--dtype float32|bfloat16]

A mesh of real processes (2 prefill, 2 decode) serves streams of several kinds, so many at once all the time, and all
that decodes is told to move to and fro. A process comes to a point (`fault_points` beside this file) and is killed, or
stopped for less and for more than 250 ms, and the 5 s of a lease. Pieces are small, so that moves last.

Exit code 1 if an answer was lost or differs from an undisturbed one, if two instances drew the same index of a
request in the same epoch, if blocks are not free at the end, or if a point was not come to.

One case of two instances is no failure: what was to receive a *hand-over* stood still for so long that the KV went to
another receiver in the same epoch, and goes on with what had landed until it hears of that. Gateways take no token from
it, because it is not its turn. Such requests are counted apart.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import signal
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count, cycle, islice
from pathlib import Path
from typing import Any

from benchmarks.exactness.exactness import checkpoint_of
from benchmarks.faults.answers import (
    Answer,
    Answers,
    add_model_arguments,
    ask_undisturbed,
    bodies_of,
    exact_settings,
    judge_none,
    keep_asking,
    leaks,
    serving,
)
from benchmarks.harness.report import Limits, heading
from pdmesh.errors import PdmeshError
from pdmesh.operations import OperationKind
from pdmesh_testing.mesh import RunningMesh, running_mesh
from pdmesh_testing.operating import operator_of

POINTS = (
    "target: asked",
    "target: reserved",
    "source: granted",
    "source: pages go over",
    "target: pages come",
    "source: stands still",
    "source: about to commit",
    "target: a commit comes",
    "source: committed",
    "target: has it",
    "target: about to acknowledge",
    "target: acknowledged",
    "source: heard that it landed",
    "source: told that it landed",
    "target: goes on",
)

#: What is done at a point: killed, or stopped for so long, seconds.
FAULTS: tuple[float | None, ...] = (None, 0.1, None, 0.4, None, 1.5, None, 7.0)

#: A point that nothing comes to for so long is given up.
HIT_LIMIT_S = 60.0
BACK_LIMIT_S = 120.0

#: So many moves are asked for at once.
NUM_MOVERS = 3

SETTINGS = {
    "TRANSFER_MAX_PAYLOAD_BYTES": "4096",  # a block of a layer
    "WORKER_NUM_THREADS": "1",
}

#: What is asked: prompt tokens, and the fields of the body.
KINDS: dict[str, tuple[int, dict[str, Any]]] = {
    "greedy": (31, {"temperature": 0}),
    "seeded": (160, {"temperature": 0.8, "seed": 7}),
    "greedy, logprobs": (90, {"temperature": 0, "logprobs": 2}),
    "seeded, n = 2": (33, {"temperature": 0.7, "seed": 11, "n": 2}),
    "seeded, penalties": (
        700,
        {"temperature": 0.9, "seed": 13, "repetition_penalty": 1.2, "frequency_penalty": 0.4, "presence_penalty": 0.3},
    ),
    "greedy, long prompt": (1500, {"temperature": 0}),
}


@dataclass(slots=True)
class Seen(Answers):
    hits: Counter[tuple[str, str]] = field(default_factory=Counter[tuple[str, str]])  # by point and fault
    not_hit: Counter[str] = field(default_factory=Counter[str])


class Faults:
    def __init__(self, mesh: RunningMesh, folder: Path, seen: Seen, seed: int) -> None:
        self._mesh = mesh
        self._folder = folder
        self._seen = seen
        self._rng = random.Random(seed)
        self._operator = operator_of(mesh)

    async def do(self, num_faults: int, seed: int) -> None:
        # Neighbours differ, lest kills follow one another: the supervisor waits longer each time.
        plan = [
            (point, FAULTS[(place + turn) % len(FAULTS)])
            for turn in range(len(FAULTS))
            for place, point in enumerate(POINTS)
        ]
        for number, (point, how) in enumerate(islice(cycle(plan), seed % len(plan), seed % len(plan) + num_faults)):
            await self._all_serve()
            began_s = time.monotonic()
            said = "killed" if how is None else f"stopped {how:g} s"
            hit = await self._fault(point, how)
            if hit:
                self._seen.hits[point, said] += 1
            else:
                self._seen.not_hit[point] += 1
            print(
                f"  {number + 1:3} {point:30} {said if hit else 'not come to':12} {time.monotonic() - began_s:5.1f} s",
                flush=True,
            )

    async def _all_serve(self) -> None:
        async with asyncio.timeout(BACK_LIMIT_S):
            while True:
                if {"scheduler", "prefill-0", "prefill-1", "decode-0", "decode-1"} <= await serving(self._mesh):
                    return
                await asyncio.sleep(0.1)

    async def _fault(self, point: str, how: float | None) -> bool:
        """Whether anybody came to the point."""
        source, target = self._rng.sample(("decode-0", "decode-1"), 2)
        victim = source if point.startswith("source") else target
        pid = self._mesh.pids()[victim]
        armed, hit = self._folder / f"{victim}.armed", self._folder / f"{victim}.hit"
        hit.unlink(missing_ok=True)
        which = self._rng.randint(1, 40) if "pages" in point else 1
        fresh = armed.with_suffix(".fresh")
        number = signal.SIGKILL if how is None else signal.SIGSTOP
        fresh.write_text(f"{point.replace(' ', '_')} {int(number)} {which}")
        fresh.rename(armed)
        try:
            async with asyncio.TaskGroup() as tasks:
                movers = [tasks.create_task(self._move_to(target, each)) for each in range(NUM_MOVERS)]
                ends_s = time.monotonic() + HIT_LIMIT_S
                while time.monotonic() < ends_s:
                    if hit.exists():
                        break
                    await asyncio.sleep(0.01)
                if how is not None and hit.exists():
                    await asyncio.sleep(how)
                for mover in movers:
                    mover.cancel()
        finally:
            armed.unlink(missing_ok=True)
            if how is not None:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)
        if hit.exists() and how is None:  # the scheduler calls one that was killed up for a moment
            await asyncio.to_thread(self._mesh.wait_until_replaced, victim, pid, BACK_LIMIT_S)
        return hit.exists()

    async def _move_to(self, target: str, number: int) -> None:
        """One after the other, what decodes elsewhere; and now and then something the other way."""
        rng = random.Random(self._rng.getrandbits(32))
        other = "decode-0" if target == "decode-1" else "decode-1"
        for turn in count(number):
            try:
                running = await self._operator.running()
                if running:
                    to = other if turn % 4 == 3 else target
                    async with asyncio.timeout(5.0):
                        await self._operator.operate(OperationKind.MOVE, to, rng.choice(running))
            except (PdmeshError, TimeoutError):
                pass
            await asyncio.sleep(0.02)


async def storm(
    mesh: RunningMesh, folder: Path, options: argparse.Namespace
) -> tuple[dict[str, Answer], Seen, list[str]]:
    """Undisturbed answers, one of each kind; what was seen after them; and what was not free at the end."""
    bodies, seen, over = bodies_of(1, KINDS, max_tokens=400), Seen(), asyncio.Event()
    async with mesh.client() as client:
        undisturbed = await ask_undisturbed(client, bodies, conversations=options.conversations)
        async with asyncio.TaskGroup() as tasks:
            for number in range(options.streams):
                tasks.create_task(keep_asking(client, bodies, number, seen, over))
            await Faults(mesh, folder, seen, options.seed).do(options.faults, options.seed)
            over.set()
    return undisturbed, seen, await leaks(mesh)


def twice_drawn(folder: Path) -> tuple[list[str], list[str]]:
    """Indices of a request and epoch that two processes drew; and requests and epochs that two were handed."""
    drawn: dict[tuple[str, str, str], set[str]] = defaultdict(set)
    handed: dict[tuple[str, str], set[str]] = defaultdict(set)
    for file in folder.glob("*.tokens"):
        for line in file.read_text().splitlines():
            request_id, epoch, index, _, came_by = line.split()
            drawn[request_id, epoch, index].add(file.stem)
            if came_by == "HAND_OVER":
                handed[request_id, epoch].add(file.stem)
    handed = {key: names for key, names in handed.items() if len(names) > 1}
    twice = {key: names for key, names in drawn.items() if len(names) > 1 and key[:2] not in handed}
    return _listed(twice), _listed(handed)


def _listed(by_key: Mapping[Any, set[str]]) -> list[str]:
    return [f"{' '.join(key)} by {' and '.join(sorted(names))}" for key, names in by_key.items()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0, help="also with which of the points and faults to begin")
    parser.add_argument("--streams", type=int, default=6, help="at once")
    add_model_arguments(parser)
    parser.add_argument("--conversations", action="store_true", help="with second turns, whose prompts reuse KV")
    parser.add_argument("--keep", type=Path, help="keep the mesh's folder, with its logs, here")
    options = parser.parse_args()
    print(heading("Source or target of a move, killed or stopped at each of its points"), flush=True)
    began_s = time.monotonic()
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.keep or Path(temporary)
        points = folder / "points"
        points.mkdir(parents=True, exist_ok=True)
        os.environ["MOVE_FAULTS_FOLDER"] = str(points)
        own = str(Path(__file__).parent / "fault_points")
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (own, os.environ.get("PYTHONPATH"))))
        settings = {**SETTINGS, **exact_settings(options), "SCHEDULER_EVENT_LOG": str(folder / "events.log")}
        checkpoint = checkpoint_of(options.architecture, folder / "model", dtype=options.dtype)
        with running_mesh(folder, model=checkpoint, prefill=2, decode=2, settings=settings) as mesh:
            undisturbed, seen, leaked = asyncio.run(storm(mesh, points, options))
        twice, handed = twice_drawn(points)
    report(undisturbed, seen, leaked, twice, handed, time.monotonic() - began_s)


def report(
    undisturbed: dict[str, Answer],
    seen: Seen,
    leaked: list[str],
    twice: list[str],
    handed: list[str],
    duration_s: float,
) -> None:
    limits = Limits()
    faults = sorted({said for _, said in seen.hits})
    print(f"{'faults':30} " + " ".join(f"{said:>13}" for said in faults))
    for point in POINTS:
        print(f"{point:30} " + " ".join(f"{seen.hits[point, said]:13}" for said in faults))
    print(f"{seen.hits.total()} faults in {duration_s:.0f} s, {len(seen.answers)} answers")
    found = {
        "answers lost": seen.lost(),
        "answers that differ": seen.differ(undisturbed),
        "indices drawn by two instances": twice,
        "leaks": leaked,
        "points not come to": [f"{point} {number} x" for point, number in seen.not_hit.items()],
    }
    judge_none(found, limits)
    print(f"requests that two receivers of a hand-over decoded: {len(handed)} {handed[:3]}")
    limits.end()


if __name__ == "__main__":
    main()
