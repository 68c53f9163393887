"""Hostile input for the edges and the internal streams, drawn from a seed; and what counts as having held.

A case holds if it was answered by a status that its protocol declares and nothing was logged with a traceback.
"""

from __future__ import annotations

import asyncio
import json
import logging
import random
from collections import Counter
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import anyio
import grpc
import grpc.aio
import httpx
import msgspec
import structlog

#: Cases under way at once.
NUM_AT_ONCE = 16

#: For one case.
LIMIT_S = 30.0

#: gRPC statuses that a call of ours never ends with.
_UNDECLARED = frozenset({grpc.StatusCode.UNKNOWN, grpc.StatusCode.INTERNAL, grpc.StatusCode.DATA_LOSS})


@dataclass(slots=True)
class Report:
    """Number of answers by status, and descriptions of the wrong ones."""

    statuses: Counter[str] = field(default_factory=Counter[str])
    failures: list[str] = field(default_factory=list[str])

    @property
    def num_cases(self) -> int:
        return self.statuses.total()

    def add(self, status: str, case: object, *, ok: bool) -> None:
        self.statuses[status] += 1
        if not ok:
            self.failures.append(f"{status}: {str(case)[:600]}")

    def __str__(self) -> str:
        statuses = ", ".join(f"{status} {count}" for status, count in sorted(self.statuses.items()))
        return f"{self.num_cases} cases, {len(self.failures)} failures; {statuses}"


@contextmanager
def watching(report: Report) -> Generator[None]:
    """Count everything that is logged with a traceback within the block as a failure."""

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            # gRPC logs this for a caller that has left.
            gone = record.getMessage().startswith("ExecuteBatchError")
            if record.exc_info or (record.levelno >= logging.ERROR and not gone):
                report.failures.append(f"logged by {record.name}: {record.getMessage()[:600]}")

    handler = Handler()
    logging.getLogger().addHandler(handler)
    loop = asyncio.get_running_loop()
    before = loop.get_exception_handler()
    loop.set_exception_handler(lambda _loop, context: report.failures.append(f"in the loop: {context}"))
    try:
        with structlog.testing.capture_logs() as entries:
            yield
    finally:
        logging.getLogger().removeHandler(handler)
        loop.set_exception_handler(before)
    report.failures += [
        f"logged: {entry}" for entry in entries if entry.get("exc_info") or entry["log_level"] == "critical"
    ]


# --- random cases ---

_TEXTS = (
    "",
    "a",
    "\x00",
    "é" * 30,
    "\U0001f600",
    "\u202e",
    "../../etc",
    "{{ 7 * 7 }}",
    "a\nb",
    "x" * 5000,
    "null",
    "NaN",
)
_NUMBERS: tuple[Any, ...] = (0, -1, 1, 2, 10**6, 2**31, 2**63, -(2**63), 2**64, 10**40, 0.5, -0.0, 5e-324, 1e308)
_RAW = (
    b"NaN",
    b"Infinity",
    b"-Infinity",
    b'"\\ud800"',
    b'"\\u0000"',
    b"1e999",
    b"[" * 990 + b"]" * 990,
    b"[[[[",
    b"\xff",
    b"0x1",
)


def odd_value(rng: random.Random, depth: int = 0) -> Any:
    """Return a random value that JSON and msgpack can hold."""
    kind = rng.randrange(7 if depth < 3 else 4)
    if kind == 0:
        return rng.choice(_TEXTS)
    if kind == 1:
        return rng.choice(_NUMBERS)
    if kind == 2:
        return rng.choice((None, True, False))
    if kind == 3:
        return rng.random() * 10 ** rng.randrange(-5, 6)
    if kind == 4:
        return {str(rng.choice(_TEXTS)): odd_value(rng, depth + 1) for _ in range(rng.randrange(4))}
    return [odd_value(rng, depth + 1) for _ in range(rng.randrange(6))]


def mutated(data: bytes, rng: random.Random) -> bytes:
    """``data`` with parts cut out, doubled, overwritten or inserted."""
    for _ in range(rng.randrange(1, 4)):
        start = rng.randrange(len(data) + 1)
        end = min(len(data), start + rng.choice((0, 1, 1, 4, 20)))
        new = rng.choice((b"", data[start:end] * 2, rng.randbytes(rng.randrange(1, 6)), rng.choice(_RAW)))
        data = data[:start] + new + data[end:]
    return data


def changed(value: Any, rng: random.Random) -> Any:
    """``value`` with one of its parts, at any depth, exchanged for something odd, left out or added."""
    if isinstance(value, dict) and value and rng.random() < 0.9:
        name = rng.choice(list(value))
        rest = {key: part for key, part in value.items() if key != name}
        match rng.randrange(6):
            case 0:
                return rest
            case 1:
                return {**value, str(rng.choice(_TEXTS)): odd_value(rng)}
            case _:
                return {**rest, name: changed(value[name], rng)}
    if isinstance(value, list) and value and rng.random() < 0.8:
        i = rng.randrange(len(value))
        return rng.choice((value[:i], value * 3, [*value[:i], changed(value[i], rng), *value[i + 1 :]]))
    return odd_value(rng)


# --- HTTP ---

_SAMPLING: dict[str, Any] = {
    "max_tokens": 3, "temperature": 0.5, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "seed": 1, "n": 2, "stop": ["a"],
    "logit_bias": {"1": 1}, "min_tokens": 1, "priority": 1, "stream": True, "stream_options": {"include_usage": True},
    "repetition_penalty": 1.1, "presence_penalty": 0.1, "stop_token_ids": [3], "slo_ttft_ms": 100, "request_id": "a",
    "truncate_prompt_tokens": 5, "response_format": {"type": "text"}, "metadata": {"a": 1}, "user": "u",
}  # fmt: skip
_MESSAGES = [
    {"role": "system", "content": "s"},
    {"role": "user", "content": [{"type": "text", "text": "u"}]},
    {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": '{"a": [1]}'}}]},
]
_BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "abc", "echo": True, "logprobs": 2, **_SAMPLING},
    "/v1/chat/completions": {"messages": _MESSAGES, "logprobs": True, "top_logprobs": 2, "tools": [], **_SAMPLING},
    "/tokenize": {"prompt": "abc", "return_token_strs": True, "add_special_tokens": False},
    "/detokenize": {"tokens": [1, 2, 3]},
}
_HEADERS = {
    "x-request-id": ("a", "a b", "x" * 5000, "é".encode()),
    "traceparent": ("00-" + "a" * 32 + "-" + "b" * 16 + "-01", "00-zz", "\x7f"),
    "x-slo-ttft-ms": ("1", "5e-324", "nan", "-1", "1e999", "a"),
    "x-slo-tpot-ms": ("10", "inf", ""),
    "content-type": ("text/plain", "application/json; charset=utf-16", "x"),
    "authorization": ("Bearer", "Bearer wrong", "Basic eDp4", "Bearer " + "k" * 3000),
    "host": ("localhost", "evil.example", "[", "127.0.0.1:99999"),
    "origin": ("null", "http://evil.example", "http://[", "a"),
    "accept": ("text/event-stream", "*"),
}


def http_cases(rng: random.Random) -> Iterator[tuple[str, str, dict[str, Any], bytes]]:
    """Yield method, path, headers and body, without end."""
    paths = [*_BODIES] * 6 + [
        "/v1/models",
        "/v1/models/%00%ff",
        "/health",
        "/metrics",
        "/openapi.json",
        "/%2e%2e/x",
        "//",
    ]
    while True:
        path = rng.choice(paths)
        base = _BODIES.get(path, {})
        body: Any = {key: base[key] for key in base if rng.random() < 0.5 or key in ("prompt", "messages", "tokens")}
        for _ in range(rng.randrange(3)):
            body = changed(body, rng)
        data = json.dumps(body).encode()
        if rng.random() < 0.4:
            data = mutated(data, rng)
        names = [name for name in _HEADERS if rng.random() < 0.08]
        headers = {name: rng.choice(_HEADERS[name]) for name in names}
        method = (
            "POST" if path in _BODIES and rng.random() < 0.95 else rng.choice(("GET", "PUT", "OPTIONS", "HEAD", "X"))
        )
        yield method, path, headers, data


async def fuzz_http(url: str, *, num_cases: int, seed: int) -> Report:
    """Send cases to a gateway. 503 and 504 are declared where they say why."""
    report = Report()
    cases = http_cases(random.Random(seed))
    async with httpx.AsyncClient(base_url=url, timeout=LIMIT_S, trust_env=False) as client:

        async def send(case: tuple[str, str, dict[str, Any], bytes]) -> None:
            method, path, headers, body = case
            try:
                response = await client.request(method, path, headers=headers, content=body)
            except (httpx.HTTPError, ValueError) as error:
                report.add(type(error).__name__, case, ok=isinstance(error, httpx.LocalProtocolError | ValueError))
                return
            status = response.status_code
            says_why = status in (503, 504) and b'"error"' in response.content
            report.add(str(status), case, ok=status < 500 or says_why)

        await _run(cases, send, num_cases)
    return report


# --- gRPC ---


def grpc_cases(
    rng: random.Random, messages: Mapping[str, Sequence[bytes]]
) -> Iterator[tuple[str, tuple[tuple[str, str], ...], bytes]]:
    """Yield method, metadata and message, without end, from valid ``messages`` of each method."""
    metadata = ((), (), (("authorization", "Bearer x"),), (("traceparent", "00-zz"),), (("pdmesh-token", "x"),))
    while True:
        method = rng.choice([*messages] * 5 + ["/x/y", "/pdmesh.api.v1.Inference/Nothing"])
        base = rng.choice(messages.get(method, (b"",)))
        yield method, rng.choice(metadata), mutated(base, rng) if rng.random() < 0.9 else base


async def fuzz_grpc(address: str, messages: Mapping[str, Sequence[bytes]], *, num_cases: int, seed: int) -> Report:
    """Call a gRPC server with raw bytes."""
    report = Report()
    async with grpc.aio.insecure_channel(address) as channel:

        async def send(case: tuple[str, tuple[tuple[str, str], ...], bytes]) -> None:
            method, metadata, message = case
            begin: Any = channel.stream_stream(method)
            call = begin(metadata=metadata)
            code = await _code_of(call, [message])
            report.add(code.name, case, ok=code not in _UNDECLARED)

        await _run(grpc_cases(random.Random(seed), messages), send, num_cases)
    return report


# --- internal frames ---


def frame_cases(rng: random.Random, messages: Mapping[str, Sequence[Any]]) -> Iterator[tuple[str, list[bytes]]]:
    """Yield methods and frames without end, mutated from valid messages. A method's first message opens the stream."""
    while True:
        method = rng.choice(list(messages))
        first, *others = messages[method]
        frames: list[bytes] = []
        for message in [first, *rng.choices(others, k=rng.randrange(4))] if others else [first]:
            plain: Any = [msgspec.msgpack.decode(msgspec.msgpack.encode(message))]
            if rng.random() < 0.3:
                plain = changed(plain, rng)
            try:
                frame = msgspec.msgpack.encode(plain)
            except OverflowError:
                # msgpack cannot hold the number.
                frame = rng.randbytes(20)
            frames.append(mutated(frame, rng) if rng.random() < 0.3 else frame)
        yield method, frames


async def fuzz_frames(
    address: str,
    messages: Mapping[str, Sequence[Any]],
    *,
    num_cases: int,
    seed: int,
    metadata: tuple[tuple[str, str], ...] = (),
) -> Report:
    """Open streams of our own protocol, with these metadata."""
    report = Report()
    async with grpc.aio.insecure_channel(address) as channel:

        async def send(case: tuple[str, list[bytes]]) -> None:
            method, frames = case
            begin: Any = channel.stream_stream(method)
            code = await _code_of(begin(metadata=metadata), frames)
            report.add(code.name, case, ok=code not in _UNDECLARED)

        await _run(frame_cases(random.Random(seed), messages), send, num_cases)
    return report


async def _code_of(call: Any, messages: Sequence[bytes]) -> grpc.StatusCode:
    """Send the messages and half-close. Return the call's status; a call without an end is cancelled."""
    try:
        for message in messages:
            await call.write(message)
        await call.done_writing()
        with anyio.move_on_after(0.5):
            # A watch, for example, has no end.
            while await call.read() is not grpc.aio.EOF:
                pass
            return grpc.StatusCode(await call.code())
        call.cancel()
    except (grpc.RpcError, asyncio.InvalidStateError):
        pass
    except asyncio.CancelledError:
        # gRPC raises this, too, for a call that the server has reset.
        if not call.done():
            raise
    code = grpc.StatusCode(await call.code())
    # Ours, not the server's: we wrote to a call that it had ended.
    return grpc.StatusCode.CANCELLED if await call.details() == "Internal error from Core" else code


async def _run(cases: Iterator[Any], send: Any, num_cases: int) -> None:
    """Send so many, a few at a time."""
    left = iter(range(num_cases))

    async def worker() -> None:
        for _ in left:
            with anyio.fail_after(2 * LIMIT_S):
                await send(next(cases))

    async with anyio.create_task_group() as tasks:
        for _ in range(min(NUM_AT_ONCE, num_cases)):
            tasks.start_soon(worker)
