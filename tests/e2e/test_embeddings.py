"""Embeddings of a mesh of real processes are transformers' last hidden states, whatever is computed beside them."""

import os
import random
import signal
from pathlib import Path

import anyio
import numpy as np
import openai
import pytest

from pdmesh_testing.checkpoints import write_checkpoint
from pdmesh_testing.mesh import running_mesh
from pdmesh_testing.reference import HfReference

pytestmark = [pytest.mark.anyio, pytest.mark.e2e, pytest.mark.ucx, pytest.mark.slow, pytest.mark.timeout(300)]


async def test_embeddings_equal_transformers_in_parts_beside_others_and_through_a_kill(tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path / "model", architecture="qwen3", pools=True, max_position_embeddings=1024)
    rng = random.Random(0)
    shared = [rng.randrange(256) for _ in range(300)]  # whose KV is used again
    inputs = [[*shared[: 150 * (number % 3)], *rng.choices(range(256), k=1 + 9 * number)] for number in range(24)]
    reference = HfReference(model)
    expected = [np.array(reference.embedding(prompt)) for prompt in inputs]
    settings = {"SCHEDULER_BUNDLE": "fcfs", "POLICY_CHUNK_TOKENS": "64", "GATEWAY_MAX_CONCURRENT_REQUESTS": "64"}
    with running_mesh(tmp_path / "mesh", model=model, prefill=2, decode=1, settings=settings) as mesh:
        url = f"http://{mesh.record.http_address}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key="-", max_retries=0) as client:

            async def generate() -> None:
                await client.completions.create(model=mesh.model, prompt=inputs[5], max_tokens=200, temperature=0)

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(generate)
                for kills in (False, True):
                    if kills:
                        os.kill(mesh.pids()["prefill-0"], signal.SIGKILL)
                    response = await client.embeddings.create(model=mesh.model, input=inputs)
                    assert response.usage.prompt_tokens == sum(map(len, inputs))
                    for each, hidden in zip(response.data, expected, strict=True):
                        right = hidden / np.linalg.norm(hidden)
                        assert np.abs(np.array(each.embedding) - right).max() < 1e-4
                        assert np.array(each.embedding) @ right > 0.9999
