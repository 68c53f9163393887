"""Contexts of models with windows, capped scores and sinks, spread over instances: exact, also when one is lost.

Prompts are longer than the room where they are computed, so chunks ask about earlier ranges, as decodes do.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Generator
from dataclasses import dataclass

import anyio
import pytest

from pdmesh_testing.exactness import Reference, mismatches, random_prompts, reference
from pdmesh_testing.mesh import RunningMesh, layout_settings, running_mesh
from pdmesh_testing.spread_meshes import answers, since, spread_settings, until
from pdmesh_testing.transformers_checkpoints import write_transformers_checkpoint

pytestmark = [pytest.mark.anyio, pytest.mark.e2e, pytest.mark.ucx, pytest.mark.slow, pytest.mark.timeout(600)]

LIMIT, BLOCK_SIZE, NUM_LAYERS, NUM_KV_HEADS, HEAD_DIM, VOCAB_SIZE = 64, 16, 4, 2, 16, 256
ROOM = 2 * LIMIT + 32
BLOCK_BYTES = 2 * NUM_LAYERS * NUM_KV_HEADS * HEAD_DIM * 4 * BLOCK_SIZE
#: In one instance, in three, and longer than an instance's room.
PROMPT_LENGTHS = [5, 140, 200, 239]
MAX_TOKENS = 16

#: Windows longer and shorter than a range.
GEMMA2 = {"sliding_window": 80, "attn_logit_softcapping": 2.0}
GPT_OSS = {"sliding_window": 24, "num_local_experts": 5, "num_experts_per_tok": 2}


@dataclass(frozen=True)
class Served:
    mesh: RunningMesh
    references: list[Reference]


@pytest.fixture(
    scope="module",
    params=[("gemma2", GEMMA2, "1x2-2x1"), ("gpt_oss", GPT_OSS, "1x1-1x1")],
    ids=["gemma2, ranks and stages", "gpt_oss"],
)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Generator[Served]:
    family, options, layout = request.param
    checkpoint = write_transformers_checkpoint(
        tmp_path_factory.mktemp("model"), family, seed=3, num_hidden_layers=NUM_LAYERS, head_dim=HEAD_DIM, **options
    )
    prompts = random_prompts(PROMPT_LENGTHS, VOCAB_SIZE, seed=2)
    references = [reference(checkpoint, prompt, MAX_TOKENS) for prompt in prompts]
    spread = spread_settings(LIMIT, room=ROOM, block_size=BLOCK_SIZE, block_bytes=BLOCK_BYTES)
    settings = {**spread, **layout_settings(layout)}
    with running_mesh(tmp_path_factory.mktemp("mesh"), model=checkpoint, decode=4, settings=settings) as mesh:
        yield Served(mesh, references)


async def test_a_context_that_is_spread_answers_as_the_reference(served: Served) -> None:
    mesh = served.mesh
    async with mesh.client() as client:
        assert await mismatches(client, mesh.model, served.references, concurrency=1) == []
        # Layers with a window ask fewer members than others: each is asked by the decodes of half of all layers.
        num_parts = sum((length - 1) // LIMIT for length in PROMPT_LENGTHS)
        least = num_parts * (NUM_LAYERS // 2) * (MAX_TOKENS - 1)
        await until(lambda: sum(answers(mesh).values()) >= least)
        assert mesh.total("kv_prompt_parts_given_back") > 0
        assert await mismatches(client, mesh.model, served.references * 3, concurrency=8) == []
    assert mesh.total("request_restarts") == 0
    await anyio.to_thread.run_sync(mesh.wait_until_idle)


async def test_a_lost_member_costs_no_stream(served: Served) -> None:
    mesh = served.mesh
    await anyio.to_thread.run_sync(lambda: mesh.wait_until_idle(60.0))
    before, rows = answers(mesh), {str(row.instance_id): row.pid for row in mesh.status().instances}
    found: list[str] = []
    is_killed = anyio.Event()

    async def ask() -> None:
        async with mesh.client() as client:
            while not is_killed.is_set():
                found.extend(await mismatches(client, mesh.model, served.references * 3, concurrency=8))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(ask)
        await until(lambda: any(name.startswith("decode-") for name in since(before, answers(mesh))))
        member = next(name for name in since(before, answers(mesh)) if name.startswith("decode-"))
        os.kill(rows[member], signal.SIGKILL)
        is_killed.set()
    assert found == []
    await anyio.to_thread.run_sync(lambda: mesh.wait_until_idle(60.0))
