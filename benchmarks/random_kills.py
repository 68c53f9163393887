"""Random kills and stops under load: is any stream lost or changed, and how long does anybody wait?

Usage: python benchmarks/random_kills.py [--faults N] [--seed N] [--streams N] [--prefill N] [--decode N] [--no-timings]
                                         [--conversations]

A mesh of real processes (2 prefill, 2 decode by default) serves streams of several kinds (greedy, seeded, with
logprobs, n = 2, stop strings, long prompts), so many at once all the time. Every few seconds one or two of its
processes, any but the gateway, are killed, or stopped for 5 or 30 s. Each answer is compared with that of an
undisturbed request: tokens, text, finish reasons and, to 1e-4, logprobs. With each fault a new request is sent, and its
first token timed: its *recovery*. Somebody healthy was left if, by its own status before the fault, the mesh had a
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
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import cycle, islice
from pathlib import Path
from statistics import median
from typing import Any

import httpx

from pdmesh.errors import PdmeshError
from pdmesh.metrics import percentile
from pdmesh_testing.checkpoints import TINY, write_checkpoint
from pdmesh_testing.exactness import random_prompts
from pdmesh_testing.mesh import RunningMesh, running_mesh

#: Between the end of one fault and the beginning of the next, seconds.
PAUSE_S = (2.0, 6.0)

#: What is done to a victim, how often: killed, or stopped for so long, seconds.
FAULTS = ((None, 6), (5.0, 2), (30.0, 1))

LIMIT_S = 1.0

LOGPROB_TOLERANCE = 1e-4

#: How the kind of what goes on with another is called.
SECOND_TURN = ", second turn"

#: No stream may take longer: it is lost.
STREAM_LIMIT_S = 240.0


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


def bodies_of(
    seed: int, kinds: Mapping[str, tuple[int, dict[str, Any]]] = KINDS, max_tokens: int = 240
) -> dict[str, dict[str, Any]]:
    """A request of each kind, answered in the same way whenever it is sent."""
    prompts = random_prompts([length for length, _ in kinds.values()], TINY.vocab_size, seed=seed)
    common = {"max_tokens": max_tokens, "ignore_eos": True, "stream": True, "return_token_ids": True}
    return {
        kind: {"prompt": prompt, **common, **fields}
        for (kind, (_, fields)), prompt in zip(kinds.items(), prompts, strict=True)
    }


def second_turns(bodies: Mapping[str, dict[str, Any]], answers: Mapping[str, Answer]) -> dict[str, dict[str, Any]]:
    """What goes on where the answer to each kind ends, if it is one and ends by its length."""
    more = random_prompts([7], TINY.vocab_size, seed=17)[0]
    return {
        kind + SECOND_TURN: body | {"prompt": [*body["prompt"], *answers[kind].choices[0].token_ids, *more]}
        for kind, body in bodies.items()
        if len(answers[kind].choices) == 1 and "stop" not in body
    }


def shows_nothing(answer: Answer, body: dict[str, Any]) -> str | None:
    """Why an undisturbed answer would not show what its kind is there for, or None."""
    if answer.error is not None:
        return answer.error
    if len(answer.choices) != body.get("n", 1):
        return f"{len(answer.choices)} choices"
    if "stop" in body and any(choice.finish != "stop" for choice in answer.choices.values()):
        return "no stop string ended it"
    if "logprobs" in body and any(len(c.logprobs) != len(c.token_ids) for c in answer.choices.values()):
        return "it has no logprobs"
    return None


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
class Answers:
    answers: list[tuple[str, Answer]] = field(default_factory=list[tuple[str, Answer]])  # with what was asked


@dataclass(slots=True)
class Seen(Answers):
    recoveries_s: list[float] = field(default_factory=list[float])  # where somebody healthy was left
    other_recoveries_s: list[float] = field(default_factory=list[float])
    probes_lost: list[str] = field(default_factory=list[str])
    faults: Counter[str] = field(default_factory=Counter[str])


async def serving(mesh: RunningMesh) -> set[str]:
    """Who serves now, by the scheduler's own word; nobody if it has none."""
    try:
        state = await mesh.state()
    except PdmeshError:
        return set()
    return {"scheduler", *(instance.instance_id for instance in state.instances if instance.state == "up")}


def is_left(alive: set[str]) -> bool:
    """Whether a new request can be served without waiting for anybody."""
    return all(any(name.startswith(kind) for name in alive) for kind in ("scheduler", "prefill", "decode"))


async def do_faults(mesh: RunningMesh, client: httpx.AsyncClient, seen: Seen, num_faults: int, seed: int) -> None:
    rng = random.Random(seed)
    probe = {**bodies_of(seed)["greedy"], "max_tokens": 4}
    for _ in range(num_faults):
        await asyncio.sleep(rng.uniform(*PAUSE_S))
        pids = {name: pid for name, pid in mesh.pids().items() if name != "gateway"}
        victims = rng.sample(sorted(pids), rng.choice((1, 1, 2)))
        (stop_s,) = rng.choices([stop_s for stop_s, _ in FAULTS], [weight for _, weight in FAULTS])
        healthy = is_left(await serving(mesh) - set(victims))
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
        (seen.recoveries_s if healthy else seen.other_recoveries_s).append(answer.first_s)
        print(f"{shown} new request after {answer.first_s:6.2f} s{'' if healthy else ' (nobody was left)'}", flush=True)


async def ask_undisturbed(
    client: httpx.AsyncClient, bodies: dict[str, dict[str, Any]], *, conversations: bool
) -> dict[str, Answer]:
    """Answers, one of each kind; adds second turns to ``bodies``. Raises SystemExit if they show nothing."""
    undisturbed = {kind: await ask(client, body) for kind, body in bodies.items()}
    if conversations and all(answer.error is None for answer in undisturbed.values()):
        bodies |= second_turns(bodies, undisturbed)
        undisturbed |= {kind: await ask(client, bodies[kind]) for kind in bodies.keys() - undisturbed.keys()}
    empty = {kind: why for kind, body in bodies.items() if (why := shows_nothing(undisturbed[kind], body))}
    if empty:
        raise SystemExit(f"undisturbed requests do not show what they should: {empty}")
    return undisturbed


async def keep_asking(
    client: httpx.AsyncClient, bodies: Mapping[str, dict[str, Any]], number: int, seen: Answers, over: asyncio.Event
) -> None:
    """Ask for one kind after the other until it is ``over``; where there are second turns, each after its first."""
    first_turns = [kind for kind in bodies if not kind.endswith(SECOND_TURN)]
    for asked, kind in enumerate(islice(cycle(first_turns), number, None)):
        salt = {"cache_salt": f"{number} {asked}"} if len(first_turns) < len(bodies) else {}
        for turn in (kind, kind + SECOND_TURN):
            if over.is_set():
                return
            if turn in bodies:
                seen.answers.append((turn, await ask(client, bodies[turn] | salt)))


async def storm(mesh: RunningMesh, options: argparse.Namespace) -> tuple[dict[str, Answer], Seen]:
    """Undisturbed answers, one of each kind, and what was seen after them. Raises SystemExit if they show nothing."""
    bodies, seen, over = bodies_of(options.seed), Seen(), asyncio.Event()
    async with mesh.client() as client:
        undisturbed = await ask_undisturbed(client, bodies, conversations=options.conversations)
        async with asyncio.TaskGroup() as tasks:
            for number in range(options.streams):
                tasks.create_task(keep_asking(client, bodies, number, seen, over))
            await do_faults(mesh, client, seen, options.faults, options.seed)
            over.set()
    return undisturbed, seen


def report(undisturbed: dict[str, Answer], seen: Seen, *, timings: bool) -> bool:
    """Print what was seen; whether it is as it should be."""
    lost: list[str] = []
    differ: list[str] = []
    print(f"faults: {dict(seen.faults)}")
    print(f"{'streams':24} {'number':>7} {'lost':>5} {'differ':>7}")
    for kind, reference in undisturbed.items():
        answers = [answer for asked, answer in seen.answers if asked == kind]
        errors = [answer.error for answer in answers if answer.error is not None]
        others = [why for answer in answers if answer.error is None and (why := answer.differs(reference)) is not None]
        print(f"{kind:24} {len(answers):7} {len(errors):5} {len(others):7}")
        lost += errors
        differ += [f"{kind}, {why}" for why in others]
    print(f"{'all':24} {len(seen.answers):7} {len(lost):5} {len(differ):7}; new requests lost: {len(seen.probes_lost)}")
    for why, count in Counter(lost + seen.probes_lost).most_common():
        print(f"  lost: {count} x {why}")
    for why in differ:
        print(f"  differs: {why}")
    gaps_s = sorted(gap_s for _, answer in seen.answers for gap_s in answer.gaps_s)
    gap_p99_s = percentile(gaps_s, 99) or 0.0
    longest_s = gaps_s[-1] if gaps_s else 0.0
    print(f"gaps between events: p99 {gap_p99_s:.3f} s ({LIMIT_S:g}), longest {longest_s:.1f} s, of {len(gaps_s)}")
    for name, times_s, limit in (
        ("somebody healthy was left", seen.recoveries_s, f" ({LIMIT_S:g})"),
        ("nobody was", seen.other_recoveries_s, ""),
    ):
        if times_s:
            print(
                f"new request, {name}: p50 {median(times_s):.2f} s, longest {max(times_s):.2f} s{limit}, "
                f"of {len(times_s)}"
            )
    misses = {
        "streams were lost": bool(lost or seen.probes_lost),
        "streams differ": bool(differ),
        "the gaps": timings and gap_p99_s > LIMIT_S,
        "the recovery": timings and max(seen.recoveries_s, default=0.0) > LIMIT_S,
    }
    missed = [what for what, is_missed in misses.items() if is_missed]
    print(f"missed: {', '.join(missed)}" if missed else "all limits kept")
    return not missed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=30)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--streams", type=int, default=8, help="at once")
    parser.add_argument("--prefill", type=int, default=2)
    parser.add_argument("--decode", type=int, default=2)
    parser.add_argument("--conversations", action="store_true", help="with second turns, whose prompts reuse KV")
    parser.add_argument("--no-timings", action="store_true", help="on a busy machine: timings are printed, not judged")
    parser.add_argument("--keep", type=Path, help="keep the mesh's folder, with its logs, here")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.keep or Path(temporary)
        checkpoint = write_checkpoint(folder / "model", seed=3)
        with running_mesh(folder, model=checkpoint, prefill=options.prefill, decode=options.decode) as mesh:
            undisturbed, seen = asyncio.run(storm(mesh, options))
    return 0 if report(undisturbed, seen, timings=not options.no_timings) else 1


if __name__ == "__main__":
    sys.exit(main())
