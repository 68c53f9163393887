"""A mesh whose workers share what a fork server has loaded: they outlive it, and are replaced by it."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from pdmesh.cli.process_id import process_id, wait_for_end
from pdmesh_testing.exactness import complete
from pdmesh_testing.mesh import RunningMesh, running_mesh

pytestmark = [pytest.mark.anyio, pytest.mark.e2e, pytest.mark.ucx, pytest.mark.timeout(300)]

PROMPT, NUM_TOKENS = list(range(3, 40)), 24


def command_of(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")


def fork_servers(mesh: RunningMesh) -> set[int]:
    """Children of the supervisor that are no service."""
    supervisor = mesh.record.supervisor.pid
    children = Path(f"/proc/{supervisor}/task/{supervisor}/children").read_text().split()
    return {pid for pid in map(int, children) if "pdmesh.cli.fork_server" in command_of(pid)} - {*mesh.pids().values()}


async def test_workers_outlive_the_fork_server_and_their_successors_answer_as_they_did(tmp_path: Path) -> None:
    with running_mesh(tmp_path, model=None) as mesh:
        before = mesh.pids()
        workers = {name: pid for name, pid in before.items() if name in ("prefill-0", "decode-0")}
        assert all("pdmesh.cli.fork_server" in command_of(pid) for pid in workers.values())
        (server,) = fork_servers(mesh)
        async with mesh.client() as client:
            expected = await complete(client, mesh.model, PROMPT, NUM_TOKENS)
            identity = process_id(server)
            assert identity is not None
            os.kill(server, signal.SIGKILL)
            assert wait_for_end(identity, 60)
            assert await complete(client, mesh.model, PROMPT, NUM_TOKENS) == expected
            assert mesh.pids() == before
            for name, pid in workers.items():
                os.kill(pid, signal.SIGKILL)
                mesh.wait_until_replaced(name, pid)
                assert "pdmesh.cli.fork_server" in command_of(mesh.pids()[name]), "the next fork server forked it"
                assert await complete(client, mesh.model, PROMPT, NUM_TOKENS) == expected
        assert len(fork_servers(mesh)) == 1
        processes = [process_id(pid) for pid in (*mesh.pids().values(), *fork_servers(mesh))]
        os.kill(mesh.record.supervisor.pid, signal.SIGKILL)
        assert all(process is not None and wait_for_end(process, 60) for process in processes)
