"""`pdmesh policy set` changes how a decode instance computes prompts beside a prefill instance."""

from collections.abc import Generator, Mapping

import anyio
import httpx
import pytest

from pdmesh.config import SecurityConfig
from pdmesh.wire.admin import ask_scheduler
from pdmesh.wire.messages import GetRequest, RequestRecord
from pdmesh_testing.mesh import STAND_IN, RunningMesh, running_mesh

pytestmark = [pytest.mark.anyio, pytest.mark.e2e, pytest.mark.timeout(300)]

#: Steps of prompts are so long that the decode instance computes some itself, and no prompt is kept for the next one.
SLOW_PROMPTS = {
    "WORKER_FAKE_LATENCY": "a_s=0.01,b_s=2e-4,decode_a_s=0.005,decode_s=1e-4",
    "GATEWAY_PREFIX_REUSE": "off",
}

NUM_REQUESTS = 32
NUM_PROMPT_TOKENS = 200


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Generator[RunningMesh]:
    folder = tmp_path_factory.mktemp("modes")
    with running_mesh(folder, model=None, settings={**STAND_IN, **SLOW_PROMPTS}) as mesh:
        yield mesh


async def ask(client: httpx.AsyncClient, index: int, label: str) -> list[int]:
    body = {
        "prompt": [1 + (index + token) % 97 for token in range(NUM_PROMPT_TOKENS)],
        "max_tokens": 40,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    response = await client.post("/v1/completions", json=body, headers={"x-request-id": label}, timeout=120)
    assert response.status_code == 200, response.text
    return list(response.json()["choices"][0]["token_ids"])


async def ask_at_once(client: httpx.AsyncClient, name: str) -> dict[int, list[int]]:
    """Ask for all requests at once, more than the prefill instance computes in time."""
    got: dict[int, list[int]] = {}

    async def run(index: int) -> None:
        got[index] = await ask(client, index, f"{name}-{index}")

    async with anyio.create_task_group() as tasks:
        for index in range(NUM_REQUESTS):
            tasks.start_soon(run, index)
    return got


async def steps_of_decode_instance(mesh: RunningMesh, name: str) -> Mapping[str, int]:
    """Count the steps in which the decode instance computed the prompts of these requests, by their kind."""
    counted = {"mixed": 0, "exclusive": 0, "alone": 0}
    security = SecurityConfig(mesh_token=mesh.record.mesh_token)
    for index in range(NUM_REQUESTS):
        question = GetRequest(request_id=f"{name}-{index}")
        record = await ask_scheduler(mesh.record.scheduler_address, security, question)
        assert isinstance(record, RequestRecord)
        for entry in record.entries:
            if entry.instance_id == "decode-0" and "chunk" in entry.what:
                kind = next((kind for kind in counted if f"({kind} batching)" in entry.detail), "alone")
                counted[kind] += 1
    return counted


async def test_the_operator_chooses_how_the_decode_instance_computes_prompts(mesh: RunningMesh) -> None:
    async with mesh.client() as client:
        alone = {index: await ask(client, index, f"alone-{index}") for index in range(NUM_REQUESTS)}
        for name, mode, other in (("first", "mb", "exclusive"), ("then", "eb", "mixed"), ("last", "mb", "exclusive")):
            await anyio.to_thread.run_sync(mesh.pdmesh, "policy", "set", mode)
            assert await ask_at_once(client, name) == alone, mode
            steps = await steps_of_decode_instance(mesh, name)
            assert steps[other] == 0, steps
            assert steps["mixed" if mode == "mb" else "exclusive"] > 0, steps
    text = mesh.pdmesh("status")
    assert "prefill-0  batching fixed" in text
    assert "decode-0  batching mb" in text
