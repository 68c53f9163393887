"""Nothing leaks: after hundreds of requests, a third of them cancelled at random moments, all is as it was."""

import random
from collections.abc import Generator

import anyio
import httpx
import psutil
import pytest

from pdmesh_testing.examples import examples
from pdmesh_testing.mesh import STAND_IN, RunningMesh, running_mesh

pytestmark = [pytest.mark.anyio, pytest.mark.e2e, pytest.mark.ucx]

NUM_REQUESTS = examples(1000)
CANCELLED_SHARE = 0.3


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Generator[RunningMesh]:
    settings = {**STAND_IN, "POLICY_LONG_PROMPT_TOKENS": "300"}
    with running_mesh(tmp_path_factory.mktemp("leaks"), model=None, settings=settings) as mesh:
        yield mesh


async def one(client: httpx.AsyncClient, model: str, rng: random.Random) -> str:
    """Run one request, or stop reading it after a random share of its life; how it ended."""
    body = {
        "model": model,
        "prompt": [rng.randrange(256) for _ in range(rng.choice([1, 20, 100, 400]))],
        "max_tokens": rng.choice([1, 8, 40]),
        "ignore_eos": True,
        "stream": True,
    }
    patience = rng.choice(["never", "headers", "first"]) if rng.random() < CANCELLED_SHARE else "all"
    if patience == "never":  # gone before the answer begins: queued or prefilling
        with anyio.move_on_after(rng.random() * 0.1):
            await client.post("/v1/completions", json=body)
        return "cancelled"
    async with client.stream("POST", "/v1/completions", json=body) as response:
        assert response.status_code == 200, await response.aread()
        if patience == "headers":
            return "cancelled"
        last = ""
        async for line in response.aiter_lines():
            if line and patience == "first":  # in transfer or decoding
                return "cancelled"
            last = line or last
        assert last == "data: [DONE]"
    return "finished"


def descriptors(mesh: RunningMesh) -> dict[str, int]:
    return {name: psutil.Process(pid).num_fds() for name, pid in mesh.pids().items()}


@pytest.mark.timeout(300)
@pytest.mark.drawn
async def test_hundreds_of_requests_leave_nothing_behind(mesh: RunningMesh) -> None:
    rng = random.Random(5)
    ended: list[str] = []
    limiter = anyio.CapacityLimiter(32)

    async def run(client: httpx.AsyncClient) -> None:
        async with limiter:
            ended.append(await one(client, mesh.model, rng))

    async def wave(num_requests: int) -> None:
        async with mesh.client() as client, anyio.create_task_group() as tasks:
            for _ in range(num_requests):
                tasks.start_soon(run, client)
        await anyio.to_thread.run_sync(mesh.wait_until_idle)

    await wave(50)  # opens what stays open: streams between the services, UCX endpoints, thread pools
    before, tasks_before = descriptors(mesh), mesh.event_loop_tasks()
    await wave(NUM_REQUESTS)
    after, tasks_after = descriptors(mesh), mesh.event_loop_tasks()

    assert len(ended) == 50 + NUM_REQUESTS
    assert 0.15 < ended.count("cancelled") / len(ended) < 0.45
    assert after == before
    assert set(tasks_after) == set(mesh.pids())
    assert tasks_after == tasks_before
    for name, pid in mesh.pids().items():
        assert psutil.Process(pid).is_running(), name
    assert "Traceback" not in mesh.logs()
