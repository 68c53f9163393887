"""Contexts longer than an instance may hold, spread over several: exact, beside others, and when one of them dies."""

import os
import re
import signal
from collections.abc import Generator, Mapping
from dataclasses import dataclass

import anyio
import pytest

from pdmesh.testing.checkpoints import TINY, write_checkpoint
from pdmesh.testing.exactness import Reference, mismatches, random_prompts, reference
from pdmesh.testing.mesh import RunningMesh, running_mesh

pytestmark = [pytest.mark.anyio, pytest.mark.e2e, pytest.mark.ucx, pytest.mark.slow, pytest.mark.timeout(600)]

LIMIT = 64
#: Of one instance alone, of as much as one may hold, and of two to four.
PROMPT_LENGTHS = [5, 63, 64, 65, 100, 129, 160, 190]
MAX_TOKENS = 60


@dataclass(frozen=True)
class Served:
    mesh: RunningMesh
    references: list[Reference]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Generator[Served]:
    checkpoint = write_checkpoint(tmp_path_factory.mktemp("model"), architecture="qwen3", seed=3)
    prompts = random_prompts(PROMPT_LENGTHS, TINY.vocab_size, seed=2)
    references = [reference(checkpoint, prompt, MAX_TOKENS) for prompt in prompts]
    settings = {"WORKER_MAX_KV_TOKENS_PER_INSTANCE": str(LIMIT), "POLICY_CHUNK_TOKENS": "48"}
    with running_mesh(tmp_path_factory.mktemp("mesh"), model=checkpoint, decode=4, settings=settings) as mesh:
        yield Served(mesh, references)


def answers(mesh: RunningMesh) -> dict[str, float]:
    """How often each instance has said what it makes of its part of a context."""
    found = {
        name: re.search(r"^pdmesh:kv_part_answers_total (\S+)$", text, re.M) for name, text in mesh.metrics().items()
    }
    return {name: float(each[1]) for name, each in found.items() if each}


def since(before: Mapping[str, float], now: Mapping[str, float]) -> list[str]:
    """Those that have answered meanwhile."""
    return [name for name, number in now.items() if number > before.get(name, 0)]


async def test_a_context_that_is_spread_answers_as_the_reference(served: Served) -> None:
    mesh = served.mesh
    async with mesh.client() as client:
        assert await mismatches(client, mesh.model, served.references, concurrency=1) == []
        # Each prompt's members answer in each layer of each step but the first, whose token comes with the prompt.
        num_parts = sum((length - 1) // LIMIT for length in PROMPT_LENGTHS)
        assert sum(answers(mesh).values()) == num_parts * TINY.num_layers * (MAX_TOKENS - 1)
        assert await mismatches(client, mesh.model, served.references * 2, concurrency=8) == []
    await anyio.to_thread.run_sync(mesh.wait_until_idle)


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
        with anyio.fail_after(60):
            while not (members := since(before, answers(mesh))):  # noqa: ASYNC110  # of other processes
                await anyio.sleep(0.01)
        os.kill(rows[members[0]], number)
        if number is signal.SIGSTOP:
            await anyio.sleep(8)
            os.kill(rows[members[0]], signal.SIGCONT)
    assert found == []
    await anyio.to_thread.run_sync(lambda: mesh.wait_until_idle(60.0))
