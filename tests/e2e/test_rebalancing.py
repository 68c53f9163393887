"""One of two decode instances runs out of memory beside one that has room."""

from __future__ import annotations

import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import anyio
import httpx
import pytest

from pdmesh.operations import OperationKind
from pdmesh.wire.messages import RequestRecord
from pdmesh_testing.checkpoints import CheckpointShape, write_checkpoint
from pdmesh_testing.exactness import random_prompts
from pdmesh_testing.mesh import RunningMesh, running_mesh
from pdmesh_testing.operating import OperatorClient, operator_of

pytestmark = [pytest.mark.e2e, pytest.mark.ucx]

SHAPE = CheckpointShape(vocab_size=2048, hidden_size=128, intermediate_size=256, num_layers=4, head_dim=64)
BLOCK_SIZE = 16
NUM_STREAMS, CONTEXT, NUM_TOKENS = 6, 100, 250

#: Short answers before the streams, which teach the mesh that outputs are short.
NUM_SHORT, SHORT_TOKENS, SHORT_AT_ONCE = 60, 8, 6

#: Blocks of one instance, with room for 0.7 of the tokens that the streams come to.
NUM_BLOCKS = int(0.7 * NUM_STREAMS * (CONTEXT + NUM_TOKENS)) // BLOCK_SIZE
BLOCK_BYTES = 2 * 2 * 2 * 64 * BLOCK_SIZE * 4  # layers, keys and values, heads, dimension, tokens, bytes

SETTINGS = {
    "WORKER_ENGINE": "fake",
    # A context takes longer to compute again than to move, and streams outlast the wait for all of them to decode.
    "WORKER_FAKE_LATENCY": "a_s=0.005,b_s=5e-4,decode_a_s=0.03",
    "SCHEDULER_KV_RESERVATION": "on_demand",
    "WORKER_KV_CACHE_BYTES": str(NUM_BLOCKS * BLOCK_BYTES),
    "WORKER_MAX_MODEL_LEN": str(CONTEXT + NUM_TOKENS + BLOCK_SIZE),
}


@dataclass(frozen=True, slots=True)
class Result:
    num_moves: int
    num_preemptions: float
    differ: list[int]


async def ask(client: httpx.AsyncClient, mesh: RunningMesh, prompt: Sequence[int], seed: int, tokens: int) -> list[int]:
    """Return the tokens of an answer; requests with an even seed are greedy."""
    body = {
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


async def all_decode(operator: OperatorClient) -> list[str]:
    """Return the ids of the streams once all of them decode on decode-0. Raises TimeoutError."""
    names: list[str] = []
    with anyio.fail_after(120):
        while len(names) < NUM_STREAMS:
            await anyio.sleep(0.25)  # the scheduler has no event for this
            records = [await operator.record(name) for name in await operator.running()]
            names = [record.request_id for record in records if _has_kv(record, "decode-0")]
    return names


def _has_kv(record: RequestRecord, instance: str) -> bool:
    return any(entry.what in ("landed", "chunk") and entry.instance_id == instance for entry in record.entries)


async def serve(mesh: RunningMesh, prompts: Sequence[Sequence[int]]) -> Result:
    """Fill decode-0 with streams while decode-1 is drained, then open decode-1 again."""
    operator = operator_of(mesh)
    found: dict[int, list[int]] = {}
    again: dict[int, list[int]] = {}
    names: list[str] = []

    async def one(place: int, into: dict[int, list[int]], limiter: anyio.CapacityLimiter) -> None:
        async with limiter:
            into[place] = await ask(client, mesh, prompts[place], place, NUM_TOKENS)

    async def short(number: int, limiter: anyio.CapacityLimiter) -> None:
        async with limiter:
            await ask(client, mesh, prompts[0][:BLOCK_SIZE], number, SHORT_TOKENS)

    async with mesh.client() as client:
        async with anyio.create_task_group() as tasks:
            limiter = anyio.CapacityLimiter(SHORT_AT_ONCE)
            for number in range(NUM_SHORT):
                tasks.start_soon(short, number, limiter)
        await operator.operate(OperationKind.DRAIN, "decode-1")
        async with anyio.create_task_group() as tasks:
            limiter = anyio.CapacityLimiter(NUM_STREAMS)
            for place in range(NUM_STREAMS):
                tasks.start_soon(one, place, found, limiter)
            names = await all_decode(operator)
            await operator.operate(OperationKind.UNDRAIN, "decode-1")
        records = [await operator.record(name) for name in names]
        async with anyio.create_task_group() as tasks:
            limiter = anyio.CapacityLimiter(NUM_STREAMS // 2)
            for place in range(NUM_STREAMS):
                tasks.start_soon(one, place, again, limiter)
    return Result(
        num_moves=sum(entry.what == "moved away" for record in records for entry in record.entries),
        num_preemptions=mesh.total("num_preemptions"),
        differ=[place for place, tokens in found.items() if tokens != again[place]],
    )


@pytest.mark.timeout(300)
def test_what_would_be_computed_again_moves_and_is_the_same_stream(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path / "model", architecture="llama", shape=SHAPE, dtype="float32", seed=1)
    prompts = random_prompts([CONTEXT] * NUM_STREAMS, SHAPE.vocab_size, seed=3)

    def measure(rebalances: bool) -> Result:
        settings = SETTINGS | {"POLICY_REBALANCES": json.dumps(rebalances)}
        with running_mesh(tmp_path / str(rebalances), model=checkpoint, decode=2, settings=settings) as mesh:
            result = anyio.run(serve, mesh, prompts)
            mesh.wait_until_idle(30.0)
        return result

    with ThreadPoolExecutor() as executor:  # each has a mesh of its own
        on, off = executor.map(measure, (True, False))
    assert on.differ == off.differ == []
    assert on.num_moves > off.num_moves == 0
    assert on.num_preemptions < off.num_preemptions
