"""Processes of a mesh: who they are, how they start, and that none outlives its parent."""

from __future__ import annotations

import json
import os
import select
import signal
import sys
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import anyio
import anyio.abc

#: Asks the kernel to kill us when our parent ends (PR_SET_PDEATHSIG, kept over exec), then becomes the command.
_LAUNCHER = (
    "import ctypes, os, sys; "
    "ctypes.CDLL(None).prctl(1, 9); "
    "os.getppid() == int(sys.argv[1]) or os._exit(1); "
    "os.execvp(sys.argv[2], sys.argv[2:])"
)

#: A ready line is a few addresses; more than this is not one.
_MAX_READY_BYTES = 64 * 1024


@dataclass(frozen=True, slots=True)
class ProcessId:
    """A process for sure: pids are used again, the pair of pid and start time is not."""

    pid: int
    start_ticks: int

    @property
    def alive(self) -> bool:
        return process_id(self.pid) == self


def process_id(pid: int) -> ProcessId | None:
    """The process that has ``pid`` now, or None if none runs (a zombie does not)."""
    try:
        # The name, in brackets, may hold anything; what follows starts with the state (field 3 of proc(5)).
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else ProcessId(pid, int(fields[19]))


def wait_for_end(process: ProcessId, timeout_s: float) -> bool:
    """Block until ``process`` has ended; False if it still runs after ``timeout_s``."""
    try:
        pidfd = os.pidfd_open(process.pid)
    except ProcessLookupError:
        return True
    try:
        return not process.alive or bool(select.select([pidfd], [], [], timeout_s)[0])
    finally:
        os.close(pidfd)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildSpec:
    """What to start. ``environment`` is complete but for PDMESH_READY_FD."""

    name: str
    command: tuple[str, ...]
    environment: Mapping[str, str]
    log_file: Path
    pass_fds: tuple[int, ...] = ()  # that it inherits


def is_gateway(name: str) -> bool:
    """Whether a service of that name is one."""
    return name.partition("-")[0] == "gateway"


@dataclass(slots=True)
class Child:
    """A running child. It says on a pipe when it serves, and its output goes to its log file."""

    name: str
    process: anyio.abc.Process
    _ready_fd: int
    _line: bytearray = field(default_factory=bytearray)

    @property
    def pid(self) -> int:
        return self.process.pid

    async def ready(self) -> dict[str, Any] | None:
        """What the child announces once it serves; None if it ended, or closed the pipe, without doing so."""
        while b"\n" not in self._line:
            await anyio.wait_readable(self._ready_fd)
            data = os.read(self._ready_fd, 4096)
            if not data or len(self._line) > _MAX_READY_BYTES:
                return None
            self._line += data
        try:
            facts = json.loads(self._line.partition(b"\n")[0])
        except ValueError:
            return None
        return facts if isinstance(facts, dict) else None

    async def wait(self) -> int:
        return await self.process.wait()

    def send_signal(self, number: signal.Signals) -> None:
        if self.process.returncode is None:
            self.process.send_signal(number)


def ending_with_us(command: Sequence[str]) -> list[str]:
    """``command`` such that the kernel kills what it starts when the thread that starts it ends, in whatever way."""
    return [sys.executable, "-I", "-S", "-c", _LAUNCHER, str(os.getpid()), *command]


def _open_log(path: Path) -> BinaryIO:
    """For appending; where it cannot be opened, a disk that is gone, a service runs without a log."""
    try:
        return path.open("ab")
    except OSError:
        return open(os.devnull, "ab")


@asynccontextmanager
async def start_child(spec: ChildSpec) -> AsyncGenerator[Child]:
    """Start a child in a session of its own (Ctrl-C must reach its parent alone); leaving the block kills it."""
    read_fd, write_fd = os.pipe()
    try:
        with _open_log(spec.log_file) as log:
            process = await anyio.open_process(
                ending_with_us(spec.command),
                stdin=None,
                stdout=log,
                stderr=log,
                env={**spec.environment, "PDMESH_READY_FD": str(write_fd)},
                start_new_session=True,
                pass_fds=(write_fd, *spec.pass_fds),
            )
    except BaseException:
        os.close(read_fd)
        raise
    finally:
        os.close(write_fd)
    try:
        yield Child(spec.name, process, read_fd)
    finally:
        os.close(read_fd)
        with anyio.CancelScope(shield=True):
            if process.returncode is None:
                process.kill()
            await process.aclose()


def describe_exit(returncode: int) -> str:
    """How a process ended, in words."""
    if returncode >= 0:
        return f"exited with code {returncode}"
    try:
        return f"was killed by {signal.Signals(-returncode).name}"
    except ValueError:
        return f"was killed by signal {-returncode}"
