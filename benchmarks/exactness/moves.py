"""Running decodes move to and fro between the decode instances of a real mesh, and their streams are what they were.

    python -m benchmarks.exactness.moves [--moves 1000] [--dtype float32|bfloat16]
    python -m benchmarks.exactness.moves --drain [--streams 32] [--context 4096]

The first asks for the same requests twice: undisturbed, and while random ones of them are told to move, again and
again: greedy, seeded and filtered, every penalty, log-probabilities, stop strings, two choices, contexts around block
ends. It prints how many streams differ, and how long a stream stands still for a move (from the step after which it
stands still to the acknowledgement) beside two decode steps and 10 ms. The second drains an instance, and prints how
long that took beside the time that its bytes would take at the best rate of a transfer in the same run. What its
streams had drawn by then, and a little after, is compared with what an undisturbed request draws.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import anyio

from benchmarks.exactness.exactness import checkpoint_of
from benchmarks.harness.report import heading
from pdmesh.errors import PdmeshError
from pdmesh.operations import OperationKind
from pdmesh.wire.messages import ListRequests, OperationStatus, RequestList, RequestRecord
from pdmesh_testing.checkpoints import TINY, CheckpointShape
from pdmesh_testing.exactness import random_prompts
from pdmesh_testing.mesh import RunningMesh, running_mesh
from pdmesh_testing.operating import OperatorClient, operator_of

SHAPE = CheckpointShape(vocab_size=2048, hidden_size=128, intermediate_size=256, num_layers=4, head_dim=64)
BLOCK_SIZE = 16

#: For all streams to decode, before an instance is drained.
ALL_DECODE_S = 400.0

#: So many tokens more are drawn by each stream once it has moved, if that takes no longer.
NUM_AFTER = 16
GO_ON_S = 60.0

#: How requests are drawn, in turns.
WAYS: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 0.9},
    {"temperature": 0.9, "top_p": 0.95, "frequency_penalty": 0.4, "presence_penalty": 0.3},
    {"temperature": 0.9, "repetition_penalty": 1.2, "min_p": 0.02},
    {"temperature": 0.8, "top_k": 50, "n": 2},
    {"temperature": 0, "stop": ["qzx", "7!"], "logprobs": 3},
]


async def ask_all(
    mesh: RunningMesh, prompts: Sequence[Sequence[int]], num_tokens: int, concurrency: int
) -> list[list[tuple[Any, ...]]]:
    """Of each prompt, the tokens, log-probabilities and ends of its choices, in order."""
    limiter = anyio.CapacityLimiter(concurrency)
    found: list[list[tuple[Any, ...]]] = [[] for _ in prompts]

    async def ask(place: int) -> None:
        body = {
            "model": mesh.model,
            "prompt": list(prompts[place]),
            "max_tokens": num_tokens,
            "ignore_eos": True,
            "return_token_ids": True,
            "logprobs": 1,
            "seed": place,
            **WAYS[place % len(WAYS)],
        }
        async with limiter:
            response = await client.post("/v1/completions", json=body, timeout=900)
        response.raise_for_status()
        choices = sorted(response.json()["choices"], key=lambda choice: choice["index"])
        found[place] = [
            (choice["token_ids"], choice["text"], choice["finish_reason"], json.dumps(choice["logprobs"]))
            for choice in choices
        ]

    async with mesh.client() as client, anyio.create_task_group() as tasks:
        for place in range(len(prompts)):
            tasks.start_soon(ask, place)
    return found


async def move_at_random(
    operator: OperatorClient, instances: Sequence[str], num_moves: int, rng: random.Random
) -> None:
    """Several at a time, until so many have landed."""

    async def mover(seed: int) -> None:
        own = random.Random(seed)
        while operator.operations["done"] < num_moves:
            running = await operator.running()
            if not running:
                await anyio.sleep(0.05)
                continue
            await operator.operate(OperationKind.MOVE, own.choice(instances), own.choice(running))

    async with anyio.create_task_group() as tasks:
        for _ in range(6):
            tasks.start_soon(mover, rng.getrandbits(32))


def share(values: Sequence[float], at: float) -> float:
    return sorted(values)[min(len(values) - 1, int(at * len(values)))] if values else float("nan")


async def disturbed(
    mesh: RunningMesh, prompts: Sequence[Sequence[int]], num_tokens: int, num_moves: int, concurrency: int
) -> tuple[list[list[tuple[Any, ...]]], OperatorClient, int]:
    """The streams while their requests move; asked for again until so many moves were made."""
    operator = operator_of(mesh)
    instances = [service.name for service in mesh.record.services if service.name.startswith("decode")]
    found: list[list[tuple[Any, ...]]] = []
    num_rounds = 0
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(move_at_random, operator, instances, num_moves, random.Random(5))
        while operator.operations["done"] < num_moves:
            found += await ask_all(mesh, prompts, num_tokens, concurrency)
            num_rounds += 1
            print(f"  round {num_rounds}: {dict(operator.operations)}", flush=True)
        tasks.cancel_scope.cancel()
    return found, operator, num_rounds


async def figures(operator: OperatorClient) -> tuple[list[float], list[float], int, int]:
    """Seconds that streams stood still, and that moves took; bytes; the most moves of one request."""
    answer = await operator.ask(ListRequests(limit=2000))
    assert isinstance(answer, RequestList)
    frozen: list[float] = []
    seconds: list[float] = []
    num_bytes = most = 0
    for known in answer.requests:
        record = await operator.record(known.request_id)
        moves = [entry.figures for entry in record.entries if entry.what == "moved away"]
        frozen += [each["frozen_s"] for each in moves]
        seconds += [each["duration_s"] for each in moves]
        num_bytes += int(sum(each["num_bytes"] for each in moves))
        most = max(most, len(moves))
    return frozen, seconds, num_bytes, most


def exact(options: argparse.Namespace) -> int:
    print(heading(f"{options.moves} moves of running decodes, {options.dtype}"), flush=True)
    rng = random.Random(1)
    ends = [BLOCK_SIZE * blocks + off for blocks in (1, 3, 8, 24) for off in (-1, 0, 1)]
    lengths = [ends[place % len(ends)] if place % 4 else rng.randint(20, 300) for place in range(options.requests)]
    longest = BLOCK_SIZE * ((options.context - options.tokens) // BLOCK_SIZE - 1)
    lengths[: options.long] = [longest + place % 3 - 1 for place in range(options.long)]
    prompts = random_prompts(lengths, TINY.vocab_size, seed=3)
    settings = {"WORKER_DETERMINISTIC": "true", "WORKER_DTYPE": options.dtype}
    with tempfile.TemporaryDirectory() as name:
        checkpoint = checkpoint_of(options.architecture, Path(name) / "model", SHAPE, options.dtype)
        with running_mesh(Path(name), model=checkpoint, decode=2, settings=settings) as mesh:
            began_s = time.monotonic()
            expected = anyio.run(ask_all, mesh, prompts, options.tokens, options.concurrency)
            took_s = time.monotonic() - began_s
            num_drawn = sum(len(choice[0]) for choices in expected for choice in choices)
            print(f"undisturbed: {num_drawn} tokens in {took_s:.0f} s", flush=True)
            found, operator, num_rounds = anyio.run(
                disturbed, mesh, prompts, options.tokens, options.moves, options.concurrency
            )
            differ = [index for index, got in enumerate(found) if got != expected[index % len(expected)]]
            frozen, seconds, num_bytes, most = anyio.run(figures, operator)
            mesh.wait_until_idle(30.0)
            metrics = mesh.metrics()["decode-0"]
    step_s = _mean(metrics, "pdmesh:step_seconds", 'kind="decode"')
    print(f"moves: {dict(operator.operations)}, at most {most} of one request, {num_rounds} rounds")
    print(f"streams: {len(found)} requests, {len(differ)} differ {differ[:10]}")
    print(
        f"stood still: p50 {share(frozen, 0.5) * 1e3:.1f} ms, p99 {share(frozen, 0.99) * 1e3:.1f} ms; "
        f"two decode steps and 10 ms: {(2 * step_s + 0.01) * 1e3:.1f} ms"
    )
    print(f"of the last {len(frozen)}: {num_bytes} bytes, {share(seconds, 0.5) * 1e3:.1f} ms each at p50")
    return 1 if differ else 0


def _mean(metrics: str, name: str, label: str) -> float:
    """Of a histogram."""
    values = dict(
        line.rsplit(" ", 1) for line in metrics.splitlines() if line.startswith(name) and (label in line or not label)
    )
    total = sum(float(value) for key, value in values.items() if "_sum" in key)
    count = sum(float(value) for key, value in values.items() if "_count" in key)
    return total / count if count else float("nan")


def drain(options: argparse.Namespace) -> int:
    print(heading(f"An instance with {options.streams} streams of {options.context} tokens is drained"), flush=True)
    prompts = random_prompts([options.context] * options.streams, TINY.vocab_size, seed=3)
    num_tokens = SHAPE.max_position_embeddings - options.context  # the first decodes until the last one does
    settings = {
        "WORKER_DETERMINISTIC": "true",
        "WORKER_DTYPE": options.dtype,
        "WORKER_MAX_NUM_SEQS": str(2 * options.streams),
    }
    with tempfile.TemporaryDirectory() as name:
        checkpoint = checkpoint_of(options.architecture, Path(name) / "model", SHAPE, options.dtype)
        with running_mesh(Path(name), model=checkpoint, decode=2, settings=settings) as mesh:
            return anyio.run(_drain, mesh, prompts, num_tokens)


async def _drain(mesh: RunningMesh, prompts: Sequence[Sequence[int]], num_tokens: int) -> int:
    operator = operator_of(mesh)
    await operator.operate(OperationKind.DRAIN, "decode-1")
    failed = 0
    status: OperationStatus | None = None
    took_s = float("nan")
    moves: list[dict[str, float]] = []
    sent: list[dict[str, float]] = []
    drawn: list[list[int]] = [[] for _ in prompts]

    async def ask(place: int, num_tokens: int, into: list[int]) -> None:
        nonlocal failed
        body = {
            "model": mesh.model,
            "prompt": list(prompts[place]),
            "max_tokens": num_tokens,
            "ignore_eos": True,
            "temperature": 0,
            "stream": True,
            "return_token_ids": True,
        }
        async with client.stream("POST", "/v1/completions", json=body, timeout=900) as response:
            failed += response.status_code != 200
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    event = json.loads(line[6:])
                    failed += "error" in event
                    into += [token for choice in event.get("choices", ()) for token in choice["token_ids"]]

    async with mesh.client() as client, anyio.create_task_group() as tasks:
        for place in range(len(prompts)):
            tasks.start_soon(ask, place, num_tokens, drawn[place])
        names = await all_decode(operator, len(prompts))
        await operator.operate(OperationKind.UNDRAIN, "decode-1")
        began_s = time.monotonic()
        status = await operator.operate(OperationKind.DRAIN, "decode-0")
        took_s = time.monotonic() - began_s
        records = [await operator.record(name) for name in names]
        moves = [e.figures for record in records for e in record.entries if e.what == "moved away"]
        sent = [e.figures for record in records for e in record.entries if e.what == "sent"]
        before = [len(tokens) for tokens in drawn]
        with anyio.move_on_after(GO_ON_S):
            while True:
                if all(len(tokens) >= number + NUM_AFTER for tokens, number in zip(drawn, before, strict=True)):
                    break
                await anyio.sleep(0.1)  # streams tell of no such thing by themselves
        tasks.cancel_scope.cancel()
    await operator.operate(OperationKind.UNDRAIN, "decode-0")
    again: list[list[int]] = [[] for _ in prompts]
    async with mesh.client() as client, anyio.create_task_group() as tasks:
        for place, tokens in enumerate(drawn):
            tasks.start_soon(ask, place, len(tokens), again[place])
    differ = [place for place, tokens in enumerate(drawn) if again[place] != tokens]
    num_bytes = sum(each["num_bytes"] for each in moves)
    rate = max(each["num_bytes"] / each["duration_s"] for each in [*moves, *sent])
    print(f"{status and status.state}: {len(moves)} of {len(prompts)} moved, {failed} failed, in {took_s:.2f} s")
    print(
        f"{num_bytes / 1e6:.0f} MB; at the best rate of one transfer, {rate / 1e6:.0f} MB/s, {num_bytes / rate:.2f} s"
    )
    print(f"streams: {len(drawn)} of {sum(map(len, drawn))} tokens, {len(differ)} differ {differ[:10]}")
    return 0 if len(moves) == len(prompts) and not failed and not differ else 1


async def all_decode(operator: OperatorClient, num_requests: int) -> list[str]:
    """The requests, once all of them decode on the first decode instance. Raises TimeoutError.

    One of which it computed the prompt itself never lands.
    """
    names: list[str] = []
    with anyio.fail_after(ALL_DECODE_S):
        while len(names) < num_requests:
            await anyio.sleep(0.25)  # the scheduler tells of no such thing by itself
            records = [await operator.record(name) for name in await operator.running()]
            before, names = len(names), [record.request_id for record in records if _is_at(record, "decode-0")]
            if len(names) != before:
                print(f"  {len(names)} of {num_requests} decode", flush=True)
    return names


def _is_at(record: RequestRecord, instance: str) -> bool:
    """Whether an instance has the KV of a request."""
    return any(entry.what in ("landed", "chunk") and entry.instance_id == instance for entry in record.entries)


def main() -> None:
    parser = argparse.ArgumentParser(description="Moves of running decodes")
    parser.add_argument("--moves", type=int, default=1000)
    parser.add_argument("--requests", type=int, default=36)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--concurrency", type=int, default=12)
    parser.add_argument("--long", type=int, default=3, help="requests whose context comes to --context")
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--architecture", default="llama")
    parser.add_argument("--drain", action="store_true")
    parser.add_argument("--streams", type=int, default=32)
    options = parser.parse_args()
    try:
        sys.exit(drain(options) if options.drain else exact(options))
    except PdmeshError as error:
        sys.exit(f"{os.path.basename(sys.argv[0])}: {error}")


if __name__ == "__main__":
    main()
