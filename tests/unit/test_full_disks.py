"""What is written on the side - event log, logs, a mesh's record - never ends who writes it, and stays bounded."""

from __future__ import annotations

import errno
import os
import random
import resource
import stat
from pathlib import Path

import anyio
import pytest
import structlog

from pdmesh.cli.state_folder import StateFolder
from pdmesh.config import TelemetryConfig
from pdmesh.core.config import CoreConfig
from pdmesh.core.events import GatewayJoined
from pdmesh.errors import ConfigError
from pdmesh.eventlog import EventLogReader, EventLogWriter, Header
from pdmesh.rotation import cut_off, set_aside
from pdmesh.service import MAX_DESCRIPTORS, raise_descriptor_limit
from pdmesh.telemetry.log_lines import UnfailingStream, configure_logging
from pdmesh_testing.core import GATEWAY
from pdmesh_testing.disks import full_beyond

HEADER = Header(seed=1, bundle="fcfs", config=CoreConfig(), started_at=1.7e9, started_s=0.0)
EVENT = GatewayJoined(GATEWAY, ())


def times_s(path: Path) -> list[float]:
    with EventLogReader(path) as log:
        return [entry.now_s for entry in log]


# --- the event log ---


@pytest.mark.anyio
async def test_a_full_disk_ends_the_event_log_and_leaves_it_whole(tmp_path: Path) -> None:
    path = tmp_path / "events.log"
    rng = random.Random(5)
    with full_beyond(4096), EventLogWriter(path, HEADER) as log:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(log.run)  # a task that fails would end the scheduler
            for n in range(1000):
                log.record(float(n), EVENT)
                if rng.random() < 0.1:
                    await anyio.wait_all_tasks_blocked()
            tasks.cancel_scope.cancel()
    written = times_s(path)
    assert 0 < len(written) < 1000
    assert written == [float(n) for n in range(len(written))]


def test_a_disk_that_is_full_at_the_start_leaves_no_log_and_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_room(*arguments: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("pdmesh.eventlog.os.open", no_room)
    with EventLogWriter(tmp_path / "events.log", HEADER) as log:
        log.record(1.0, EVENT)
    assert list(tmp_path.iterdir()) == []


def test_a_path_that_can_be_no_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="file"):
        EventLogWriter(tmp_path / "file" / "events.log", HEADER)


def test_an_event_log_ends_at_its_limit(tmp_path: Path) -> None:
    path = tmp_path / "events.log"
    with EventLogWriter(path, HEADER, max_bytes=5000) as log:
        for n in range(1000):
            log.record(float(n), EVENT)
    assert path.stat().st_size <= 5000
    written = times_s(path)
    assert 0 < len(written) < 1000
    assert written == [float(n) for n in range(len(written))]


def test_event_logs_are_private_and_only_so_many_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "logs" / "events.log"
    for n in range(5):
        with EventLogWriter(path, HEADER, keep=2) as log:
            log.record(float(n), EVENT)
    assert {kept.name: times_s(kept) for kept in path.parent.iterdir()} == {
        "events.log": [4.0],
        "events.log.1": [3.0],
        "events.log.2": [2.0],
    }
    assert {stat.S_IMODE(kept.stat().st_mode) for kept in path.parent.iterdir()} == {0o600}


# --- logs ---


def test_a_log_on_a_full_disk_raises_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    configure_logging("test", TelemetryConfig(log_format="json"))
    try:
        log = structlog.get_logger("full disk")
        with open("/dev/full", "wb") as full:
            kept = os.dup(2)
            os.dup2(full.fileno(), 2)
            try:
                log.info("lost")
                log.error("lost too", text="\ud800")
            finally:
                os.dup2(kept, 2)
                os.close(kept)
        log.info("there is room again")
    finally:
        structlog.reset_defaults()
        structlog.contextvars.clear_contextvars()
    told, line = capfd.readouterr().err.splitlines()
    assert told == "2 writes before this one were lost"
    assert "there is room again" in line


def test_a_pipe_that_nobody_reads_raises_nothing() -> None:
    read_fd, write_fd = os.pipe()
    os.close(read_fd)
    stream = UnfailingStream(write_fd)
    assert stream.write("hello") == 5
    os.close(write_fd)
    assert stream.write("hello") == 5


def test_a_log_that_grows_is_cut_off_while_it_is_written(tmp_path: Path) -> None:
    path = tmp_path / "prefill-0.log"
    with path.open("ab") as log:
        for n in range(8):
            log.write(f"{n}{'x' * 99}\n".encode())
            log.flush()
            cut_off(path, max_bytes=150, keep=2)
    kept = {file.name: [line[0] for line in file.read_text().splitlines()] for file in tmp_path.iterdir()}
    assert kept == {"prefill-0.log": [], "prefill-0.log.1": ["6", "7"], "prefill-0.log.2": ["4", "5"]}


def test_a_log_is_cut_off_also_where_there_is_no_room_for_a_copy(tmp_path: Path) -> None:
    path = tmp_path / "prefill-0.log"
    path.write_bytes(b"x" * 10_000)
    with full_beyond(5000):
        cut_off(path, max_bytes=8000, keep=2)
    assert [(file.name, file.stat().st_size) for file in tmp_path.iterdir()] == [("prefill-0.log", 0)]


@pytest.mark.parametrize("keep", [0, 1, 3])
def test_files_set_aside_are_so_many_and_in_order(tmp_path: Path, keep: int) -> None:
    path = tmp_path / "file"
    for n in range(6):
        set_aside(path, keep)
        path.write_text(str(n))
    found = [path.with_name(name).read_text() for name in ("file", "file.1", "file.2", "file.3")[: keep + 1]]
    assert found == [str(5 - n) for n in range(keep + 1)]
    assert len(list(tmp_path.iterdir())) == keep + 1


# --- the state of a mesh ---


def test_a_state_folder_that_cannot_be_used_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    state = StateFolder("x", tmp_path / "file" / "x")
    with (
        pytest.raises(ConfigError, match=r"cannot use the state folder .*: .*; set XDG_STATE_HOME"),
        state.lock(),
    ):
        pass


# --- descriptors ---


def test_the_soft_descriptor_limit_is_raised_to_the_hard_one() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    hard = min(before[1], MAX_DESCRIPTORS) if before[1] != resource.RLIM_INFINITY else MAX_DESCRIPTORS
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(256, hard), before[1]))
        raise_descriptor_limit()
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == hard
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
