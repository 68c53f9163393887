"""Weights that are replaced under their path while streams run: each stream is of one model, and none breaks."""

from __future__ import annotations

import asyncio
import json
import os
from collections import Counter
from collections.abc import Generator
from contextlib import suppress
from pathlib import Path

import pytest

from pdmesh.errors import PdmeshError
from pdmesh_testing.checkpoints import TINY, write_checkpoint
from pdmesh_testing.exactness import random_prompts
from pdmesh_testing.load import LoadRequest, Stream, running_load
from pdmesh_testing.mesh import PATIENT, RunningMesh, running_mesh
from pdmesh_testing.reference import HfReference

pytestmark = [pytest.mark.anyio, pytest.mark.e2e, pytest.mark.ucx, pytest.mark.slow, pytest.mark.timeout(600)]

TOKEN_BYTES = 2 * 4 * TINY.num_layers * TINY.num_kv_heads * TINY.head_dim
MAX_TOKENS = 300
AT_ONCE = 4
NUM_STREAMS = 24

#: Reuse is on, and the caches hold so little that what is kept goes to the tier and comes back from there.
SETTINGS = {
    **PATIENT,
    "WORKER_KV_CACHE_BYTES": str(3200 * TOKEN_BYTES),
    "WORKER_KV_OFFLOAD_HOST_BYTES": str(4000 * TOKEN_BYTES),
    "WORKER_KV_OFFLOAD_DISK_BYTES": str(20_000 * TOKEN_BYTES),
    "WORKER_MAX_MODEL_LEN": "1024",
}


def requests() -> list[LoadRequest]:
    """Prompts of which four begin with the same 300 tokens, and two with others."""
    common, *others = random_prompts([300, 40, 60, 80, 100, 290, 310], TINY.vocab_size, seed=3)
    prompts = [common + tail for tail in others[:4]] + others[4:]
    return [LoadRequest(tuple(prompt), MAX_TOKENS, temperature=0.0, seed=0) for prompt in prompts]


@pytest.fixture(scope="module")
def revisions(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two checkpoints of one configuration."""
    folder = tmp_path_factory.mktemp("revisions")
    old, new = (write_checkpoint(folder / str(seed), shape=TINY, seed=seed) for seed in (0, 1))
    return old, new


@pytest.fixture
def mesh(revisions: tuple[Path, Path], tmp_path: Path) -> Generator[RunningMesh]:
    model = write_checkpoint(tmp_path / "model", shape=TINY, seed=0)
    settings = {**SETTINGS, "WORKER_KV_OFFLOAD_DIR": str(tmp_path / "tier")}
    with running_mesh(tmp_path, model=model, prefill=2, decode=2, settings=settings) as mesh:
        yield mesh


async def revisions_seen(mesh: RunningMesh, over: asyncio.Future[str]) -> list[set[str]]:
    """Return the identities that each state of the mesh told of, until ``over``."""
    seen: list[set[str]] = []
    while not over.done():
        with suppress(PdmeshError):  # the scheduler is among what is restarted
            seen.append({each.weights for each in (await mesh.state()).revisions})
        await asyncio.sleep(0.2)
    return seen


async def test_streams_end_on_the_weights_that_began_them(
    mesh: RunningMesh, revisions: tuple[Path, Path], tmp_path: Path
) -> None:
    asked = requests()
    references = [HfReference(directory) for directory in revisions]
    old, new = ({each: reference.greedy(each.prompt, MAX_TOKENS) for each in asked} for reference in references)

    def revision_of(stream: Stream) -> str:
        if stream.token_ids == old[stream.asked]:
            return "old"
        return "new" if stream.token_ids == new[stream.asked] else "both or neither"

    async with running_load(mesh.base_url, mesh.model, asked, at_once=AT_ONCE) as load:
        await load.ended(AT_ONCE)
        await load.all_draw(AT_ONCE)
        (before,) = (await mesh.state()).revisions
        os.replace(revisions[1] / "model.safetensors", tmp_path / "model" / "model.safetensors")
        restart = asyncio.ensure_future(
            asyncio.to_thread(mesh.pdmesh, "restart", "--rolling", "--timeout", "200", "-o", "json")
        )
        seen = await revisions_seen(mesh, restart)
        assert json.loads(await restart)["state"] == "done"
        await load.ended(max(AT_ONCE + 1, NUM_STREAMS - len(load.streams)))
    assert not load.failed, mesh.logs()
    found = Counter(map(revision_of, load.streams))
    assert found["both or neither"] == 0, found
    assert found["old"] > 0, found
    assert found["new"] > AT_ONCE, found
    assert len(load.streams) >= NUM_STREAMS
    assert revision_of(load.streams[-1]) == "new"
    assert max(map(len, seen)) == 2, "the mesh told of both while they were there"
    (revision,) = (await mesh.state()).revisions
    assert revision.weights != before.weights
    assert mesh.total("prefix_cache_hits") > 0
    assert 'reason="weights"' not in "\n".join(mesh.metrics().values())
    mesh.wait_until_idle(30.0)
