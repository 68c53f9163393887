"""Answers of a mesh under faults, compared with answers that nothing disturbed."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import cycle, islice
from typing import Any

import httpx

from benchmarks.harness.report import Limits
from pdmesh.errors import PdmeshError
from pdmesh_testing.checkpoints import TINY
from pdmesh_testing.exactness import random_prompts
from pdmesh_testing.mesh import RunningMesh

#: How the kind of what goes on with another is called.
SECOND_TURN = ", second turn"

#: No stream may take longer: it is lost.
STREAM_LIMIT_S = 240.0


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """Add ``--architecture`` and ``--dtype``."""
    parser.add_argument("--architecture", default="llama", help="of the model, as in benchmarks.exactness.exactness")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")


def exact_settings(options: argparse.Namespace) -> dict[str, str]:
    """Settings with which a request's bits depend neither on the batch nor on chunks: answers are equal to the bit."""
    return {"WORKER_DETERMINISTIC": "true", "WORKER_DTYPE": options.dtype}


def bodies_of(
    seed: int, kinds: Mapping[str, tuple[int, dict[str, Any]]], max_tokens: int = 240
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
            if worst := max((abs(a - b) for a, b in zip(mine.logprobs, its.logprobs, strict=True)), default=0.0):
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

    def lost(self) -> list[str]:
        """Return the error of each answer that is none."""
        return [f"{kind}: {answer.error}" for kind, answer in self.answers if answer.error is not None]

    def differ(self, undisturbed: Mapping[str, Answer]) -> list[str]:
        """Return each answer's first difference from the undisturbed answer of its kind."""
        return [
            f"{kind}, {why}"
            for kind, answer in self.answers
            if answer.error is None and (why := answer.differs(undisturbed[kind])) is not None
        ]


def judge_none(found: Mapping[str, Sequence[str]], limits: Limits) -> None:
    """Print how often each thing was found that must not be, with examples."""
    for what, examples in found.items():
        print(f"{what}: {len(examples)}; {limits.at_most(what, len(examples), 0.5)}")
        for each, number in Counter(examples).most_common(5):
            print(f"  {number} x {each}")


async def leaks(mesh: RunningMesh) -> list[str]:
    """Wait until all blocks are free; return what is not within a minute."""
    try:
        await asyncio.to_thread(mesh.wait_until_idle, 60.0)
    except TimeoutError as error:
        return [str(error)]
    return []


async def kill_or_stop(pids: Sequence[int], stop_s: float | None) -> None:
    """Kill the processes, or stop them for so long."""
    for pid in pids:
        os.kill(pid, signal.SIGKILL if stop_s is None else signal.SIGSTOP)
    if stop_s is not None:
        await asyncio.sleep(stop_s)
        for pid in pids:
            with suppress(ProcessLookupError):  # the supervisor killed the process, which hung too long
                os.kill(pid, signal.SIGCONT)


async def serving(mesh: RunningMesh) -> set[str]:
    """Who serves now, by the scheduler's own word; nobody if it has none."""
    try:
        state = await mesh.state()
    except PdmeshError:
        return set()
    return {"scheduler", *(instance.instance_id for instance in state.instances if instance.state == "up")}


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
