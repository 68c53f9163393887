"""Contexts longer than an instance may hold, spread over several: exact, beside others, and when one of them dies."""

import os
import signal
import subprocess
from collections.abc import Generator
from pathlib import Path

import anyio
import pytest

from pdmesh_testing.checkpoints import TINY, write_checkpoint
from pdmesh_testing.exactness import mismatches, random_prompts, reference
from pdmesh_testing.mesh import RunningMesh
from pdmesh_testing.spread_meshes import Served, answers, recomputed, serving_spread, since, until

pytestmark = [pytest.mark.anyio, pytest.mark.e2e, pytest.mark.ucx, pytest.mark.slow, pytest.mark.timeout(600)]

LIMIT = 64
#: Of one instance alone, of as much as one may hold, and of two to four.
PROMPT_LENGTHS = [5, 63, 64, 65, 100, 129, 160, 190]
MAX_TOKENS = 60


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("model"), architecture="qwen3", seed=3)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, checkpoint: Path) -> Generator[Served]:
    folder = tmp_path_factory.mktemp("mesh")
    with serving_spread(folder, checkpoint, LIMIT, PROMPT_LENGTHS, MAX_TOKENS, decode=4) as served:
        yield served


async def test_a_context_that_is_spread_answers_as_the_reference(served: Served) -> None:
    mesh = served.mesh
    async with mesh.client() as client:
        assert await mismatches(client, mesh.model, served.references, concurrency=1) == []
        # Each prompt's members answer in each layer of each step but the first, whose token comes with the prompt.
        num_parts = sum((length - 1) // LIMIT for length in PROMPT_LENGTHS)
        least = num_parts * TINY.num_layers * (MAX_TOKENS - 1)
        await until(lambda: sum(answers(mesh).values()) >= least)  # the last one is counted once it has left
        num_answers = sum(answers(mesh).values())
        # And a range more once one is full where a context decodes, which takes a while.
        most_parts = sum((length + drawn - 1) // LIMIT for length in PROMPT_LENGTHS for drawn in range(1, MAX_TOKENS))
        assert num_answers <= most_parts * TINY.num_layers
        assert await mismatches(client, mesh.model, served.references * 2, concurrency=8) == []
    await anyio.to_thread.run_sync(mesh.wait_until_idle)


async def test_what_a_context_draws_is_spread_too(served: Served, checkpoint: Path) -> None:
    """The first is in one instance as it begins, and over four at the end, three of which hold a range each."""
    mesh = served.mesh
    prompts = random_prompts([5, 40, 70], TINY.vocab_size, seed=5)
    references = [reference(checkpoint, prompt, 4 * LIMIT - len(prompt)) for prompt in prompts]
    async with mesh.client() as client:
        found: tuple[float, int] = (0.0, 0)
        for _ in range(5):  # on a busy machine it may end before the last range has moved
            before, num_moved = answers(mesh), mesh.total("kv_part_moves")
            assert await mismatches(client, mesh.model, references[:1], concurrency=1) == []
            found = mesh.total("kv_part_moves") - num_moved, len(since(before, answers(mesh)))
            if found == (3, 3):
                break
        assert found == (3, 3)
        assert await mismatches(client, mesh.model, references * 2, concurrency=6) == []
    await anyio.to_thread.run_sync(mesh.wait_until_idle)
    assert mesh.total("request_restarts") == 0


async def test_an_instance_that_stops_hands_its_ranges_to_others(served: Served, checkpoint: Path) -> None:
    mesh = served.mesh
    (prompt,) = random_prompts([2 * LIMIT + 2], TINY.vocab_size, seed=6)
    expected = reference(checkpoint, prompt, 3 * LIMIT - len(prompt))  # and does not grow
    num_moved = mesh.total("kv_part_moves")
    found: list[str] = []
    is_done = anyio.Event()

    async def ask() -> None:
        async with mesh.client() as client:
            while not is_done.is_set():
                found.extend(await mismatches(client, mesh.model, [expected] * 8, concurrency=8))

    async def stop_a_member() -> None:
        before = answers(mesh)
        await until(lambda: bool(since(before, answers(mesh))))
        name, *_ = since(before, answers(mesh))
        pid = mesh.pids()[name]
        os.kill(pid, signal.SIGTERM)
        await anyio.to_thread.run_sync(lambda: mesh.wait_until_replaced(name, pid))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(ask)
        tasks.start_soon(ask)  # so that some decode while others come to their end
        for _ in range(4):  # on a busy machine one holds nothing any more by the time that it is told to stop
            await stop_a_member()
            if mesh.total("kv_part_moves") > num_moved:
                break
        is_done.set()
    assert found == []
    assert mesh.total("kv_part_moves") > num_moved
    assert mesh.total("request_restarts") == 0
    await anyio.to_thread.run_sync(lambda: mesh.wait_until_idle(60.0))


def num_resumed(mesh: RunningMesh) -> int:
    """How many requests its gateway has resumed after a loss."""
    return mesh.logs().count('"event": "resuming"')


async def until_all_decode(mesh: RunningMesh, num_requests: int) -> None:
    """Wait until so many requests decode or more, and no other has begun: a prompt is given up with its scheduler."""
    with anyio.fail_after(60):
        while True:
            state = await mesh.state()
            num_decoding = sum(each.num_decoding for each in state.instances)
            if num_decoding >= num_requests and num_decoding == state.num_running + state.num_waiting:
                return


def is_served_again(mesh: RunningMesh, scheduler_pid: int) -> bool:
    """Whether another scheduler answers."""
    if mesh.pids().get("scheduler", scheduler_pid) == scheduler_pid:
        return False
    try:
        return mesh.status().num_waiting >= 0
    except subprocess.CalledProcessError:
        return False  # not yet


async def test_contexts_outlive_a_scheduler_and_leave_each_instance_that_is_restarted(
    served: Served, checkpoint: Path
) -> None:
    """Homes go on elsewhere with their members, members' ranges too, and another scheduler finds them all."""
    mesh = served.mesh
    prompts = random_prompts([70, 130], TINY.vocab_size, seed=7)
    references = [reference(checkpoint, prompt, 3 * LIMIT - len(prompt)) for prompt in prompts]
    before, pids = answers(mesh), mesh.pids()
    decoding = [name for name in pids if name.startswith("decode-")]
    num_resumed_before = num_resumed(mesh)
    found: list[str] = []
    is_done = anyio.Event()

    async def ask() -> None:
        async with mesh.client() as client:
            while not is_done.is_set():
                found.extend(await mismatches(client, mesh.model, references * 4, concurrency=8))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(ask)
        await until(lambda: bool(since(before, answers(mesh))))
        await until_all_decode(mesh, 4)
        os.kill(pids["scheduler"], signal.SIGKILL)
        await until(lambda: is_served_again(mesh, pids["scheduler"]))
        for name in decoding:
            # On a busy machine moves take longer than the default lets them, and what is left is begun again then.
            await anyio.to_thread.run_sync(mesh.pdmesh, "restart", name, "--timeout", "240")
        is_done.set()
    assert found == []
    assert mesh.total("kv_part_moves") > 0
    # Of what had begun: a request that was on its way to the scheduler that died is sent to the next one.
    assert num_resumed(mesh) == num_resumed_before
    await anyio.to_thread.run_sync(lambda: mesh.wait_until_idle(60.0))


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_lost_member_costs_no_stream(served: Served, number: signal.Signals) -> None:
    mesh = served.mesh
    found: list[str] = []
    await anyio.to_thread.run_sync(lambda: mesh.wait_until_idle(60.0))
    rows = {str(row.instance_id): row.pid for row in mesh.status().instances}

    async def ask() -> None:
        async with mesh.client() as client:
            found.extend(await mismatches(client, mesh.model, served.references * 2, concurrency=8))

    before = answers(mesh)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(ask)
        await until(lambda: bool(since(before, answers(mesh))))
        members = since(before, answers(mesh))
        os.kill(rows[members[0]], number)
        if number is signal.SIGSTOP:
            await anyio.sleep(8)
            os.kill(rows[members[0]], signal.SIGCONT)
    assert found == []
    await anyio.to_thread.run_sync(lambda: mesh.wait_until_idle(60.0))


async def test_a_lost_member_costs_its_part_only(served: Served, checkpoint: Path) -> None:
    """Another instance computes its range again, from tokens and the ranges before it, and nothing else is computed."""
    mesh = served.mesh
    (prompt,) = random_prompts([2 * LIMIT + 2], TINY.vocab_size, seed=8)
    expected = reference(checkpoint, prompt, LIMIT - 2)
    found: list[str] = []

    async def ask(is_killed: anyio.Event) -> None:
        async with mesh.client() as client:
            while not is_killed.is_set():
                found.extend(await mismatches(client, mesh.model, [expected] * 24, concurrency=8))

    async def lose_a_member() -> float:
        """Tokens that were computed again."""
        await anyio.to_thread.run_sync(lambda: mesh.wait_until_idle(60.0))
        before, pids, is_killed, name = answers(mesh), mesh.pids(), anyio.Event(), ""
        computed_before = recomputed(mesh)

        def busy_members() -> list[str]:
            """Those that have answered in ten steps: by then it is known where these contexts decode."""
            num_answers = 10 * TINY.num_layers
            return [name for name, number in answers(mesh).items() if number - before.get(name, number) >= num_answers]

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ask, is_killed)
            await until(lambda: bool(busy_members()))
            name, *_ = busy_members()
            os.kill(pids[name], signal.SIGKILL)
            is_killed.set()
        await anyio.to_thread.run_sync(lambda: mesh.wait_until_replaced(name, pids[name]))
        computed_before[name] = 0  # another process counts anew
        return sum(number - computed_before.get(each, 0) for each, number in recomputed(mesh).items())

    num_again = 0.0
    for _ in range(4):  # on a busy machine it may hold no range of a context that decodes by the time that it is killed
        num_again = num_again or await lose_a_member()
    assert found == []
    assert num_again > 0
    assert num_again % LIMIT == 0, "whole ranges"
    await anyio.to_thread.run_sync(lambda: mesh.wait_until_idle(60.0))
