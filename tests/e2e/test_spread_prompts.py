"""Prompts longer than the whole room of the instance that computes them: exact, beside others, and when one dies."""

from __future__ import annotations

import os
import signal
from collections.abc import Generator
from dataclasses import dataclass
from functools import partial

import anyio
import httpx
import pytest

from pdmesh_testing.checkpoints import TINY, write_checkpoint
from pdmesh_testing.exactness import Reference, mismatches, random_prompts, reference
from pdmesh_testing.mesh import RunningMesh, layout_settings, running_mesh
from pdmesh_testing.spread_meshes import answers, since, spread_settings, until

pytestmark = [pytest.mark.anyio, pytest.mark.e2e, pytest.mark.ucx, pytest.mark.slow, pytest.mark.timeout(600)]

LIMIT, BLOCK_SIZE = 64, 16
#: Each instance has room for so many tokens, and a prompt that it does not hold whole for half of that.
ROOM = 2 * LIMIT + 32
BLOCK_BYTES = 2 * TINY.num_layers * TINY.num_kv_heads * TINY.head_dim * 4 * BLOCK_SIZE
#: Two that are held whole, and those that are not: with their output four instances hold them.
SHORT, LONG = [5, 100], [161, 200, 230, 249]
MAX_TOKENS = 7

#: Degrees of prefill and of decode, tensor x stages.
LAYOUTS = ["1x1-1x1", "1x2-2x1", "2x1-1x1"]


@dataclass(frozen=True)
class Served:
    mesh: RunningMesh
    short: list[Reference]
    long: list[Reference]


@pytest.fixture(scope="module", params=LAYOUTS)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Generator[Served]:
    checkpoint = write_checkpoint(tmp_path_factory.mktemp("model"), architecture="qwen3", seed=3)
    prompts = random_prompts([*SHORT, *LONG, LONG[-1]], TINY.vocab_size, seed=2)
    max_tokens = [MAX_TOKENS] * (len(prompts) - 1) + [1]  # the last one ends with its prompt
    references = [reference(checkpoint, *each) for each in zip(prompts, max_tokens, strict=True)]
    spread = spread_settings(LIMIT, room=ROOM, block_size=BLOCK_SIZE, block_bytes=BLOCK_BYTES)
    settings = {**spread, **layout_settings(request.param)}
    with running_mesh(tmp_path_factory.mktemp("mesh"), model=checkpoint, decode=4, settings=settings) as mesh:
        yield Served(mesh, references[: len(SHORT)], references[len(SHORT) :])


def num_given_back(mesh: RunningMesh) -> float:
    """Ranges that were given back while their prompts were computed; 0 while a service does not answer."""
    try:
        return mesh.total("kv_prompt_parts_given_back")
    except httpx.HTTPError:
        return 0.0


def gives_back_more(mesh: RunningMesh, before: float) -> bool:
    return num_given_back(mesh) > before


async def test_a_prompt_longer_than_the_room_answers_as_the_reference(served: Served) -> None:
    mesh = served.mesh
    async with mesh.client() as client:
        assert await mismatches(client, mesh.model, served.short, concurrency=1) == []
        assert num_given_back(mesh) == 0
        for expected in served.long:
            before = num_given_back(mesh)
            assert await mismatches(client, mesh.model, [expected], concurrency=1) == []
            # What is held at once is left at the end, and less than a range of it may be.
            least = (len(expected.prompt) - ROOM // 2) // LIMIT
            assert num_given_back(mesh) - before >= least > 0
        assert await mismatches(client, mesh.model, [*served.short, *served.long] * 3, concurrency=8) == []
    assert mesh.total("request_restarts") == 0
    await anyio.to_thread.run_sync(mesh.wait_until_idle)


async def test_a_client_that_leaves_meanwhile_leaves_nothing(served: Served) -> None:
    mesh = served.mesh
    async with mesh.client() as client:
        for number in range(6):
            before = num_given_back(mesh)
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(mismatches_of, client, mesh, served.long[number % len(served.long)])
                await until(partial(gives_back_more, mesh, before))
                tasks.cancel_scope.cancel()
        await anyio.to_thread.run_sync(lambda: mesh.wait_until_idle(60.0))
        assert await mismatches(client, mesh.model, served.long, concurrency=4) == []


async def mismatches_of(client: httpx.AsyncClient, mesh: RunningMesh, expected: Reference) -> None:
    await mismatches(client, mesh.model, [expected], concurrency=1)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("whom", ["member", "prefill"])
async def test_an_instance_that_is_lost_meanwhile_costs_no_stream(
    served: Served, number: signal.Signals, whom: str
) -> None:
    mesh = served.mesh
    found: list[str] = []
    await anyio.to_thread.run_sync(lambda: mesh.wait_until_idle(60.0))
    before, before_answers = num_given_back(mesh), answers(mesh)
    rows = {str(row.instance_id): row.pid for row in mesh.status().instances}
    name = next(each for each in rows if each.startswith("prefill"))
    is_lost = anyio.Event()

    async def ask() -> None:
        async with mesh.client() as client:
            while not is_lost.is_set():
                found.extend(await mismatches(client, mesh.model, [*served.long, *served.short] * 2, concurrency=6))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(ask)
        await until(partial(gives_back_more, mesh, before))
        if whom == "member":
            name = since(before_answers, answers(mesh))[0]
        os.kill(rows[name], number)
        if number is signal.SIGSTOP:
            await anyio.sleep(8)
            os.kill(rows[name], signal.SIGCONT)
        is_lost.set()
    assert found == []
    if number is signal.SIGKILL:
        await anyio.to_thread.run_sync(lambda: mesh.wait_until_replaced(name, rows[name]))
    await anyio.to_thread.run_sync(lambda: mesh.wait_until_idle(60.0))
