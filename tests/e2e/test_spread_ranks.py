"""Contexts spread over instances of several ranks and stages: exact, and any process of them may die."""

import os
import signal
from collections.abc import Generator
from pathlib import Path

import anyio
import pytest

from pdmesh.wire.messages import InstanceStatus
from pdmesh_testing.checkpoints import TINY, write_checkpoint
from pdmesh_testing.exactness import mismatches, random_prompts, reference
from pdmesh_testing.mesh import RunningMesh, layout_settings
from pdmesh_testing.spread_meshes import Served, answers, serving_spread, since, until, until_ended

pytestmark = [pytest.mark.anyio, pytest.mark.e2e, pytest.mark.ucx, pytest.mark.slow, pytest.mark.timeout(600)]

LIMIT = 64
PROMPT_LENGTHS = [5, 64, 100, 129, 150]
MAX_TOKENS = 40

#: Degrees of prefill and of decode, tensor x stages.
LAYOUTS = ["2x1-2x1", "1x2-2x1", "2x2-1x2"]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("model"), architecture="qwen3", seed=3)


@pytest.fixture(scope="module", params=LAYOUTS)
def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, checkpoint: Path
) -> Generator[Served]:
    folder, settings = tmp_path_factory.mktemp("mesh"), layout_settings(request.param)
    with serving_spread(folder, checkpoint, LIMIT, PROMPT_LENGTHS, MAX_TOKENS, decode=3, settings=settings) as served:
        yield served


async def instances(mesh: RunningMesh) -> dict[str, InstanceStatus]:
    return {str(row.instance_id): row for row in (await mesh.state()).instances}


async def test_contexts_over_instances_of_ranks_answer_as_the_reference(served: Served) -> None:
    mesh = served.mesh
    async with mesh.client() as client:
        assert await mismatches(client, mesh.model, served.references, concurrency=1) == []
        num_parts = sum((length - 1) // LIMIT for length in PROMPT_LENGTHS)
        least = num_parts * TINY.num_layers * (MAX_TOKENS - 1)
        await until(lambda: sum(answers(mesh).values()) >= least)  # the last one is counted once it has left
        assert await mismatches(client, mesh.model, served.references * 2, concurrency=8) == []
    await anyio.to_thread.run_sync(lambda: mesh.wait_until_idle(60.0))
    assert mesh.total("request_restarts") == 0


async def test_a_context_that_grows_at_ranks_is_spread_then(served: Served, checkpoint: Path) -> None:
    """What the home gives back, all of its ranks forget; another context has these blocks soon."""
    mesh = served.mesh
    prompts = random_prompts([5, 40, 70], TINY.vocab_size, seed=5)
    references = [reference(checkpoint, prompt, 3 * LIMIT - len(prompt)) for prompt in prompts]
    num_moved = mesh.total("kv_part_moves")
    async with mesh.client() as client:
        assert await mismatches(client, mesh.model, references * 2, concurrency=6) == []
    await anyio.to_thread.run_sync(lambda: mesh.wait_until_idle(60.0))
    assert mesh.total("kv_part_moves") > num_moved
    assert mesh.total("request_restarts") == 0


@pytest.mark.parametrize("lost", ["member", "rank of a member", "rank of a home"])
async def test_a_lost_process_costs_no_stream(served: Served, checkpoint: Path, lost: str) -> None:
    """All of its instance ends with it, and another takes its place."""
    mesh = served.mesh
    await anyio.to_thread.run_sync(lambda: mesh.wait_until_idle(60.0))
    prompts = random_prompts([LIMIT + 2, 2 * LIMIT - 40], TINY.vocab_size, seed=8)  # all are spread
    references = [reference(checkpoint, prompt, 30) for prompt in prompts]
    before = answers(mesh)
    is_killed = anyio.Event()
    found: list[str] = []
    name, pids = "", tuple[int, ...]()

    async def ask() -> None:
        async with mesh.client() as client:
            while not is_killed.is_set():
                found.extend(await mismatches(client, mesh.model, references * 4, concurrency=8))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(ask)
        await until(lambda: bool(since(before, answers(mesh))))
        name = since(before, answers(mesh))[0]
        if lost == "rank of a home":
            with anyio.fail_after(60):
                while not (homes := [key for key, row in (await instances(mesh)).items() if row.num_decoding]):
                    pass
            name = homes[0]
        pids = (await instances(mesh))[name].rank_pids
        os.kill(pids[0 if lost == "member" else -1], signal.SIGKILL)
        await until_ended(pids, 30.0)
        is_killed.set()
    assert found == []
    await anyio.to_thread.run_sync(lambda: mesh.wait_until_replaced(name, pids[0]))
    await anyio.to_thread.run_sync(lambda: mesh.wait_until_idle(60.0))
