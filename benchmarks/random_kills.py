"""Random kills and stops under load: is any stream lost or changed, and how long does anybody wait?

Usage: python benchmarks/random_kills.py [--faults N] [--seed N] [--streams N] [--prefill N] [--decode N] [--no-timings]

A mesh of real processes (2 prefill, 2 decode by default) serves streams of several kinds (greedy, seeded, with
logprobs, n = 2, stop strings, long prompts), so many at once all the time. Every few seconds one or two of its
processes, any but the gateway, are killed, or stopped for 5 or 30 s. Each answer is compared with that of an
undisturbed request: tokens, text, finish reasons and, to 1e-4, logprobs. With each fault a new request is sent, and its
first token timed.

Exit code 1 if a stream was lost or differs, or, without ``--no-timings``, if the 99th percentile of all gaps between a
stream's events, or the median recovery where the scheduler and one healthy instance of each kind were left, is above
1 s.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import httpx

from pdmesh.metrics import percentile
from pdmesh.testing.checkpoints import TINY, write_checkpoint
from pdmesh.testing.exactness import random_prompts
from pdmesh.testing.mesh import RunningMesh, running_mesh

#: Between the end of one fault and the beginning of the next, seconds.
PAUSE_S = (2.0, 6.0)

#: What is done to a victim, how often: killed, or stopped for so long, seconds.
FAULTS = ((None, 6), (5.0, 2), (30.0, 1))

LIMIT_S = 1.0

LOGPROB_TOLERANCE = 1e-4

#: No stream may take longer: it is lost.
STREAM_LIMIT_S = 240.0


def kinds(seed: int) -> list[dict[str, Any]]:
    """Bodies of requests, each answered in the same way whenever it is sent."""
    prompts = random_prompts([24, 60, 90, 40, 33, 50, 400, 700], TINY.vocab_size, seed=seed)
    own: list[dict[str, Any]] = [
        {"temperature": 0},
        {"temperature": 0.8, "seed": 7},
        {"temperature": 0, "logprobs": 2},
        {"temperature": 0.7, "seed": 11, "n": 2},
        {"temperature": 0.9, "seed": 13, "top_k": 50, "logprobs": 0},
        {"temperature": 0, "stop": ["e", "qu"], "min_tokens": 60},
        {"temperature": 0},
        {"temperature": 0.8, "seed": 17},
    ]
    return [
        {"prompt": prompt, "max_tokens": 240, "ignore_eos": True, "stream": True, "return_token_ids": True, **fields}
        for prompt, fields in zip(prompts, own, strict=True)
    ]


@dataclass(slots=True)
class Choice:
    token_ids: list[int] = field(default_factory=list[int])
    text: str = ""
    logprobs: list[float] = field(default_factory=list[float])
    finish: str | None = None


@dataclass(slots=True)
class Answer:
    choices: dict[int, Choice] = field(default_factory=dict[int, Choice])
    gaps_s: list[float] = field(default_factory=list[float])
    first_s: float | None = None
    error: str | None = None

    def differs(self, other: Answer) -> str | None:
        """In what, or None."""
        for index, mine in self.choices.items():
            its = other.choices[index]
            if mine.token_ids != its.token_ids:
                at = next(
                    (
                        i
                        for i, pair in enumerate(zip(mine.token_ids, its.token_ids, strict=False))
                        if len(set(pair)) > 1
                    ),
                    min(len(mine.token_ids), len(its.token_ids)),
                )
                return f"choice {index} from token {at} on"
            if (mine.text, mine.finish, len(mine.logprobs)) != (its.text, its.finish, len(its.logprobs)):
                return f"choice {index} in its text or end"
            worst = max((abs(a - b) for a, b in zip(mine.logprobs, its.logprobs, strict=True)), default=0.0)
            if worst > LOGPROB_TOLERANCE:
                return f"choice {index} by {worst:.1e} in a logprob"
        return None if self.choices.keys() == other.choices.keys() else "its choices"


async def ask(client: httpx.AsyncClient, body: dict[str, Any]) -> Answer:
    """One streamed request, to its end."""
    answer, began_s, done = Answer(), time.monotonic(), False
    last_s = began_s
    try:
        async with asyncio.timeout(STREAM_LIMIT_S), client.stream("POST", "/v1/completions", json=body) as response:
            if response.status_code != 200:
                answer.error = f"{response.status_code} {(await response.aread()).decode()[:200]}"
                return answer
            async for line in response.aiter_lines():
                done = done or line == "data: [DONE]"
                if not line.startswith("data: {"):
                    continue
                event, now_s = json.loads(line[6:]), time.monotonic()
                if "error" in event:
                    answer.error = event["error"]["message"]
                    return answer
                if answer.first_s is None:
                    answer.first_s = now_s - began_s
                else:
                    answer.gaps_s.append(now_s - last_s)
                last_s = now_s
                for part in event["choices"]:
                    choice = answer.choices.setdefault(part["index"], Choice())
                    choice.token_ids += part["token_ids"]
                    choice.text += part["text"]
                    choice.logprobs += (part.get("logprobs") or {}).get("token_logprobs") or []
                    choice.finish = part["finish_reason"] or choice.finish
    except (httpx.HTTPError, TimeoutError) as error:
        answer.error = repr(error)
        return answer
    if not done:
        answer.error = "the stream ended without [DONE]"
    return answer


@dataclass(slots=True)
class Seen:
    answers: list[tuple[int, Answer]] = field(default_factory=list[tuple[int, Answer]])
    recoveries_s: list[float] = field(default_factory=list[float])  # where somebody healthy was left
    other_recoveries_s: list[float] = field(default_factory=list[float])
    probes_lost: list[str] = field(default_factory=list[str])
    faults: Counter[str] = field(default_factory=Counter[str])


def is_left(alive: set[str]) -> bool:
    """Whether a new request can be served without waiting for anybody."""
    return all(any(name.startswith(kind) for name in alive) for kind in ("scheduler", "prefill", "decode"))


async def do_faults(mesh: RunningMesh, client: httpx.AsyncClient, seen: Seen, num_faults: int, seed: int) -> None:
    rng = random.Random(seed)
    probe = {**kinds(seed)[0], "max_tokens": 4}
    for _ in range(num_faults):
        await asyncio.sleep(rng.uniform(*PAUSE_S))
        pids = {name: pid for name, pid in mesh.pids().items() if name != "gateway"}
        victims = rng.sample(sorted(pids), rng.choice((1, 1, 2)))
        (stop_s,) = rng.choices([stop_s for stop_s, _ in FAULTS], [weight for _, weight in FAULTS])
        for victim in victims:
            os.kill(pids[victim], signal.SIGKILL if stop_s is None else signal.SIGSTOP)
        what = "killed" if stop_s is None else f"stopped {stop_s:g} s"
        seen.faults[what] += len(victims)
        probing = asyncio.create_task(ask(client, probe))
        if stop_s is not None:
            await asyncio.sleep(stop_s)
            for victim in victims:
                with suppress(ProcessLookupError):  # it hung too long for the supervisor
                    os.kill(pids[victim], signal.SIGCONT)
        answer = await probing
        shown = f"  {what:12} {', '.join(victims):24}"
        if answer.error is not None or answer.first_s is None:
            seen.probes_lost.append(answer.error or "nothing came")
            print(f"{shown} new request: {answer.error}", flush=True)
            continue
        healthy = is_left(set(pids) - set(victims))
        (seen.recoveries_s if healthy else seen.other_recoveries_s).append(answer.first_s)
        print(f"{shown} new request after {answer.first_s:6.2f} s{'' if healthy else ' (nobody was left)'}", flush=True)


async def storm(mesh: RunningMesh, options: argparse.Namespace) -> tuple[list[Answer], Seen]:
    bodies, seen = kinds(options.seed), Seen()
    async with mesh.client() as client:
        undisturbed = [await ask(client, body) for body in bodies]
        over = asyncio.Event()

        async def keep_asking(number: int) -> None:
            kind = number
            while not over.is_set():
                kind = (kind + 1) % len(bodies)
                seen.answers.append((kind, await ask(client, bodies[kind])))

        async with asyncio.TaskGroup() as tasks:
            for number in range(options.streams):
                tasks.create_task(keep_asking(number))
            await do_faults(mesh, client, seen, options.faults, options.seed)
            over.set()
    return undisturbed, seen


def report(undisturbed: list[Answer], seen: Seen, *, timings: bool) -> bool:
    """Print what was seen; whether it is as it should be."""
    lost = [answer.error for _, answer in seen.answers if answer.error is not None]
    ended = [(kind, answer) for kind, answer in seen.answers if answer.error is None]
    differ = [(kind, why) for kind, answer in ended if (why := answer.differs(undisturbed[kind])) is not None]
    gaps_s = sorted(gap_s for _, answer in seen.answers for gap_s in answer.gaps_s)
    gap_p99_s = percentile(gaps_s, 99) or 0.0
    recovery_s = median(seen.recoveries_s) if seen.recoveries_s else 0.0
    print(f"faults: {dict(seen.faults)}")
    print(f"streams: {len(seen.answers)}, lost {len(lost)}, differ {len(differ)}; probes lost {len(seen.probes_lost)}")
    for why, count in Counter(lost + seen.probes_lost).most_common():
        print(f"  lost: {count} x {why}")
    for kind, why in differ:
        print(f"  differs: kind {kind}, {why}")
    longest_s = gaps_s[-1] if gaps_s else 0.0
    print(f"gaps between events: p99 {gap_p99_s:.3f} s, longest {longest_s:.1f} s, of {len(gaps_s)}")
    for name, times_s in (("somebody healthy was left", seen.recoveries_s), ("nobody was", seen.other_recoveries_s)):
        if times_s:
            print(f"new request, {name}: p50 {median(times_s):.2f} s, longest {max(times_s):.2f} s, of {len(times_s)}")
    is_good = not (lost or differ or seen.probes_lost)
    return is_good and (not timings or (gap_p99_s <= LIMIT_S and recovery_s <= LIMIT_S))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=30)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--streams", type=int, default=8, help="at once")
    parser.add_argument("--prefill", type=int, default=2)
    parser.add_argument("--decode", type=int, default=2)
    parser.add_argument("--no-timings", action="store_true", help="on a busy machine: timings are printed, not judged")
    parser.add_argument("--keep", type=Path, help="keep the mesh's folder, with its logs, here")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.keep or Path(temporary)
        checkpoint = write_checkpoint(folder / "model", seed=3)
        with running_mesh(folder, model=checkpoint, prefill=options.prefill, decode=options.decode) as mesh:
            undisturbed, seen = asyncio.run(storm(mesh, options))
    broken = [answer.error for answer in undisturbed if answer.error is not None]
    if broken:
        print(f"undisturbed requests failed: {broken}")
        return 1
    return 0 if report(undisturbed, seen, timings=not options.no_timings) else 1


if __name__ == "__main__":
    sys.exit(main())
