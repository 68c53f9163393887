"""A thousand answers that are held to fifty schemas, drawn by random weights: each parses and fits, through faults too.

Usage: python benchmarks/structured_soak.py [--rounds 8] [--streams 12] [--seed 1] [--quiet]

Chats at temperature 1 are asked of 1 to 4 choices each, streamed: by ``response_format``, as arguments of a tool that
must be called, and by both, where the model chooses between a call and an answer of the format (``auto``). They are
asked twice: of a quiet mesh (1 prefill, 2 decode instances), and of one with little memory, so that decodes
are retracted, whose decodes are moved to and fro, whose instances are drained, and killed. Each answer must parse, fit
its schema (by the package `jsonschema`, which is not among ours: ``uv pip install jsonschema``), and be the quiet one.

``--quiet`` leaves the second mesh out.
Exit code 1 if an answer was lost, does not fit, or differs, or if one of the faults never came about.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import signal
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import httpx
from random_kills import serving
from report import Limits, heading, unavailable
from structured_schemas import SCHEMAS, Schema

from pdmesh.errors import PdmeshError
from pdmesh.model import OperationKind
from pdmesh_testing.checkpoints import write_checkpoint
from pdmesh_testing.mesh import RunningMesh, running_mesh
from pdmesh_testing.operating import operator_of
from pdmesh_testing.tokenizers import TOOL_TEMPLATE

MAX_TOKENS = 1200
STREAM_LIMIT_S = 300.0

#: Little memory: some of what is asked at once has to give its KV up.
KV_BYTES = 2 << 20

#: Between two faults of the second mesh.
PAUSE_S = (0.3, 1.5)

Key = tuple[str, int]  # schema and number of a request


@dataclass(slots=True)
class Choice:
    text: str = ""
    calls: list[tuple[str, str]] = field(default_factory=list[tuple[str, str]])  # name and arguments
    finish: str | None = None


@dataclass(slots=True)
class Seen:
    """What a mesh answered."""

    answers: dict[Key, list[Choice]] = field(default_factory=dict[Key, list[Choice]])
    errors: list[str] = field(default_factory=list[str])
    faults: Counter[str] = field(default_factory=Counter[str])


def requests(rounds: int) -> Iterator[tuple[Key, dict[str, Any]]]:
    """Every schema in turn; what is no object cannot be a tool's arguments."""
    for number in range(rounds):
        for name, schema in SCHEMAS.items():
            body: dict[str, Any] = {
                "messages": [{"role": "user", "content": f"{name}, number {number}"}],
                "temperature": 1,
                "seed": number,
                "n": 1 + number % 4,
                "max_tokens": MAX_TOKENS,
                "stream": True,
            }
            kind = kind_of(schema, number)
            if kind != "format":
                function = {"name": "answer", "parameters": schema}
                body |= {
                    "tools": [{"type": "function", "function": function}],
                    "tool_choice": kind,
                    "parallel_tool_calls": number % 4 == 3,
                }
            if kind != "required":
                body["response_format"] = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
            yield (name, number), body


def kind_of(schema: Schema, number: int) -> str:
    """How a request asks for its schema: by a format alone, or by a tool's choice as well."""
    return ("format", "required", "auto", "required")[number % 4] if is_object(schema) else "format"


def is_object(schema: Schema) -> bool:
    return schema.get("type") == "object" and "patternProperties" not in schema


async def ask(client: httpx.AsyncClient, body: dict[str, Any]) -> list[Choice]:
    """Return the choices of a streamed chat. Raises RuntimeError if it ends otherwise."""
    choices = [Choice() for _ in range(body["n"])]
    async with (
        asyncio.timeout(STREAM_LIMIT_S),
        client.stream("POST", "/v1/chat/completions", json=body) as response,
    ):
        if response.status_code != 200:
            raise RuntimeError(f"{response.status_code} {(await response.aread()).decode()[:300]}")
        async for line in lines_of(response):
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line[6:])
            if "error" in event:
                raise RuntimeError(str(event["error"]))
            for part in event["choices"]:
                choice, delta = choices[part["index"]], part["delta"]
                choice.text += delta.get("content") or ""
                for piece in delta.get("tool_calls") or []:
                    if piece["index"] == len(choice.calls):
                        choice.calls.append(("", ""))
                    name, arguments = choice.calls[piece["index"]]
                    function = piece["function"]
                    choice.calls[piece["index"]] = (
                        name + (function.get("name") or ""),
                        arguments + (function.get("arguments") or ""),
                    )
                choice.finish = part["finish_reason"] or choice.finish
    return choices


async def lines_of(response: httpx.Response) -> AsyncIterator[bytes]:
    """As server-sent events have them: httpx's end at U+2028 too, which an answer may hold."""
    rest = b""
    async for data in response.aiter_bytes():
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            yield line


async def ask_all(mesh: RunningMesh, seen: Seen, rounds: int, num_streams: int) -> None:
    asked = requests(rounds)
    done = 0

    async def work(client: httpx.AsyncClient) -> None:
        nonlocal done
        for key, body in asked:
            try:
                seen.answers[key] = await ask(client, body)
            except (httpx.HTTPError, RuntimeError, TimeoutError) as error:
                seen.errors.append(f"{key}: {error!r}")
            done += 1
            if done % 50 == 0:
                print(f"  {done} asked", flush=True)

    async with mesh.client() as client, asyncio.TaskGroup() as tasks:
        for _ in range(num_streams):
            tasks.create_task(work(client))


async def disturb(mesh: RunningMesh, seen: Seen, seed: int) -> None:
    """Move, drain and kill until cancelled."""
    rng, operator = random.Random(seed), operator_of(mesh)
    while True:
        await asyncio.sleep(rng.uniform(*PAUSE_S))
        what = rng.choice((*6 * ("moved",), *2 * ("drained",), "killed"))
        with suppress(PdmeshError, AssertionError):
            if await serving(mesh) < {"scheduler", "prefill-0", "decode-0", "decode-1"}:
                continue
            if what == "moved":
                for request_id in rng.sample(running := await operator.running(), min(8, len(running))):
                    target = rng.choice(("decode-0", "decode-1"))  # where it is already, perhaps: refused
                    status = await operator.operate(OperationKind.MOVE, target, request_id)
                    seen.faults[what] += status.state == "done"
            elif what == "drained":
                victim = rng.choice(("decode-0", "decode-1"))
                status = await operator.operate(OperationKind.DRAIN, victim)
                seen.faults[what] += status.state == "done"
                await operator.operate(OperationKind.UNDRAIN, victim)
            else:
                victim = rng.choice(("prefill-0", "decode-0", "decode-1"))
                os.kill(mesh.pids()[victim], signal.SIGKILL)
                seen.faults[what] += 1


async def run(mesh: RunningMesh, options: argparse.Namespace, *, disturbed: bool) -> Seen:
    seen = Seen()
    faults = asyncio.create_task(disturb(mesh, seen, options.seed)) if disturbed else None
    await ask_all(mesh, seen, options.rounds, options.streams)
    if faults is not None:
        faults.cancel()
        with suppress(asyncio.CancelledError):
            await faults
        preempted = re.findall(r"^pdmesh:num_preemptions(?:_total)?(?:{.*})? (\S+)$", mesh.metrics()["gateway"], re.M)
        seen.faults["retracted"] = int(sum(map(float, preempted)))
    return seen


def misfits(seen: Seen) -> list[str]:
    """Which answers do not end well, parse and fit, in a sentence each."""
    import jsonschema

    formats = jsonschema.FormatChecker()
    clock = r"([01]\d|2[0-3]):[0-5]\d:([0-5]\d|60)(\.\d+)?([zZ]|[+-]([01]\d|2[0-3]):[0-5]\d)"
    formats.checks("time")(lambda value: re.fullmatch(clock, value) is not None)
    formats.checks("date-time")(lambda value: re.fullmatch(rf"\d{{4}}-\d\d-\d\d[tT]{clock}", value) is not None)
    found: list[str] = []
    for (name, number), choices in seen.answers.items():
        validator = jsonschema.Draft202012Validator(SCHEMAS[name], format_checker=formats)
        kind = kind_of(SCHEMAS[name], number)
        for index, choice in enumerate(choices):
            by_tool = kind == "required" or (kind == "auto" and bool(choice.calls))
            where = f"{name}, number {number}, choice {index}"
            if choice.finish != ("tool_calls" if by_tool else "stop"):
                found.append(f"{where}: ends with {choice.finish}")
            elif by_tool and (not choice.calls or {called for called, _ in choice.calls} != {"answer"}):
                found.append(f"{where}: calls {choice.calls}")
            for said in [arguments for _, arguments in choice.calls] if by_tool else [choice.text]:
                try:
                    validator.validate(json.loads(said))
                except (ValueError, jsonschema.ValidationError) as error:
                    found.append(f"{where}: {str(error).splitlines()[0][:200]}: {said[:200]}")
    return found


def report(what: str, seen: Seen, limits: Limits, took_s: float) -> None:
    wrong = misfits(seen)
    num_choices = sum(map(len, seen.answers.values()))
    num_calls = sum(len(choice.calls) for choices in seen.answers.values() for choice in choices)
    chosen = [
        bool(choice.calls)
        for (name, number), choices in seen.answers.items()
        if kind_of(SCHEMAS[name], number) == "auto"
        for choice in choices
    ]
    faults = ", ".join(f"{number} {name}" for name, number in sorted(seen.faults.items()))
    print(
        f"{what}: {num_choices} answers in {took_s:.0f} s, {num_calls} calls among them; where the model "
        f"chose, {sum(chosen)} of {len(chosen)} called; {len(seen.errors)} requests "
        f"lost, {len(wrong)} do not fit{f'; {faults}' if faults else ''}",
        flush=True,
    )
    for sentence in islice((*seen.errors, *wrong), 10):
        print(f"  {sentence}")
    limits.at_most(f"{what}: lost or not fitting", len(seen.errors) + len(wrong), 0.5)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=8, help="requests of each schema")
    parser.add_argument("--streams", type=int, default=24)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--quiet", action="store_true", help="no faults")
    options = parser.parse_args()
    try:
        import jsonschema  # noqa: F401
    except ImportError:
        unavailable("jsonschema is not installed: uv pip install jsonschema")
    print(heading(f"{len(SCHEMAS)} schemas, {options.rounds} requests of each, random weights"))
    limits = Limits()
    with tempfile.TemporaryDirectory() as name:
        model = write_checkpoint(Path(name) / "model", seed=3, template=TOOL_TEMPLATE)
        seen: dict[str, Seen] = {}
        for what in ("quiet", "faults")[: 1 if options.quiet else 2]:
            settings = {"SCHEDULER_MAX_QUEUE_S": "600", "WORKER_NUM_THREADS": "1"}
            if what == "faults":
                settings["WORKER_KV_CACHE_BYTES"] = str(KV_BYTES)
            with running_mesh(Path(name) / what, model=model, decode=2, settings=settings) as mesh:
                began_s = time.monotonic()
                seen[what] = asyncio.run(run(mesh, options, disturbed=what == "faults"))
                report(what, seen[what], limits, time.monotonic() - began_s)
    if not options.quiet:
        quiet, faults = seen["quiet"].answers, seen["faults"].answers
        differ = [key for key, choices in faults.items() if key in quiet and choices != quiet[key]]
        print(f"{len(differ)} of {len(faults)} requests differ from the quiet mesh's: {differ[:5]}")
        limits.at_most("answers that differ", len(differ), 0.5)
        for what in ("moved", "drained", "killed", "retracted"):
            limits.at_least(f"{what} at all", seen["faults"].faults[what], 1)
    limits.end()


if __name__ == "__main__":
    main()
