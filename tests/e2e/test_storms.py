"""Clients that leave together hold no KV, and a stream that is much longer than most comes whole."""

import json
from collections.abc import Generator

import anyio
import pytest

from pdmesh.testing.mesh import STAND_IN, RunningMesh, running_mesh

pytestmark = [pytest.mark.anyio, pytest.mark.e2e, pytest.mark.ucx]

NUM_CLIENTS = 150  # more than an instance decodes at once: some leave while they wait
NUM_LONG_TOKENS = 8000


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Generator[RunningMesh]:
    with running_mesh(tmp_path_factory.mktemp("storms"), model=None, settings=STAND_IN) as mesh:
        yield mesh


def body(mesh: RunningMesh, max_tokens: int) -> bytes:
    fields = {"model": mesh.model, "prompt": [40, 41, 42], "max_tokens": max_tokens, "ignore_eos": True}
    return json.dumps({**fields, "stream": True, "return_token_ids": True}).encode()


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
    assert state.num_waiting > 0
    for client in clients:
        await anyio.aclose_forcefully(client)
    await anyio.to_thread.run_sync(mesh.wait_until_idle)


@pytest.mark.timeout(180)
async def test_a_long_stream_comes_whole(mesh: RunningMesh) -> None:
    token_ids: list[int] = []
    async with (
        mesh.client() as client,
        client.stream("POST", "/v1/completions", content=body(mesh, NUM_LONG_TOKENS)) as response,
    ):
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                for choice in json.loads(line.removeprefix("data: "))["choices"]:
                    token_ids += choice["token_ids"]
    assert len(token_ids) == NUM_LONG_TOKENS
    async with mesh.client() as client:
        content = json.loads(body(mesh, 10)) | {
            "stream": False,
            "prompt": [40, 41, 42, *token_ids[: NUM_LONG_TOKENS - 10]],
        }
        answer = (await client.post("/v1/completions", json=content)).raise_for_status().json()
    assert answer["choices"][0]["token_ids"] == token_ids[-10:]
