"""Processes of a mesh: their start, and their end with their parent."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import anyio

#: Asks the kernel to kill this process when the parent ends (PR_SET_PDEATHSIG, kept over exec), then becomes the
#: command.
_LAUNCHER = (
    "import ctypes, os, sys; "
    "ctypes.CDLL(None).prctl(1, 9); "
    "os.getppid() == int(sys.argv[1]) or os._exit(1); "
    "os.execvp(sys.argv[2], sys.argv[2:])"
)

#: Largest message of a child, which consists of a few addresses and a sentence.
_MAX_SAID_BYTES = 64 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildSpec:
    """A process to start. ``environment`` is complete except for PDMESH_READY_FD. The process inherits `pass_fds`."""

    name: str
    command: tuple[str, ...]
    environment: Mapping[str, str]
    log_file: Path
    pass_fds: tuple[int, ...] = ()
    #: Name of the service that ``command`` runs, if a fork server may run it instead: "prefill" or "decode".
    forked_service: str = ""


def is_gateway(name: str) -> bool:
    """Return whether a service of that name is a gateway."""
    return name.partition("-")[0] == "gateway"


class ChildProcess(Protocol):
    """A child process that this one reaps."""

    @property
    def pid(self) -> int: ...

    async def wait(self) -> int:
        """Return the exit code once the process has ended, or the negative number of the signal that killed it."""
        ...

    async def aclose(self) -> None:
        """Wait until the process has ended, and free its resources."""
        ...


class StartChild(Protocol):
    """Starter of a process in place of `anyio.open_process`."""

    async def __call__(self, spec: ChildSpec, log: BinaryIO, ready_fd: int) -> ChildProcess | None:
        """Start a child that writes to ``log`` and ``ready_fd``; return None if it cannot be started this way."""
        ...


@dataclass(slots=True)
class Child:
    """A running child, which reports on a pipe when it serves and why it fails. The log file has its output."""

    name: str
    process: ChildProcess
    _pipe_fd: int
    _pidfd: int | None  # may be None for a process that ended early
    _said: bytearray = field(default_factory=bytearray)

    @property
    def pid(self) -> int:
        return self.process.pid

    async def ready(self) -> dict[str, Any] | None:
        """Return the facts that the child announces once it serves.

        Return None if the child closed the pipe or sent anything else first.
        """
        while b"\n" not in self._said:
            await anyio.wait_readable(self._pipe_fd)
            if not self._hear():
                return None
        first = next(self._lines(), {})
        return None if not first or "failed" in first else first

    def last_words(self) -> tuple[str, ...]:
        """Return the sentences in which an ended child gave its reason; empty if it did not."""
        while self._hear():
            pass
        failed = next((line["failed"] for line in self._lines() if "failed" in line), ())
        return tuple(map(str, failed)) if isinstance(failed, list) else ()

    def _hear(self) -> bool:
        """Read available bytes from the pipe. Return False if there are none, or too many."""
        try:
            data = os.read(self._pipe_fd, 4096)
        except BlockingIOError:
            return False
        self._said += data
        return bool(data) and len(self._said) <= _MAX_SAID_BYTES

    def _lines(self) -> Iterator[dict[str, Any]]:
        for line in self._said.splitlines():
            with suppress(ValueError):
                said = json.loads(line)
                if isinstance(said, dict):
                    yield said

    async def wait(self) -> int:
        return await self.process.wait()

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal, unless the child has ended.

        The process's own method would reap a child that has just ended. A waiting task would then get 255 instead of
        the exit code (python/cpython#87744).
        """
        if self._pidfd is not None:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, number)


def ending_with_us(command: Sequence[str]) -> list[str]:
    """Return a command that runs ``command`` and dies with the thread that starts it."""
    return [sys.executable, "-I", "-S", "-c", _LAUNCHER, str(os.getpid()), *command]


def _open_log(path: Path) -> BinaryIO:
    """Open a log for appending. If that fails, as on a lost disk, the service runs without a log."""
    try:
        return path.open("ab")
    except OSError:
        return open(os.devnull, "ab")


@asynccontextmanager
async def start_child(spec: ChildSpec, fork: StartChild | None = None) -> AsyncGenerator[Child]:
    """Start a child in its own session (Ctrl-C must reach only its parent), and kill it at the end of the block.

    ``fork`` may start the child in place of its command.
    """
    read_fd, write_fd = os.pipe()
    os.set_blocking(read_fd, False)
    try:
        with _open_log(spec.log_file) as log:
            process = await fork(spec, log, write_fd) if fork is not None else None
            if process is None:
                process = await _execute(spec, log, write_fd)
    except BaseException:
        os.close(read_fd)
        raise
    finally:
        os.close(write_fd)
    pidfd = _open_pidfd(process.pid)
    child = Child(spec.name, process, read_fd, pidfd)
    try:
        yield child
    finally:
        os.close(read_fd)
        child.send_signal(signal.SIGKILL)
        if pidfd is not None:
            os.close(pidfd)
        with anyio.CancelScope(shield=True):
            await process.aclose()


async def _execute(spec: ChildSpec, log: BinaryIO, ready_fd: int) -> ChildProcess:
    return await anyio.open_process(
        ending_with_us(spec.command),
        stdin=None,
        stdout=log,
        stderr=log,
        env={**spec.environment, "PDMESH_READY_FD": str(ready_fd)},
        start_new_session=True,
        pass_fds=(ready_fd, *spec.pass_fds),
    )


def _open_pidfd(pid: int) -> int | None:
    try:
        return os.pidfd_open(pid)
    except ProcessLookupError:
        return None


def describe_oom(limit_bytes: int | None) -> str:
    """Describe the end of a process that the kernel killed for lack of memory; ``limit_bytes`` of control groups."""
    whose = "the machine's" if limit_bytes is None else f"the {limit_bytes / (1 << 30):.1f} GiB of its control group's"
    return (
        f"was killed by the kernel because {whose} memory ran out: add memory, or lower --kv-cache-bytes, "
        "the number of instances, or the size of the model"
    )
