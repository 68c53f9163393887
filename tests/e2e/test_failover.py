"""Every process but the gateway may be killed at any moment: streams go on, and say what they would have said."""

import os
import signal
from collections.abc import Generator
from dataclasses import dataclass

import anyio
import pytest

from pdmesh.model import Role
from pdmesh_testing.checkpoints import TINY, write_checkpoint
from pdmesh_testing.exactness import Reference, complete, random_prompts, reference, streamed_while
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


@pytest.mark.parametrize("victim", ["decode-0", "prefill-0", "scheduler"])
async def test_streams_survive_a_killed_process_token_for_token(served: Served, victim: str) -> None:
    mesh = served.mesh
    pid = mesh.pids()[victim]
    async with mesh.client() as client:
        with anyio.fail_after(120):
            # Streams that have not begun may still be queued, prefilling or in transfer.
            got = await streamed_while(
                client, mesh.model, served.references, lambda: os.kill(pid, signal.SIGKILL), num_begun=NUM_STREAMS // 2
            )
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

    def kill_decoders() -> None:
        os.kill(supervisor, signal.SIGSTOP)
        for pid in victims.values():
            os.kill(pid, signal.SIGKILL)

    async with mesh.client() as client:
        with anyio.fail_after(120):
            try:
                got = await streamed_while(
                    client, mesh.model, served.references, kill_decoders, num_begun=NUM_STREAMS // 2
                )
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
