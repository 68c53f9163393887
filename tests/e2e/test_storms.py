"""Clients that leave together hold no KV."""

import json
from collections.abc import Generator

import anyio
import pytest

from pdmesh_testing.mesh import STAND_IN, RunningMesh, running_mesh

pytestmark = [pytest.mark.anyio, pytest.mark.e2e, pytest.mark.ucx]

NUM_CLIENTS = 150  # more than an instance decodes at once (64)


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Generator[RunningMesh]:
    with running_mesh(tmp_path_factory.mktemp("storms"), model=None, settings=STAND_IN) as mesh:
        yield mesh


def body(mesh: RunningMesh, max_tokens: int) -> bytes:
    fields = {"model": mesh.model, "prompt": [40, 41, 42], "max_tokens": max_tokens, "ignore_eos": True}
    return json.dumps({**fields, "stream": True}).encode()


async def test_a_storm_of_departures_leaves_no_blocks_held(mesh: RunningMesh) -> None:
    content = body(mesh, 4000)
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: {mesh.record.http_address}\r\nContent-Length: {len(content)}\r\n\r\n"
    )
    host, _, port = mesh.record.http_address.rpartition(":")
    clients = [await anyio.connect_tcp(host, int(port)) for _ in range(NUM_CLIENTS)]
    for client in clients:
        await client.send(head.encode() + content)
    with anyio.fail_after(60):
        while (state := await mesh.state()).num_running + state.num_waiting < NUM_CLIENTS:  # noqa: ASYNC110
            await anyio.sleep(0.05)
    for client in clients:
        await anyio.aclose_forcefully(client)
    await anyio.to_thread.run_sync(mesh.wait_until_idle)
