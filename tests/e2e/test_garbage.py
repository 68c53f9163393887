"""Garbage on every listening port of every process disturbs nobody."""

import random
import socket
from collections.abc import Generator

import anyio
import psutil
import pytest

from pdmesh_testing.exactness import complete
from pdmesh_testing.mesh import STAND_IN, RunningMesh, running_mesh

pytestmark = [pytest.mark.anyio, pytest.mark.e2e, pytest.mark.ucx, pytest.mark.timeout(300)]


@pytest.fixture
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Generator[RunningMesh]:
    with running_mesh(tmp_path_factory.mktemp("garbage"), model=None, settings=STAND_IN) as mesh:
        yield mesh


LOOPBACK = {"127.0.0.1", "::1", "::ffff:127.0.0.1"}


def listening(pid: int) -> list[tuple[str, int]]:
    return [
        (connection.laddr.ip, connection.laddr.port)
        for connection in psutil.Process(pid).net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN
    ]


def throw(address: tuple[str, int], garbage: bytes) -> None:
    with socket.create_connection(address, timeout=5) as connection:
        try:
            connection.sendall(garbage)
            connection.shutdown(socket.SHUT_WR)
        except (ConnectionResetError, BrokenPipeError, OSError):
            return  # it hung up on us


async def test_a_stream_under_way_goes_on_while_garbage_arrives_everywhere(mesh: RunningMesh) -> None:
    rng = random.Random(1)
    targets = {name: listening(pid) for name, pid in mesh.pids().items()}
    assert {name.split("-")[0] for name, ports in targets.items() if ports} == {
        "gateway",
        "scheduler",
        "prefill",
        "decode",
    }
    exposed = {name: [host for host, _ in ports if host not in LOOPBACK] for name, ports in targets.items()}
    assert not any(exposed.values()), exposed
    prompt = [1, 2, 3]
    async with mesh.client() as client:
        expected = await complete(client, mesh.model, prompt, 200)
        got = []

        async def ask() -> None:
            got.append(await complete(client, mesh.model, prompt, 200))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ask)
            for ports in targets.values():
                for host, port in ports:
                    address = (host, port)
                    for garbage in (rng.randbytes(4096), b"\0" * 64, b"GET / HTTP/1.1\r\n" + b"x" * 70_000):
                        await anyio.to_thread.run_sync(throw, address, garbage)
        assert got == [expected]
        assert await complete(client, mesh.model, prompt, 200) == expected
    assert all(psutil.pid_exists(pid) for pid in mesh.pids().values())
