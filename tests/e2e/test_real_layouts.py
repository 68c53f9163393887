"""Published models in instances of several ranks and stages, and with contexts spread over instances, bit for bit."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from pdmesh.engine.files import resolve_model
from pdmesh.engine.runner import TorchEngine
from pdmesh_testing.exactness import Reference, engine_reference, mismatches
from pdmesh_testing.mesh import layout_settings, running_mesh
from pdmesh_testing.real_models import real_model, token_ids
from pdmesh_testing.spread_meshes import answers, spread_settings

pytestmark = [pytest.mark.anyio, pytest.mark.e2e, pytest.mark.ucx, pytest.mark.slow, pytest.mark.timeout(900)]

ROOT = Path(__file__).parents[2]
MAX_TOKENS = 20

#: Tokens of a context that one instance holds.
LIMIT = 64


def references_of(model: Path, lengths: Sequence[int], **options: int | bool) -> list[Reference]:
    """What one engine alone says to beginnings of the README."""
    engine = TorchEngine(resolve_model(str(model)), num_blocks=64, num_threads=1, **options)  # type: ignore[arg-type]
    prompt = token_ids(model, (ROOT / "README.md").read_text())
    return [engine_reference(engine, prompt[:length], MAX_TOKENS) for length in lengths]


@pytest.mark.parametrize(("name", "layout"), [("smollm2", "3x1-1x2"), ("gemma3-270m", "2x1-1x2")])
async def test_ranks_and_stages_change_no_bit(name: str, layout: str, tmp_path: Path) -> None:
    """SmolLM2 has 9 heads and 3 of keys, Gemma 4 and 1."""
    model = real_model(name)
    references = references_of(model, [5, 100, 300], deterministic=True, ordered=True)
    settings = {**layout_settings(layout), "WORKER_DETERMINISTIC": "true", "POLICY_CHUNK_TOKENS": "97"}
    with running_mesh(tmp_path, model=model, settings=settings) as mesh:
        async with mesh.client() as client:
            assert await mismatches(client, mesh.model, references, concurrency=3, tolerance=0.0) == []
        mesh.wait_until_idle()


async def test_contexts_spread_over_instances_change_no_bit(tmp_path: Path) -> None:
    model = real_model("smollm2")
    references = references_of(model, [40, 64, 100, 150], range_tokens=LIMIT)
    with running_mesh(tmp_path, model=model, decode=3, settings=spread_settings(LIMIT)) as mesh:
        async with mesh.client() as client:
            assert await mismatches(client, mesh.model, references, concurrency=2, tolerance=0.0) == []
        assert sum(answers(mesh).values()) > 0
        mesh.wait_until_idle()
