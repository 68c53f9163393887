"""Meshes of real processes on a device, in fp32: what came after the first session on one.

``GPU_TESTS_DEVICE=cpu`` runs them where there is no device.
"""

from __future__ import annotations

import json
from collections.abc import Generator
from pathlib import Path
from typing import Any

import anyio
import pytest

from pdmesh_testing.checkpoints import CheckpointShape, write_checkpoint
from pdmesh_testing.conversations import fetched_turn, turns_from_the_tier
from pdmesh_testing.devices import DEVICE, MARKS
from pdmesh_testing.exactness import complete, random_prompts
from pdmesh_testing.mesh import RunningMesh, running_mesh

pytestmark = [*MARKS, pytest.mark.anyio, pytest.mark.e2e, pytest.mark.timeout(300)]

SHAPE = CheckpointShape(num_layers=4, max_position_embeddings=16384)
TOKEN_BYTES = 2 * 4 * SHAPE.num_layers * SHAPE.num_kv_heads * SHAPE.head_dim
NUM_USERS = 6

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 6}, "kind": {"enum": ["one", "two"]}},
    "required": ["name", "kind"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("model"), architecture="qwen3", shape=SHAPE, seed=1)


@pytest.fixture(scope="module")
def small_mesh(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Generator[RunningMesh]:
    """1P+1D whose caches hold few conversations, beside tiers; KV goes in pieces, encrypted."""
    folder = tmp_path_factory.mktemp("small")
    settings = {
        "WORKER_DEVICE": DEVICE,
        "WORKER_KV_CACHE_BYTES": str(1300 * TOKEN_BYTES),
        "WORKER_KV_OFFLOAD_HOST_BYTES": str(1024 * TOKEN_BYTES),
        "WORKER_KV_OFFLOAD_DISK_BYTES": str(10_000 * TOKEN_BYTES),
        "WORKER_KV_OFFLOAD_DIR": str(folder / "tier"),
        "WORKER_MAX_MODEL_LEN": "1024",
        "TRANSFER_PEER_READS": "false",
        "TRANSFER_ENCRYPT": "true",
    }
    with running_mesh(folder, model=checkpoint, settings=settings) as mesh:
        yield mesh


async def test_turns_from_the_tier_equal_transformers(small_mesh: RunningMesh, checkpoint: Path) -> None:
    mesh = small_mesh
    await turns_from_the_tier(mesh, checkpoint, SHAPE.vocab_size, NUM_USERS)
    assert mesh.peer_read_bytes() == 0
    assert mesh.total("kv_transfer_seconds_count") > 0
    await anyio.to_thread.run_sync(mesh.wait_until_idle)


async def test_answers_held_to_a_schema_fit_and_are_the_same_in_any_company(small_mesh: RunningMesh) -> None:
    mesh = small_mesh
    fields: dict[str, Any] = {"structured_outputs": {"json": SCHEMA}, "ignore_eos": False, "temperature": 1.0}
    prompts = [[*prompt, 5, 6, 7] for prompt in random_prompts([1, 40, 300], SHAPE.vocab_size, 5)]
    async with mesh.client() as client:
        alone = [
            await complete(client, mesh.model, prompt, 60, seed=seed, **fields) for seed, prompt in enumerate(prompts)
        ]
        together: dict[int, str] = {}

        async def ask(seed: int) -> None:
            together[seed] = (await complete(client, mesh.model, prompts[seed], 60, seed=seed, **fields)).text

        async with anyio.create_task_group() as tasks:
            for seed in range(len(prompts)):
                tasks.start_soon(ask, seed)
                tasks.start_soon(complete, client, mesh.model, prompts[seed], 60)
    for seed, answer in enumerate(alone):
        assert together[seed] == answer.text
        found = json.loads(answer.text)
        assert list(found) == ["name", "kind"]
        assert found["kind"] in ("one", "two")


@pytest.fixture
def wide_mesh(checkpoint: Path, tmp_path: Path) -> Generator[RunningMesh]:
    """2P+1D that copy KV from each other, with chunks so small that prompts take a while."""
    settings = {
        "WORKER_DEVICE": DEVICE,
        "WORKER_KV_CACHE_BYTES": str(60_000 * TOKEN_BYTES),
        "SCHEDULER_BUNDLE": "fcfs",
        "POLICY_CHUNK_TOKENS": "64",
    }
    with running_mesh(tmp_path, model=checkpoint, prefill=2, settings=settings) as mesh:
        yield mesh


async def test_a_next_turn_is_computed_beside_who_keeps_its_prefix_and_is_busy(wide_mesh: RunningMesh) -> None:
    """All that the first turn left is copied to another instance, within the device."""
    mesh = wide_mesh
    turn = await fetched_turn(mesh, SHAPE.vocab_size, num_other_tokens=14_000)
    assert turn.detail == f"3,968 of 4,100 tokens from {turn.holder_id}"
    assert turn.fetched_id == turn.computed_id != turn.holder_id
    assert turn.warm["token_ids"] == turn.cold["token_ids"]
    assert mesh.total("prefix_cache_fetched_tokens") == 3968
    assert mesh.peer_read_bytes() > 0
    await anyio.to_thread.run_sync(mesh.wait_until_idle)
