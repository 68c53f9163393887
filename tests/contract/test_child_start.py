"""What holds for a supervisor's child, whether its command is executed or a fork server forks it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anyio
import pytest

from pdmesh.cli import forking
from pdmesh.cli.forking import ForkServer
from pdmesh.cli.process_id import ProcessId, process_id, wait_for_end
from pdmesh.cli.processes import Child, ChildSpec, start_child

DEADLINE_S = 60.0

pytestmark = pytest.mark.anyio

#: A worker that says how it was started; its instance id says how it goes on.
_MAIN = """
import json, os, signal, sys, threading

if os.path.exists(os.path.join(os.path.dirname(__file__), "threaded")):
    threading.Thread(target=signal.pause, daemon=True).start()

def main(config, preloaded=None):
    print("out")
    print("err", file=sys.stderr)
    facts = {
        "pid": os.getpid(), "parent": os.getppid(), "session": os.getsid(0),
        "environment": {name: value[:999] for name, value in os.environ.items()},
        "fds": sorted(int(fd) for fd in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{fd}")),
    }
    os.write(config.ready_fd, json.dumps(facts).encode() + b"\\n")
    if config.worker.instance_id == "exits":
        return 3
    signal.pause()
"""


@dataclass
class Starter:
    """Starts stand-ins for workers in one of the two ways."""

    folder: Path
    server: ForkServer | None = None
    said: list[str] = field(default_factory=list[str])
    has_said: anyio.Event = field(default_factory=anyio.Event)

    def say(self, text: str) -> None:
        self.said.append(text)
        self.has_said.set()

    def spec(self, name: str, **environment: str) -> ChildSpec:
        return ChildSpec(
            name=name,
            command=(sys.executable, "-m", "pdmesh_prefill"),
            environment={**_environment(self.folder), "PDMESH_WORKER_INSTANCE_ID": name, **environment},
            log_file=self.folder / f"{name}.log",
            forked_service="prefill",
        )

    @asynccontextmanager
    async def start(self, name: str, **environment: str) -> AsyncGenerator[tuple[Child, dict[str, Any]]]:
        fork = None if self.server is None else self.server.fork
        async with start_child(self.spec(name, **environment), fork) as child:
            facts = await child.ready()
            assert facts is not None
            yield child, facts


def _environment(folder: Path) -> dict[str, str]:
    return {"PYTHONPATH": str(folder), "PATH": os.environ["PATH"], "PDMESH_WORKER_ENGINE": "fake"}


def _write_packages(folder: Path) -> None:
    for name in ("prefill", "decode"):
        package = folder / f"pdmesh_{name}"
        package.mkdir()
        (package / "__init__.py").touch()
        (package / "main.py").write_text(_MAIN)
        (package / "__main__.py").write_text(
            "import sys\nfrom pdmesh.service import run_from_environment\n"
            f"sys.exit(run_from_environment({name!r}, 'pdmesh_{name}.main'))\n"
        )


def _server_spec(folder: Path) -> ChildSpec:
    return ChildSpec(
        name="fork-server",
        command=(sys.executable, "-m", "pdmesh.cli.fork_server"),
        environment=_environment(folder),
        log_file=folder / "fork-server.log",
    )


@asynccontextmanager
async def forking_starter(folder: Path) -> AsyncGenerator[Starter]:
    starter = Starter(folder)
    starter.server = ForkServer(_server_spec(folder), start_timeout_s=DEADLINE_S, say=starter.say)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(starter.server.run)
        yield starter
        tasks.cancel_scope.cancel()


@pytest.fixture(params=["executed", "forked"])
async def starter(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncGenerator[Starter]:
    _write_packages(tmp_path)
    if request.param == "executed":
        yield Starter(tmp_path)
        return
    with anyio.fail_after(DEADLINE_S):
        async with forking_starter(tmp_path) as forking_one:
            yield forking_one
            assert forking_one.said == [], "none was executed instead"


async def test_a_child_has_its_own_session_output_environment_and_no_other_descriptors(starter: Starter) -> None:
    async with starter.start("waits", PDMESH_WORKER_ROLE="mixed") as (child, facts):
        assert facts["pid"] == child.pid == facts["session"]
        assert facts["parent"] == os.getpid()
        environment = dict(facts["environment"])
        ready_fd = int(environment.pop("PDMESH_READY_FD"))
        expected = dict(starter.spec("waits", PDMESH_WORKER_ROLE="mixed").environment)
        assert {name: environment[name] for name in expected} == expected
        assert not {name for name in environment if name.startswith("PDMESH")} - set(expected)
        assert facts["fds"] == [0, 1, 2, ready_fd]
    log = (starter.folder / "waits.log").read_text().splitlines()
    assert sorted(log) == ["err", "out"] or log == ["err"], log  # one that is killed may leave output in a buffer


async def test_how_a_child_ends_is_told_to_all_that_wait(starter: Starter) -> None:
    codes: list[int] = []

    async def wait(child: Child) -> None:
        codes.append(await child.wait())

    async with starter.start("exits") as (child, _), anyio.create_task_group() as tasks:
        tasks.start_soon(wait, child)
        tasks.start_soon(wait, child)
    assert codes == [3, 3]
    assert (starter.folder / "exits.log").read_text().count("out") == 1
    async with starter.start("killed") as (child, _):
        child.send_signal(signal.SIGTERM)
        assert await child.wait() == -signal.SIGTERM
        child.send_signal(signal.SIGTERM)
        assert child.last_words() == ()


async def test_leaving_the_block_kills_and_reaps(starter: Starter) -> None:
    async with starter.start("waits") as (child, _):
        assert process_id(child.pid) is not None
    with pytest.raises(ProcessLookupError):
        os.kill(child.pid, 0)


_SUPERVISOR = """
import sys
from pathlib import Path
import anyio
sys.path.insert(0, sys.argv[3])
import test_child_start as tests

async def main():
    folder = Path(sys.argv[1])
    async with tests.forking_starter(folder) as starter:
        if sys.argv[2] == "executed":
            starter.server = None
        async with starter.start("waits") as (child, facts):
            print(child.pid, flush=True)
            await anyio.sleep_forever()

anyio.run(main)
"""


@pytest.mark.parametrize("way", ["executed", "forked"])
def test_nothing_outlives_a_supervisor_that_is_killed(tmp_path: Path, way: str) -> None:
    _write_packages(tmp_path)
    supervisor = subprocess.Popen(
        [sys.executable, "-c", _SUPERVISOR, str(tmp_path), way, str(Path(__file__).parent)], stdout=subprocess.PIPE
    )
    assert supervisor.stdout is not None
    with supervisor, supervisor.stdout:
        worker = process_id(int(supervisor.stdout.readline()))
        assert worker is not None
        children = _children(supervisor.pid)
        assert worker in children
        supervisor.kill()
    for child in children:
        assert wait_for_end(child, DEADLINE_S)


def _children(parent_pid: int) -> list[ProcessId]:
    pids = Path(f"/proc/{parent_pid}/task/{parent_pid}/children").read_text().split()
    return [found for pid in pids if (found := process_id(int(pid))) is not None]


async def test_workers_survive_the_fork_server_and_another_one_forks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forking, "RESTART_DELAY_S", 0.0)
    _write_packages(tmp_path)
    with anyio.fail_after(DEADLINE_S):
        async with forking_starter(tmp_path) as starter, starter.start("first") as (first, _):
            (server,) = [child for child in _children(os.getpid()) if child.pid != first.pid and _is_server(child)]
            os.kill(server.pid, signal.SIGKILL)
            await starter.has_said.wait()
            async with starter.start("second") as (second, _):
                assert first.pid != second.pid
                assert process_id(first.pid) is not None
    assert starter.said == ["fork-server was killed by SIGKILL; starting another one"]


def _is_server(process: ProcessId) -> bool:
    return b"fork_server" in Path(f"/proc/{process.pid}/cmdline").read_bytes()


async def test_a_fork_server_with_threads_forks_nothing(tmp_path: Path) -> None:
    """Locks that other threads hold would be held in the worker for ever."""
    _write_packages(tmp_path)
    (tmp_path / "pdmesh_prefill" / "threaded").touch()
    with anyio.fail_after(DEADLINE_S):
        async with forking_starter(tmp_path) as starter, starter.start("waits") as (child, facts):
            assert facts["parent"] == os.getpid()
            assert not _is_server(ProcessId(child.pid, 0))
    assert starter.said[0] == "fork-server cannot fork a worker: the fork server has 2 threads"


async def test_what_a_fork_server_cannot_do_is_executed(tmp_path: Path) -> None:
    _write_packages(tmp_path)
    with anyio.fail_after(DEADLINE_S):
        async with forking_starter(tmp_path) as starter:
            async with starter.start("other", OMP_NUM_THREADS="3") as (child, _):
                assert not _is_server(ProcessId(child.pid, 0)), "libraries have read the variable already"
            assert starter.said == []
            large = "x" * (120 * 1024)
            async with starter.start("large", PDMESH_SECURITY_MESH_TOKEN=large, PDMESH_MODEL=large) as (child, _):
                assert not _is_server(ProcessId(child.pid, 0))
            async with starter.start("small") as (child, _):
                assert _is_server(ProcessId(child.pid, 0))
            assert starter.said == []


async def test_without_a_fork_server_that_starts_children_are_executed(tmp_path: Path) -> None:
    _write_packages(tmp_path)
    (tmp_path / "pdmesh_decode" / "main.py").write_text("raise SystemExit(1)")
    with anyio.fail_after(DEADLINE_S):
        async with forking_starter(tmp_path) as starter, starter.start("waits") as (child, _):
            assert not _is_server(ProcessId(child.pid, 0))


async def test_the_worker_of_a_request_that_is_given_up_ends_by_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or two workers would serve under one name."""
    _write_packages(tmp_path)
    with anyio.fail_after(DEADLINE_S):
        async with forking_starter(tmp_path) as starter:
            async with starter.start("first"):
                pass

            def refuse(pid: int) -> int:
                raise OSError(24, "Too many open files")

            monkeypatch.setattr(os, "pidfd_open", refuse)
            read_fd, write_fd = os.pipe()
            with tempfile.TemporaryFile() as log:
                assert starter.server is not None
                assert await starter.server.fork(starter.spec("waits"), log, write_fd) is None
            os.close(write_fd)
            await anyio.wait_readable(read_fd)
            assert os.read(read_fd, 1) == b"", "it ended without a word"
            os.close(read_fd)
    assert "Too many open files" in starter.said[0]
