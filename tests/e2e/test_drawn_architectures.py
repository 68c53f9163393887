"""Two architectures that nobody tuned a test to are drawn at each run, and served by a mesh of real processes.

DRAW_SEED draws one again.
"""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from pdmesh_testing.exactness import mismatches, random_prompts, reference
from pdmesh_testing.mesh import running_mesh
from pdmesh_testing.transformers_checkpoints import model_variants, undescribed_variants, write_transformers_checkpoint

pytestmark = [pytest.mark.anyio, pytest.mark.e2e, pytest.mark.ucx, pytest.mark.slow]

#: Prefill, decode and mixed instances.
TOPOLOGIES = [(1, 1, 0), (0, 0, 2)]

MAX_TOKENS = 16

#: Two logits that rounding may swap.
_TIE = 1e-4

#: Those that are described, and those that transformers' own modules compute.
POOLS = {"described": model_variants, "undescribed": undescribed_variants}


@pytest.mark.timeout(300)
@pytest.mark.parametrize("pool", POOLS)
async def test_tokens_and_logprobs_equal_transformers(pool: str, tmp_path: Path) -> None:
    seed = int(os.environ.get("DRAW_SEED") or random.SystemRandom().randrange(1 << 32))
    rng = random.Random(seed)
    model_type, variants = rng.choice(sorted(POOLS[pool]().items()))
    options = rng.choice(variants)
    prefill, decode, mixed = rng.choice(TOPOLOGIES)
    drawn = f"seed {seed}: {model_type} with {options}"
    checkpoint = write_transformers_checkpoint(tmp_path / "model", model_type, seed=seed % 100, **options)
    prompts = random_prompts([1, 17, 33, 100, 500], 320, seed=seed)
    references = [reference(checkpoint, prompt, MAX_TOKENS) for prompt in prompts]
    references = [each for each in references if each.smallest_margin > _TIE]
    settings = {"SCHEDULER_BUNDLE": "fcfs", "POLICY_CHUNK_TOKENS": str(rng.choice([7, 64, 512]))}
    with running_mesh(
        tmp_path, model=checkpoint, prefill=prefill, decode=decode, mixed=mixed, settings=settings
    ) as mesh:
        async with mesh.client() as client:
            max_model_len = (await client.get("/v1/models")).json()["data"][0]["max_model_len"]
            fitting = [each for each in references if len(each.prompt) + MAX_TOKENS <= max_model_len]
            assert await mismatches(client, mesh.model, fitting * 2, concurrency=8) == [], drawn
