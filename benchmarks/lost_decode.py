"""The only decode instance killed under load: how long do streams wait, and how fast are tokens without it?

Usage: python benchmarks/lost_decode.py [--model PATH] [--streams 20] [--away 20] [--max-tokens 240] [--seed 1]

A mesh of real processes (1 prefill, 1 decode) serves so many streams at once all the time, greedy and seeded in turns.
The decode instance is killed (SIGKILL), and its supervisor is stopped for ``--away`` seconds, so that no successor
starts. Then the supervisor goes on, the successor joins, and streams go back to it. Each answer is compared with that
of an undisturbed request.

Exit code 1 if a stream was lost or differs, if the longest gap of a stream is above 2 s, or if less than 0.3 of the
events a second come while the instance is away.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import tempfile
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from statistics import median

from report import Limits, heading

from pdmesh_testing.checkpoints import write_checkpoint
from pdmesh_testing.load import Stream, StreamLoad, requests_of, running_load
from pdmesh_testing.mesh import RunningMesh, running_mesh

#: How long the load is measured before the kill, and after the successor has joined, seconds.
BEFORE_S, AFTER_S = 10.0, 10.0

#: How long the successor may take to start, seconds.
START_S = 120.0

MAX_GAP_S, LEAST_SHARE = 2.0, 0.3


def gaps(streams: list[Stream], begin_s: float, end_s: float) -> Iterator[tuple[float, float]]:
    """Yield each gap between two events of a stream, or before its first, that overlaps the time, and its beginning."""
    for stream in streams:
        for before_s, after_s in pairwise([stream.began_s, *stream.token_times_s]):
            if before_s <= end_s and after_s > begin_s:
                yield after_s - before_s, before_s


async def run(mesh: RunningMesh, options: argparse.Namespace) -> tuple[StreamLoad, dict[str, float]]:
    """Return the load with its streams, and when what happened."""
    at_s: dict[str, float] = {}
    requests = requests_of(options.seed, [30 + 13 * index for index in range(10)], options.max_tokens)
    async with running_load(mesh.base_url, mesh.model, requests, at_once=options.streams) as load:
        await load.all_draw(options.streams)
        at_s["begin"] = time.monotonic()
        await asyncio.sleep(BEFORE_S)
        victim = mesh.pids()["decode-0"]
        os.kill(mesh.record.supervisor.pid, signal.SIGSTOP)
        try:
            os.kill(victim, signal.SIGKILL)
            at_s["killed"] = time.monotonic()
            await asyncio.sleep(options.away)
        finally:
            os.kill(mesh.record.supervisor.pid, signal.SIGCONT)
        at_s["back"] = time.monotonic()
        await asyncio.to_thread(mesh.wait_until_replaced, "decode-0", victim, START_S)
        at_s["joined"] = time.monotonic()
        await asyncio.sleep(AFTER_S)
        at_s["end"] = time.monotonic()
        rows = (await mesh.state()).instances
        print("decodes at the end: " + ", ".join(f"{row.instance_id} {row.num_decoding}" for row in rows))
    return load, at_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a checkpoint; by default a tiny one with random weights")
    parser.add_argument("--streams", type=int, default=20)
    parser.add_argument("--away", type=float, default=20.0)
    parser.add_argument("--max-tokens", type=int, default=240)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    print(heading("The only decode instance killed under load"))
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        model = options.model or write_checkpoint(folder / "model", seed=3, max_position_embeddings=4096)
        with running_mesh(folder, model=model, prefill=1, decode=1) as mesh:
            load, at_s = asyncio.run(run(mesh, options))
    limits = Limits()
    before = load.num_tokens(at_s["begin"], at_s["killed"]) / (at_s["killed"] - at_s["begin"])
    away = load.num_tokens(at_s["killed"], at_s["back"]) / (at_s["back"] - at_s["killed"])
    after = load.num_tokens(at_s["joined"], at_s["end"]) / (at_s["end"] - at_s["joined"])
    share, start_s = away / before, at_s["joined"] - at_s["back"]
    print(f"events with tokens a second: {before:.0f} before, {away:.0f} away, {after:.0f} from its return on")
    print(f"away over before: {share:.2f}; {limits.at_least('tokens while away', share, LEAST_SHARE)}")
    for what, begin, end in (("before", "begin", "killed"), ("away", "killed", "back"), ("return", "back", "end")):
        found = max(gaps(load.streams, at_s[begin], at_s[end]), default=(0.0, 0.0))
        verdict = "" if what == "before" else f"; {limits.at_most(f'gap, {what}', found[0], MAX_GAP_S)}"
        print(f"longest gap, {what}: {found[0]:.2f} s, from {found[1] - at_s['killed']:+.2f} s after the kill{verdict}")
    across = [gap for gap, begin in gaps(load.streams, at_s["killed"], at_s["killed"]) if begin < at_s["killed"]]
    print(f"gaps across the kill: {len(across)}, median {median(across):.2f} s, longest {max(across):.2f} s")
    print(f"the successor joined {start_s:.1f} s after the supervisor went on")
    print(f"streams: {len(load.streams)}; lost {len(load.failed)}, differ {len(load.differ)}", load.failed[:2])
    limits.at_most("lost", len(load.failed), 0.5)
    limits.at_most("differ", len(load.differ), 0.5)
    limits.end()


if __name__ == "__main__":
    main()
