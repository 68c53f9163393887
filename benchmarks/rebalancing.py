"""A decode instance of a real mesh runs out of memory beside one that does not: what moves is not computed again.

    python benchmarks/rebalancing.py [--streams 8] [--context 800] [--tokens 900] [--engine torch|fake]

One prefill and two decode instances with few KV blocks, memory on demand. Short answers teach the mesh that outputs are
short; then streams with long outputs are all admitted on one decode instance, while the other is drained. That one is
opened again, and the streams grow, until the first has no block left. Once with rebalancing (`policy.rebalances`), once
without. Prints how many streams moved, and how many were retracted, that is computed again. Every stream is asked for
once more, half of them at a time, and has to be the same.

Exit code 1 if a stream differs, if nothing moved with rebalancing, or as many were computed again as without.
"""

from __future__ import annotations

import argparse
import json
import re
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio
import httpx
from moves import BLOCK_SIZE, SHAPE, all_decode
from report import Limits, heading

from pdmesh.model import OperationKind
from pdmesh_testing.checkpoints import write_checkpoint
from pdmesh_testing.exactness import random_prompts
from pdmesh_testing.mesh import RunningMesh, running_mesh
from pdmesh_testing.operating import operator_of

#: Of the stand-in: a context takes longer to compute again than to move, and its streams last for seconds after all of
#: them are seen to decode, also where others have most of the machine.
FAKE_LATENCY = "a_s=0.005,b_s=5e-4,decode_a_s=0.03"
FAKE_BLOCK_BYTES = 2 * 2 * 2 * 64 * BLOCK_SIZE * 4  # layers, keys and values, heads, dimension, tokens, bytes

#: Answers that are short, before.
NUM_SHORT, SHORT_TOKENS, SHORT_AT_ONCE = 60, 8, 6

#: Of what the streams come to in the end, that one instance has room for.
SHARE = 0.7


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    num_moves: int
    num_preemptions: int
    took_s: float
    differ: list[int]


async def ask(client: httpx.AsyncClient, mesh: RunningMesh, prompt: Sequence[int], seed: int, tokens: int) -> list[int]:
    """Its tokens; every other one is drawn greedily."""
    body: dict[str, Any] = {
        "model": mesh.model,
        "prompt": list(prompt),
        "max_tokens": tokens,
        "ignore_eos": True,
        "temperature": 0.8 * (seed % 2),
        "seed": seed,
        "return_token_ids": True,
    }
    response = await client.post("/v1/completions", json=body, timeout=900)
    response.raise_for_status()
    ids: list[int] = response.json()["choices"][0]["token_ids"]
    return ids


async def serve(mesh: RunningMesh, prompts: Sequence[Sequence[int]], num_tokens: int) -> Result:
    operator = operator_of(mesh)
    found: list[list[int]] = [[] for _ in prompts]
    again: list[list[int]] = [[] for _ in prompts]
    names: list[str] = []
    half, few = anyio.CapacityLimiter(max(1, len(prompts) // 2)), anyio.CapacityLimiter(SHORT_AT_ONCE)

    async def one(place: int, into: list[list[int]]) -> None:
        into[place] = await ask(client, mesh, prompts[place], place, num_tokens)

    async def with_room(place: int) -> None:
        async with half:
            await one(place, again)

    async def short(number: int) -> None:
        async with few:
            await ask(client, mesh, prompts[0][:BLOCK_SIZE], number, SHORT_TOKENS)

    async with mesh.client() as client:
        async with anyio.create_task_group() as tasks:
            for number in range(NUM_SHORT):
                tasks.start_soon(short, number)
        await operator.operate(OperationKind.DRAIN, "decode-1")
        began_s = time.monotonic()
        async with anyio.create_task_group() as tasks:
            for place in range(len(prompts)):
                tasks.start_soon(one, place, found)
            names = await all_decode(operator, len(prompts))
            await operator.operate(OperationKind.UNDRAIN, "decode-1")
        took_s = time.monotonic() - began_s
        records = [await operator.record(name) for name in names]
        async with anyio.create_task_group() as tasks:
            for place in range(len(prompts)):
                tasks.start_soon(with_room, place)
    gateway = next(text for name, text in mesh.metrics().items() if name.startswith("gateway"))
    counted = re.search(r"^pdmesh:num_preemptions_total\S* (\S+)", gateway, re.MULTILINE)
    return Result(
        num_moves=sum(entry.what == "moved away" for record in records for entry in record.entries),
        num_preemptions=int(float(counted[1])) if counted else 0,
        took_s=took_s,
        differ=[place for place, tokens in enumerate(found) if tokens != again[place]],
    )


def measure(streams: int, context: int, tokens: int, engine: str, *, rebalances: bool) -> Result:
    num_blocks = int(SHARE * streams * (context + tokens)) // BLOCK_SIZE
    block_bytes = SHAPE.num_layers * 2 * SHAPE.num_kv_heads * SHAPE.head_dim * BLOCK_SIZE * 4
    if engine == "fake":
        block_bytes = FAKE_BLOCK_BYTES
    prompts = random_prompts([context] * streams, SHAPE.vocab_size, seed=3)
    settings = {
        "WORKER_ENGINE": engine,
        "WORKER_FAKE_LATENCY": FAKE_LATENCY,
        "POLICY_REBALANCES": json.dumps(rebalances),
        "SCHEDULER_KV_RESERVATION": "on_demand",
        "WORKER_DETERMINISTIC": "true",
        "WORKER_DTYPE": "float32",
        "WORKER_KV_CACHE_BYTES": str(num_blocks * block_bytes),
        "WORKER_MAX_MODEL_LEN": str(context + tokens + BLOCK_SIZE),
    }
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        checkpoint = write_checkpoint(folder / "model", architecture="llama", shape=SHAPE, dtype="float32", seed=1)
        with running_mesh(folder, model=checkpoint, decode=2, settings=settings) as mesh:
            result = anyio.run(serve, mesh, prompts, tokens)
            mesh.wait_until_idle(30.0)
    print(
        f"rebalancing {'on ' if rebalances else 'off'}: {num_blocks} blocks each; {result.num_moves} moves, "
        f"{result.num_preemptions} computed again, {result.took_s:.1f} s, {len(result.differ)} streams differ",
        flush=True,
    )
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--context", type=int, default=800, help="tokens of each prompt")
    parser.add_argument("--tokens", type=int, default=900, help="that each draws")
    parser.add_argument("--engine", choices=("torch", "fake"), default="torch")
    options = vars(parser.parse_args())
    print(heading("One of two decode instances runs out of memory"), flush=True)
    on, off = measure(**options, rebalances=True), measure(**options, rebalances=False)
    limits = Limits()
    print(f"differ: {limits.at_most('streams that differ', len(on.differ) + len(off.differ), 0.5)}")
    print(f"moves: {limits.at_least('moves', on.num_moves, 1)}")
    fewer = off.num_preemptions - on.num_preemptions
    print(f"fewer computed again: {fewer}; {limits.at_least('fewer computed again', fewer, 1)}")
    limits.end()


if __name__ == "__main__":
    main()
