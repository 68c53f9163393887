"""Random kills and stops under load: is any stream lost or changed, and how long does anybody wait?

Usage: python -m benchmarks.faults.random_kills [--faults N] [--seed N] [--streams N] [--prefill N] [--decode N]
    [--mixed N] [--architecture NAME] [--dtype float32|bfloat16] [--no-timings] [--conversations]

A mesh of real processes (2 prefill, 2 decode by default) serves streams of several kinds (greedy, seeded, with
logprobs, n = 2, stop strings, long prompts), so many at once all the time. Every few seconds one or two of its
processes, any but the gateway, are killed, or stopped for 5 or 30 s. Each answer is compared with that of an
undisturbed request: tokens, text, finish reasons and logprobs, to the bit. With each fault a new request is sent, and
its first token timed: its *recovery*. Somebody healthy was left if, by its own status before the fault, the mesh had a
scheduler and an instance of each kind that were no victims. With ``--conversations`` what can be gone on with has a
second turn, whose prompt is the first turn with its answer and a few tokens more; no conversation shares KV with
another, so first turns are computed and second turns reuse what the faults left.

Exit code 1 if a stream was lost or differs, if a kind of stream does not show what it is there for, or, without
``--no-timings``, if the 99th percentile of all gaps between a stream's events, or the longest recovery where somebody
healthy was left, is above 1 s.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import httpx

from benchmarks.exactness.exactness import checkpoint_of
from benchmarks.faults.answers import (
    Answer,
    Answers,
    add_model_arguments,
    ask,
    ask_undisturbed,
    bodies_of,
    exact_settings,
    judge_none,
    keep_asking,
    kill_or_stop,
    serving,
)
from benchmarks.harness.report import Limits, heading
from pdmesh.metrics import percentile
from pdmesh_testing.mesh import RunningMesh, running_mesh

#: Between the end of one fault and the beginning of the next, seconds.
PAUSE_S = (2.0, 6.0)

#: What is done to a victim, how often: killed, or stopped for so long, seconds.
FAULTS = ((None, 6), (5.0, 2), (30.0, 1))

LIMIT_S = 1.0

#: What is asked: prompt tokens, and the fields of the body.
KINDS: dict[str, tuple[int, dict[str, Any]]] = {
    "greedy": (24, {"temperature": 0}),
    "seeded": (60, {"temperature": 0.8, "seed": 7}),
    "greedy, logprobs": (90, {"temperature": 0, "logprobs": 2}),
    "seeded, n = 2": (40, {"temperature": 0.7, "seed": 11, "n": 2}),
    "seeded, top_k, logprobs": (33, {"temperature": 0.9, "seed": 13, "top_k": 50, "logprobs": 0}),
    "greedy, stop strings": (50, {"temperature": 0, "stop": ["e", "qu"], "min_tokens": 60}),
    "greedy, long prompt": (400, {"temperature": 0}),
    "seeded, long prompt": (700, {"temperature": 0.8, "seed": 17}),
}


@dataclass(slots=True)
class Seen(Answers):
    recoveries_s: list[float] = field(default_factory=list[float])  # where somebody healthy was left
    other_recoveries_s: list[float] = field(default_factory=list[float])
    probes_lost: list[str] = field(default_factory=list[str])
    faults: Counter[str] = field(default_factory=Counter[str])


def is_left(alive: set[str]) -> bool:
    """Whether a new request can be served without waiting for anybody."""
    kinds = {name.rpartition("-")[0] for name in alive}
    return "scheduler" in alive and ("mixed" in kinds or {"prefill", "decode"} <= kinds)


async def do_faults(mesh: RunningMesh, client: httpx.AsyncClient, seen: Seen, num_faults: int, seed: int) -> None:
    rng = random.Random(seed)
    probe = {**bodies_of(seed, KINDS)["greedy"], "max_tokens": 4}
    for _ in range(num_faults):
        await asyncio.sleep(rng.uniform(*PAUSE_S))
        pids = {name: pid for name, pid in mesh.pids().items() if name != "gateway"}
        victims = rng.sample(sorted(pids), rng.choice((1, 1, 2)))
        (stop_s,) = rng.choices([stop_s for stop_s, _ in FAULTS], [weight for _, weight in FAULTS])
        healthy = is_left(await serving(mesh) - set(victims))
        strike = asyncio.create_task(kill_or_stop([pids[victim] for victim in victims], stop_s))
        what = "killed" if stop_s is None else f"stopped {stop_s:g} s"
        seen.faults[what] += len(victims)
        probing = asyncio.create_task(ask(client, probe))
        await strike
        answer = await probing
        shown = f"  {what:12} {', '.join(victims):24}"
        if answer.error is not None or answer.first_s is None:
            seen.probes_lost.append(answer.error or "nothing came")
            print(f"{shown} new request: {answer.error}", flush=True)
            continue
        (seen.recoveries_s if healthy else seen.other_recoveries_s).append(answer.first_s)
        print(f"{shown} new request after {answer.first_s:6.2f} s{'' if healthy else ' (nobody was left)'}", flush=True)


async def storm(mesh: RunningMesh, options: argparse.Namespace) -> tuple[dict[str, Answer], Seen]:
    """Undisturbed answers, one of each kind, and what was seen after them. Raises SystemExit if they show nothing."""
    bodies, seen, over = bodies_of(options.seed, KINDS), Seen(), asyncio.Event()
    async with mesh.client() as client:
        undisturbed = await ask_undisturbed(client, bodies, conversations=options.conversations)
        async with asyncio.TaskGroup() as tasks:
            for number in range(options.streams):
                tasks.create_task(keep_asking(client, bodies, number, seen, over))
            await do_faults(mesh, client, seen, options.faults, options.seed)
            over.set()
    return undisturbed, seen


def report(undisturbed: dict[str, Answer], seen: Seen, *, timings: bool) -> None:
    """Print what was seen, and exit: with 1 if anything is not as it should be."""
    limits = Limits()
    print(f"faults: {dict(seen.faults)}; streams: {dict(Counter(kind for kind, _ in seen.answers))}")
    lost = {"streams lost": seen.lost(), "new requests lost": seen.probes_lost}
    judge_none({**lost, "streams that differ": seen.differ(undisturbed)}, limits)
    gaps_s = sorted(gap_s for _, answer in seen.answers for gap_s in answer.gaps_s)
    gap_p99_s = percentile(gaps_s, 99) or 0.0
    stands = limits.at_most("the gaps", gap_p99_s, LIMIT_S) if timings else "not judged"
    print(f"gaps between events: p99 {gap_p99_s:.3f} s ({stands}), longest {max(gaps_s):.1f} s, of {len(gaps_s)}")
    for name, times_s, judged in (
        ("somebody healthy was left", seen.recoveries_s, timings),
        ("nobody was", seen.other_recoveries_s, False),
    ):
        if times_s:
            longest_s = max(times_s)
            stands = limits.at_most("the recovery", longest_s, LIMIT_S) if judged else "not judged"
            print(f"new request, {name}: p50 {median(times_s):.2f} s, longest {longest_s:.2f} s ({stands})")
    limits.end()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=30)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--streams", type=int, default=8, help="at once")
    parser.add_argument("--prefill", type=int, default=2)
    parser.add_argument("--decode", type=int, default=2)
    parser.add_argument("--mixed", type=int, default=0)
    add_model_arguments(parser)
    parser.add_argument("--conversations", action="store_true", help="with second turns, whose prompts reuse KV")
    parser.add_argument("--no-timings", action="store_true", help="on a busy machine: timings are printed, not judged")
    parser.add_argument("--keep", type=Path, help="keep the mesh's folder, with its logs, here")
    options = parser.parse_args()
    print(heading("Processes killed and stopped at random"), flush=True)
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.keep or Path(temporary)
        checkpoint = checkpoint_of(options.architecture, folder / "model", dtype=options.dtype)
        pools = {"prefill": options.prefill, "decode": options.decode, "mixed": options.mixed}
        with running_mesh(folder, model=checkpoint, **pools, settings=exact_settings(options)) as mesh:
            undisturbed, seen = asyncio.run(storm(mesh, options))
    report(undisturbed, seen, timings=not options.no_timings)


if __name__ == "__main__":
    main()
