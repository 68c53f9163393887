"""Every process but the gateway may be killed at any moment: streams go on, and say what they would have said."""

import json
import os
import signal
from collections.abc import Generator
from dataclasses import dataclass

import anyio
import httpx
import pytest

from pdmesh.model import Role
from pdmesh_testing.checkpoints import TINY, write_checkpoint
from pdmesh_testing.exactness import Reference, complete, random_prompts, reference
from pdmesh_testing.mesh import RunningMesh, running_mesh

pytestmark = [pytest.mark.anyio, pytest.mark.e2e, pytest.mark.ucx, pytest.mark.timeout(300)]

NUM_STREAMS = 6
MAX_TOKENS = 240


@dataclass(frozen=True)
class Served:
    mesh: RunningMesh
    references: list[Reference]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Generator[Served]:
    folder = tmp_path_factory.mktemp("failover")
    checkpoint = write_checkpoint(folder / "model", seed=3)
    prompts = random_prompts([30 + 17 * i for i in range(NUM_STREAMS)], TINY.vocab_size, seed=2)
    references = [reference(checkpoint, prompt, MAX_TOKENS) for prompt in prompts]
    with running_mesh(folder, model=checkpoint, prefill=1, decode=2) as mesh:
        yield Served(mesh, references)


async def stream(client: httpx.AsyncClient, model: str, expected: Reference, begun: anyio.Event) -> list[int]:
    """Token ids of a streamed greedy completion; ``begun`` is set with the first of them."""
    body = {
        "model": model,
        "prompt": list(expected.prompt),
        "max_tokens": len(expected.token_ids),
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
        "stream": True,
    }
    token_ids: list[int] = []
    last = ""
    async with client.stream("POST", "/v1/completions", json=body) as response:
        assert response.status_code == 200, await response.aread()
        async for line in response.aiter_lines():
            last = line or last
            if not line.startswith("data: {"):
                continue
            event = json.loads(line.removeprefix("data: "))
            assert "error" not in event, event
            for choice in event["choices"]:
                token_ids += choice["token_ids"]
            begun.set()
    assert last == "data: [DONE]"
    return token_ids


@pytest.mark.parametrize("victim", ["decode-0", "prefill-0", "scheduler"])
async def test_streams_survive_a_killed_process_token_for_token(served: Served, victim: str) -> None:
    mesh = served.mesh
    pid = mesh.pids()[victim]
    got: dict[int, list[int]] = {}
    begun = [anyio.Event() for _ in served.references]

    async def run(client: httpx.AsyncClient, index: int) -> None:
        got[index] = await stream(client, mesh.model, served.references[index], begun[index])

    async with mesh.client() as client:
        with anyio.fail_after(120):
            async with anyio.create_task_group() as tasks:
                for index in range(NUM_STREAMS):
                    tasks.start_soon(run, client, index)
                for event in begun[: NUM_STREAMS // 2]:  # the others may still be queued, prefilling or in transfer
                    await event.wait()
                os.kill(pid, signal.SIGKILL)
            for index, expected in enumerate(served.references):
                assert got[index] == list(expected.token_ids), f"stream {index}"
            # The supervisor starts the process again, and the mesh serves new requests.
            short = served.references[0]
            answer = await complete(client, mesh.model, short.prompt, 8)
            assert answer.token_ids == short.token_ids[:8]
    await anyio.to_thread.run_sync(mesh.wait_until_idle, 30.0)
    await anyio.to_thread.run_sync(mesh.wait_until_replaced, victim, pid)


async def test_streams_go_on_without_any_decode_instance_token_for_token(served: Served) -> None:
    """The prefill instance decodes them. No successor starts, for the supervisor is stopped meanwhile."""
    mesh, supervisor = served.mesh, served.mesh.record.supervisor.pid
    victims = {name: pid for name, pid in mesh.pids().items() if name.startswith("decode")}
    got: dict[int, list[int]] = {}
    begun = [anyio.Event() for _ in served.references]

    async def run(client: httpx.AsyncClient, index: int) -> None:
        got[index] = await stream(client, mesh.model, served.references[index], begun[index])

    async with mesh.client() as client:
        with anyio.fail_after(120):
            try:
                async with anyio.create_task_group() as tasks:
                    for index in range(NUM_STREAMS):
                        tasks.start_soon(run, client, index)
                    for event in begun[: NUM_STREAMS // 2]:
                        await event.wait()
                    os.kill(supervisor, signal.SIGSTOP)
                    for pid in victims.values():
                        os.kill(pid, signal.SIGKILL)
                for index, expected in enumerate(served.references):
                    assert got[index] == list(expected.token_ids), f"stream {index}"
                new = served.references[0]
                answer = await complete(client, mesh.model, new.prompt, 8)
                assert answer.token_ids == new.token_ids[:8]
                assert [row.role for row in (await mesh.state()).instances] == [Role.PREFILL]
            finally:
                os.kill(supervisor, signal.SIGCONT)
    for name, pid in victims.items():
        await anyio.to_thread.run_sync(mesh.wait_until_replaced, name, pid)
    await anyio.to_thread.run_sync(mesh.wait_until_idle, 30.0)
