"""Conversations of many users on real processes whose cache holds few: what comes back gives the same tokens."""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path

import pytest

from pdmesh_testing.checkpoints import CheckpointShape, write_checkpoint
from pdmesh_testing.conversations import turns_from_the_tier
from pdmesh_testing.mesh import RunningMesh, running_mesh

pytestmark = [pytest.mark.anyio, pytest.mark.e2e, pytest.mark.ucx, pytest.mark.slow, pytest.mark.timeout(600)]

SHAPE = CheckpointShape()
NUM_USERS = 8
TOKEN_BYTES = 2 * 4 * SHAPE.num_layers * SHAPE.num_kv_heads * SHAPE.head_dim

#: Pools that prefill, decode and do both.
POOLS = {"1P+1D": (1, 1, 0), "mixed": (0, 0, 1)}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("model"), architecture="qwen3", shape=SHAPE, seed=1)


@pytest.fixture(params=[(pools, medium) for pools in POOLS for medium in ("HOST", "DISK")], ids="-".join)
def mesh(request: pytest.FixtureRequest, checkpoint: Path, tmp_path: Path) -> Generator[RunningMesh]:
    pools, medium = request.param
    prefill, decode, mixed = POOLS[pools]
    settings = {
        "WORKER_KV_CACHE_BYTES": str(1300 * TOKEN_BYTES),
        f"WORKER_KV_OFFLOAD_{medium}_BYTES": str(20_000 * TOKEN_BYTES),
        "WORKER_KV_OFFLOAD_DIR": str(tmp_path / "tier"),
        "WORKER_MAX_MODEL_LEN": "1024",
    }
    with running_mesh(
        tmp_path, model=checkpoint, prefill=prefill, decode=decode, mixed=mixed, settings=settings
    ) as mesh:
        yield mesh
        mesh.wait_until_idle()


async def test_turns_from_the_tier_equal_transformers(mesh: RunningMesh, checkpoint: Path, tmp_path: Path) -> None:
    await turns_from_the_tier(mesh, checkpoint, SHAPE.vocab_size, NUM_USERS)
    assert "evicted cached KV without a command" not in mesh.logs()
    assert not (tmp_path / "tier").exists() or list((tmp_path / "tier").iterdir()) == []
