"""A prefix is copied from where it is kept, on real processes: the same bits, seen by whoever asks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest

from pdmesh.testing.checkpoints import CheckpointShape, write_checkpoint
from pdmesh.testing.exactness import random_prompts
from pdmesh.testing.mesh import RunningMesh, running_mesh
from pdmesh.wire.messages import RequestRecord

pytestmark = [pytest.mark.anyio, pytest.mark.e2e, pytest.mark.ucx, pytest.mark.slow, pytest.mark.timeout(600)]

#: A prompt of 4,000 tokens takes it about a second.
SHAPE = CheckpointShape(hidden_size=256, intermediate_size=1024, num_layers=4, max_position_embeddings=16384)

Choice = dict[str, Any]


async def ask(
    mesh: RunningMesh, client: httpx.AsyncClient, prompt: Sequence[int], max_tokens: int, salt: str = "ours"
) -> tuple[Choice, RequestRecord]:
    """Return the choice, with its log-probabilities, and the record of its request."""
    body = {
        "model": mesh.model,
        "prompt": list(prompt),
        "max_tokens": max_tokens,
        "ignore_eos": True,
        "temperature": 0,
        "logprobs": 3,
        "return_token_ids": True,
        "cache_salt": salt,
    }
    response = await client.post("/v1/completions", json=body, timeout=300)
    assert response.status_code == 200, response.text
    choice: Choice = response.json()["choices"][0]
    record = await anyio.to_thread.run_sync(mesh.request_record, response.json()["id"])
    return choice, record


async def computing(mesh: RunningMesh) -> set[str]:
    """The prefill instances that have something to compute."""
    instances = (await mesh.state()).instances
    return {each.instance_id for each in instances if each.role == "prefill" and each.num_queued_tokens}


def where(record: RequestRecord) -> str:
    """Which instance computed a prompt."""
    (instance_id,) = {entry.instance_id for entry in record.entries if entry.what == "chunk"}
    assert instance_id is not None
    return instance_id


async def test_a_next_turn_is_computed_beside_who_keeps_its_prefix_and_is_busy(tmp_path: Path) -> None:
    """All that the first turn left is copied to another instance, and the answer's bits are those computed anew."""
    first, rest, between, *others = random_prompts([4000, 100, 200, 12000, 12000], SHAPE.vocab_size, 3)
    second = [*first, *rest]
    model = write_checkpoint(tmp_path / "model", architecture="qwen3", shape=SHAPE, seed=1)
    settings = {"SCHEDULER_BUNDLE": "fcfs", "WORKER_DETERMINISTIC": "true", "WORKER_MAX_MODEL_LEN": "16384"}
    with running_mesh(tmp_path, model=model, prefill=2, settings=settings) as mesh:
        async with mesh.client() as client, anyio.create_task_group() as tasks:
            cold, _ = await ask(mesh, client, second, 16, salt="cold")
            _, record = await ask(mesh, client, first, 1)
            holder, busy = where(record), set[str]()
            await ask(mesh, client, between, 1)  # instances take turns: the next one goes to the holder
            for number, other in enumerate(others, 1):
                tasks.start_soon(ask, mesh, client, other, 1)
                with anyio.fail_after(60):
                    while len(busy := await computing(mesh)) < number:  # noqa: ASYNC110  # of another process
                        await anyio.sleep(0.01)
                if holder in busy:
                    break
            assert holder in busy
            warm, record = await ask(mesh, client, second, 16)
            (fetched,) = [entry for entry in record.entries if entry.what == "fetched"]
            assert fetched.detail == f"3,968 of 4,100 tokens from {holder}"
            assert fetched.instance_id == where(record) != holder
            assert warm == cold
        mesh.wait_until_idle()
        assert mesh.total("prefix_cache_fetched_tokens") == 3968
        assert mesh.total("prefix_cache_fetched_bytes") == 3968 * 2 * 2 * 16 * 4 * 4
        assert "fetched by instances from others: 3,968 tokens" in mesh.pdmesh("status")
        assert mesh.total("num_stale_prefixes") == 0
