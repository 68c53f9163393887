"""Two hundred hostile schemas, regular expressions, grammars and templates: what becomes of the mesh that is sent them.

Usage: python benchmarks/hostile_grammars.py [--only WORD] [--streams 4]

A mesh of a model with random weights (1 prefill, 1 decode instance) keeps streams going while a client asks for each of
them, one after the other. Held: every one is answered within 3 s, by an answer or a 400; no process dies; and the
streams beside them take at most twice as long as before. Exit code 1 otherwise.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
from report import Limits, heading, quantile

from pdmesh_testing.checkpoints import write_checkpoint
from pdmesh_testing.mesh import RunningMesh, running_mesh
from pdmesh_testing.tokenizers import TOOL_TEMPLATE

MOST_S = 3.0
MOST_SLOWER = 2.0
STREAM_TOKENS = 200

Body = dict[str, Any]


def nested(depth: int, inner: Any, wrap: str) -> Any:
    for _ in range(depth):
        if wrap == "items":
            inner = {"type": "array", "items": inner, "minItems": 1}
        elif wrap == "properties":
            inner = {"type": "object", "properties": {"a": inner}, "required": ["a"]}
        else:
            inner = {wrap: [inner, inner]}
    return inner


def an_object(properties: dict[str, Any], *, required: bool = True) -> Any:
    return {"type": "object", "properties": properties, "required": list(properties) if required else []}


def schemas() -> Iterator[tuple[str, Any]]:
    """What is large, deep, contradictory, endless or no schema at all."""
    text: dict[str, Any] = {"type": "string"}
    for depth in (10, 60, 100, 130, 400):
        for wrap in ("items", "properties"):
            yield f"{wrap} {depth} deep", nested(depth, text, wrap)
    for depth in (4, 10, 14):
        for wrap in ("anyOf", "oneOf", "allOf"):
            yield f"{wrap} of two, {depth} deep", nested(depth, text, wrap)
    for number in (100, 1000, 5000, 20_000):
        yield f"{number} optional properties", an_object({f"p{i}": text for i in range(number)}, required=False)
        yield f"{number} required properties", an_object({f"p{i}": {"type": "integer"} for i in range(number)})
        yield f"{number} values", {"enum": [f"value {i}" for i in range(number)]}
        yield f"{number} alternatives", {"anyOf": [{"const": i} for i in range(number)]}
    for number in (100, 900):
        yield (
            f"{number} alternatives that begin alike",
            {"anyOf": [an_object({"kind": text, f"p{i}": text}) for i in range(number)]},
        )
    for most in (1000, 10**6, 10**9, 2**63, 10**30):
        yield f"texts of {most}", {"type": "string", "minLength": most, "maxLength": most}
        yield f"lists of {most}", {"type": "array", "items": text, "minItems": most}
        yield f"objects of {most}", {"type": "object", "minProperties": most, "additionalProperties": text}
    for bound in (10**18, 10**400, 1e308, 1e-308):
        yield (
            f"numbers from {bound:.3g}"[:40] if bound < 1e300 else "huge numbers",
            {"type": "number", "minimum": bound},
        )
        yield "whole numbers between", {"type": "integer", "minimum": 0, "maximum": bound}
    yield "bounds that cross", {"type": "integer", "minimum": 5, "maximum": 4}
    yield "a multiple of nothing", {"type": "number", "multipleOf": 0}
    yield "a multiple of little", {"type": "number", "multipleOf": 1e-12}
    yield "a multiple of primes", {"allOf": [{"type": "integer", "multipleOf": p} for p in (9973, 9967, 9949, 9941)]}
    yield "itself", {"$ref": "#"}
    yield "itself, around", {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}
    yield "itself, needed", {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}
    yield (
        "a chain of 900",
        {
            "$defs": {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(900)} | {"d900": text},
            "$ref": "#/$defs/d0",
        },
    )
    yield (
        "twice as many each time",
        {
            "$defs": {
                f"d{i}": an_object({"a": {"$ref": f"#/$defs/d{i + 1}"}, "b": {"$ref": f"#/$defs/d{i + 1}"}})
                for i in range(30)
            }
            | {"d30": text},
            "$ref": "#/$defs/d0",
        },
    )
    yield "elsewhere", {"$ref": "http://localhost:1/schema.json"}
    yield "a file", {"$ref": "file:///etc/passwd"}
    yield "nowhere", {"$ref": "#/$defs/missing"}
    yield "not", {"not": {"not": {"not": text}}}
    yield "if", {"if": text, "then": {"type": "integer"}, "else": False}
    yield "nothing fits", False
    yield "unique", {"type": "array", "items": {"enum": list(range(500))}, "uniqueItems": True, "minItems": 500}
    yield "contains", {"type": "array", "contains": {"const": 1}, "minContains": 10**6}
    yield "unknown type", {"type": "gremlin"}
    yield "a type that is a list of lists", {"type": [["string"]]}
    yield "a list", [1, 2, 3]
    yield "a text that is JSON", json.dumps(nested(900, text, "items"))
    yield "a text that is none", "{"
    yield "zeros in names", an_object({"\0" * 50: text, "\ud7ff\ue000": text})
    yield "a name of 60,000", an_object({"n" * 60_000: text})
    yield "many patterns", {"type": "object", "patternProperties": {f"^a{{{i}}}b*$": text for i in range(300)}}
    yield "an unknown format", {"type": "string", "format": "x" * 1000}
    for regex in REGEXES[:23]:
        yield f"pattern {regex[:24]}", {"type": "string", "pattern": regex}


REGEXES = [
    "(a+)+$",
    "(a*)*b",
    "((a{1,50}){1,50}){1,50}",
    "((((a{1,50}){1,50}){1,50}){1,50}){1,50}",
    "(a?){2000}a{2000}",
    "(.*a){20}",
    "(x+x+)+y",
    "[\\s\\S]{0,100000}",
    "a{1000000}",
    "(a|aa)*c{0,5000}",
    ".*" * 200,
    "(?=a)b",
    "(?!a)b",
    "(?<=a)b",
    "\\1(a)",
    "(?R)",
    "[",
    "(",
    "a{2,1}",
    "\\p{L}{0,3000}",
    "(\\p{L}|\\p{N}){500}",
    "\\u{110000}",
    "(?i)" + "straße" * 500,
    "|".join(f"word{i}" for i in range(5000)),
    "(" * 500 + "a" + ")" * 500,
    "(a|b|c|d|e)*" * 60 + "f",
    "[^\\x00-\\x{10FFFF}]",
    "",
    "^$",
    "(?:)*",
    "a**",
    "\\d{1,9999}\\.\\d{1,9999}",
    "(.{0,300}){0,300}",
    ".{5000}a",
    "(a.{0,500}b){1,20}",
    "[a-z&&[^aeiou]]{0,1000}",
    "((ab)*c*){0,400}",
    "\\Z",
    "\\b" * 1000,
]

LARKS = [
    "start: start",
    "start: a\na: b\nb: a",
    'start: start "a" | "b"',
    'start: "a"* "a"* "a"* "a"* "a"* "a"* "a"*',
    'start: x x x x x x x x\nx: "a"? "a"? "a"? "a"?',
    "start: ",
    "start: /(a+)+b/",
    'start: "a"~100000',
    "start: A\nA: A",
    "start: A\nA: B*\nB: C*\nC: /a*/",
    "start: " + "(" * 400 + '"a"' + ")" * 400,
    "start: %json {",
    'start: %json {"type": "string", "maxLength": 1000000000}',
    "%import common.NUMBER\nstart: NUMBER",
    "%ignore /.*/\nstart: /a/",
    "start: " + " | ".join(f'"w{i}"' for i in range(4000)),
    "\n".join(f"r{i}: r{i + 1}*" for i in range(2000)) + '\nstart: r0\nr2000: "a"',
    'start: s\ns: s s | "a" | ',
    "start: /[/",
    "\0\1\2",
    "start: <|im_start|>*",
    "start: <[999999999]>",
    "start: @missing",
    "🙂",
    'start: e\ne: e "+" e | e "*" e | "(" e ")" | /[0-9]+/',
    "start[lazy]: /.*/ /.*/ /.*/",
    "start: " + '"a" ' * 10_000,
    "start: /a/ & /b/",
    "start: ~/a/",
]

TEMPLATES = [
    "{% for i in range(10**9) %}x{% endfor %}",
    "{{ 'x' * 10**9 }}",
    "{% for a in range(9**6) %}{% for b in range(9**6) %}{% endfor %}{% endfor %}",
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{% include '/etc/passwd' %}",
    "{% import 'os' as os %}{{ os.system('id') }}",
    "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "{{ messages | tojson | length ** 10**6 }}",
    "{{ (9**9)**(9**9) }}",
    "{{ cycler.__init__.__globals__ }}",
    "{% set x = 'a' %}{% for i in range(64) %}{% set x = x + x %}{% endfor %}{{ x }}",
    "{",
    "{% if %}",
    "{{ 1/0 }}",
    "{{ raise_exception('x' * 10**7) }}",
    "{{ 'a%1000000000d' % 1 }}",
    "{{ '%0999999999d'|format(1) }}",
    "{{ [0] * 10**10 }}",
    "(" * 100_000,
    "{% block a %}" * 5000,
]


def chat(**fields: Any) -> Body:
    return {
        "messages": [{"role": "user", "content": "?"}],
        "max_tokens": 24,
        "temperature": 1,
        "seed": 1,
        **fields,
    }


def bodies() -> Iterator[tuple[str, Body]]:
    """Everything, by what it is."""
    for number, (name, schema) in enumerate(schemas()):
        if number % 4 == 3:
            function = {"name": "f", "parameters": schema}
            yield f"tool: {name}", chat(tools=[{"type": "function", "function": function}], tool_choice="required")
        else:
            asked = {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}
            yield f"schema: {name}", chat(response_format=asked)
    for regex in REGEXES:
        yield f"regex: {regex[:30]}", chat(structured_outputs={"regex": regex})
    for lark in LARKS:
        yield f"grammar: {lark[:30]!r}", chat(structured_outputs={"grammar": lark})
    yield "5,000 choices", chat(structured_outputs={"choice": [f"choice {number}" for number in range(5000)]})
    yield "a choice of a million letters", chat(structured_outputs={"choice": ["a" * 1_000_000]})
    tag = {
        "type": "structural_tag",
        "triggers": ["<" * 500],
        "structures": [{"begin": "<" * 501, "schema": {}, "end": ""}],
    }
    yield "structural tag", chat(response_format=tag)
    for template in TEMPLATES:
        yield f"template: {template[:30]}", chat(chat_template=template)


class Streams:
    """Streams that go on beside, and how long each took."""

    def __init__(self) -> None:
        self.took_s: list[float] = []
        self.gaps_s: list[float] = []
        self.errors: list[str] = []

    async def one(self, client: httpx.AsyncClient, seed: int) -> None:
        body = {
            "prompt": [seed % 250] * 20,
            "max_tokens": STREAM_TOKENS,
            "ignore_eos": True,
            "stream": True,
            "seed": seed,
        }
        began_s = last_s = time.perf_counter()
        try:
            async with client.stream("POST", "/v1/completions", json=body) as response:
                async for line in response.aiter_lines():
                    if line.startswith("data: {"):
                        now_s = time.perf_counter()
                        self.gaps_s.append(now_s - last_s)
                        last_s = now_s
        except httpx.HTTPError as error:
            self.errors.append(repr(error))
        self.took_s.append(time.perf_counter() - began_s)

    async def keep(self, client: httpx.AsyncClient, number: int, over: asyncio.Event) -> None:
        for turn in range(1_000_000):
            if over.is_set():
                return
            await self.one(client, 1000 * number + turn)


async def keeping(client: httpx.AsyncClient, num_streams: int, work: Any) -> Streams:
    """Keep streams going until ``work`` is done, and each has ended."""
    streams, over = Streams(), asyncio.Event()
    async with asyncio.TaskGroup() as tasks:
        for number in range(num_streams):
            tasks.create_task(streams.keep(client, number, over))
        await work
        over.set()
    return streams


async def attack(mesh: RunningMesh, asked: list[tuple[str, Body]], limits: Limits) -> None:
    statuses: Counter[int] = Counter()
    slow: list[str] = []
    odd: list[str] = []
    times_s: list[float] = []
    async with mesh.client() as client:
        for name, body in asked:
            began_s = time.perf_counter()
            try:
                response = await client.post("/v1/chat/completions", content=json.dumps(body), timeout=60)
            except httpx.HTTPError as error:
                odd.append(f"{name}: {error!r}")
                continue
            took_s = time.perf_counter() - began_s
            times_s.append(took_s)
            statuses[response.status_code] += 1
            if took_s > MOST_S:
                slow.append(f"{name}: {took_s:.1f} s, {response.status_code}")
            if response.status_code not in (200, 400, 413, 422):
                odd.append(f"{name}: {response.status_code} {response.text[:200]}")
    answered = ", ".join(f"{number} x {status}" for status, number in sorted(statuses.items()))
    worst, median = max(times_s), statistics.median(times_s)
    print(f"{len(asked)} asked: {answered}; median {1e3 * median:.0f} ms, worst {worst:.2f} s", flush=True)
    for sentence in (*slow, *odd):
        print(f"  {sentence}")
    limits.at_most(f"answers later than {MOST_S:g} s", len(slow), 0.5)
    limits.at_most("answers that are no answer and no 400", len(odd), 0.5)


async def run(mesh: RunningMesh, asked: list[tuple[str, Body]], num_streams: int, limits: Limits) -> None:
    pids = mesh.pids()
    async with mesh.client() as client:
        await keeping(client, num_streams, asyncio.sleep(2))  # everything was used once
        before = await keeping(client, num_streams, asyncio.sleep(10))
        during = await keeping(client, num_streams, attack(mesh, asked, limits))
    died = [name for name, pid in mesh.pids().items() if pids.get(name) != pid]
    slower = statistics.median(during.took_s) / statistics.median(before.took_s)
    worst = max(during.took_s) / max(before.took_s)
    print(
        f"streams beside them: median {statistics.median(during.took_s):.2f} s, before "
        f"{statistics.median(before.took_s):.2f}: {slower:.2f} x "
        f"({limits.at_most('streams beside', slower, MOST_SLOWER)}); slowest {worst:.2f} x "
        f"({limits.at_most('slowest stream beside', worst, MOST_SLOWER)}); gaps, 99th percentile, "
        f"{1e3 * quantile(during.gaps_s, 0.99):.0f} ms, before {1e3 * quantile(before.gaps_s, 0.99):.0f}, worst "
        f"{1e3 * max(during.gaps_s):.0f}, before {1e3 * max(before.gaps_s):.0f}; {len(during.errors)} lost; "
        f"processes that died: {died or 'none'}"
    )
    limits.at_most("streams lost", len(during.errors), 0.5)
    limits.at_most("processes that died", len(died), 0.5)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="those whose name holds this")
    parser.add_argument("--streams", type=int, default=4)
    options = parser.parse_args()
    asked = [(name, body) for name, body in bodies() if options.only in name]
    print(heading(f"{len(asked)} hostile schemas, regular expressions, grammars and templates"))
    limits = Limits()
    with tempfile.TemporaryDirectory() as name:
        model = write_checkpoint(Path(name) / "model", seed=3, template=TOOL_TEMPLATE)
        settings = {"GATEWAY_TRUST_REQUEST_TEMPLATES": "true", "WORKER_NUM_THREADS": "1"}
        with running_mesh(Path(name), model=model, settings=settings) as mesh:
            asyncio.run(run(mesh, asked, options.streams, limits))
    limits.end()


if __name__ == "__main__":
    main()
