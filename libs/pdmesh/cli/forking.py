"""The supervisor's side of the fork server, which starts workers that have imported torch and share their weights.

Without the server, or if it cannot fork, workers are started by their commands.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import BinaryIO

import anyio
import msgspec

from pdmesh.cli.fork_server import MAX_REQUEST_BYTES, ForkReply, ForkRequest
from pdmesh.cli.processes import Child, ChildProcess, ChildSpec, start_child
from pdmesh.config_sources import PREFIX
from pdmesh.failures import describe_exit

#: Seconds for a fork, the server's only work.
FORK_LIMIT_S = 10.0

#: Seconds until a server that ended is started again.
RESTART_DELAY_S = 1.0

_PR_SET_CHILD_SUBREAPER = 36


@dataclass(slots=True)
class ForkedProcess:
    """A child that another process forked; implements `pdmesh.cli.processes.ChildProcess`."""

    pid: int
    _pidfd: int
    _returncode: int | None = None

    async def wait(self) -> int:
        if self._returncode is None:
            ends = os.dup(self._pidfd)  # several tasks may wait, each for its own descriptor
            try:
                await anyio.wait_readable(ends)
            finally:
                os.close(ends)
        if self._returncode is None:
            result = os.waitid(os.P_PIDFD, self._pidfd, os.WEXITED)  # noqa: ASYNC222  # the process has ended
            assert result is not None
            self._returncode = result.si_status if result.si_code == os.CLD_EXITED else -result.si_status
        return self._returncode

    async def aclose(self) -> None:
        await self.wait()
        os.close(self._pidfd)


class ForkServer:
    """Keeper of a fork server, which restarts the server and has it fork workers."""

    def __init__(self, spec: ChildSpec, *, start_timeout_s: float, say: Callable[[str], None]) -> None:
        """``spec`` has the environment of a worker, which names the model to load."""
        self._spec = spec
        self._start_timeout_s = start_timeout_s
        self._say = say
        self._server: Child | None = None  # set while it serves
        self._requests: socket.socket | None = None
        self._started = anyio.Event()  # also set if no server can be started
        self._one_at_a_time = anyio.Lock()

    async def run(self) -> None:
        """Run a server, and another one when it ends, until cancelled. Return if one never serves."""
        try:
            os.close(os.pidfd_open(os.getpid()))  # forked workers need pidfds
            while await self._run_once():  # noqa: ASYNC110  # returns when a server ends
                await anyio.sleep(RESTART_DELAY_S)
        except OSError as error:
            self._say(f"cannot start the fork server, so each worker loads the weights: {error.strerror}")
        finally:
            self._started.set()

    async def _run_once(self) -> bool:
        """Run one server to its end, and return whether it served."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        with ours, theirs:
            fd = theirs.fileno()
            spec = replace(self._spec, command=(*self._spec.command, str(fd)), pass_fds=(fd,))
            async with start_child(spec) as child:
                theirs.close()
                with anyio.move_on_after(self._start_timeout_s):
                    if await child.ready() is not None:
                        self._server, self._requests = child, ours
                if self._server is None:
                    return False
                self._started.set()
                try:
                    returncode = await child.wait()
                finally:
                    self._server = self._requests = None
                    self._started = anyio.Event()
        self._say(f"{spec.name} {describe_exit(returncode)}; starting another one")
        return True

    async def fork(self, spec: ChildSpec, log: BinaryIO, ready_fd: int) -> ChildProcess | None:
        """Fork a worker; return None if it has to be started by its command.

        That is so for other services, after a failed fork, and if the environment differs from the server's. Implements
        `pdmesh.cli.processes.StartChild`.
        """
        if not spec.forked_service or _foreign(spec.environment) != _foreign(self._spec.environment):
            return None  # loaded libraries have read the server's variables
        await self._started.wait()
        request = msgspec.json.encode(ForkRequest(service=spec.forked_service, environment=dict(spec.environment)))
        if len(request) > MAX_REQUEST_BYTES:
            return None
        process = None
        async with self._one_at_a_time:
            with anyio.CancelScope(shield=True):
                process = await self._fork(request, log.fileno(), ready_fd)
        return process

    async def _fork(self, request: bytes, log_fd: int, ready_fd: int) -> ChildProcess | None:
        if self._server is None or self._requests is None:
            return None
        server = self._server
        read_fd, go_fd = os.pipe()
        reply = ForkReply(failed=f"it has not answered for {FORK_LIMIT_S:g} s")
        try:
            with anyio.move_on_after(FORK_LIMIT_S), _adopting_orphans():
                socket.send_fds(self._requests, [request], [log_fd, ready_fd, read_fd])
                await anyio.wait_readable(self._requests)
                reply = msgspec.json.decode(self._requests.recv(MAX_REQUEST_BYTES), type=ForkReply)
            if reply.pid:
                process = ForkedProcess(reply.pid, os.pidfd_open(reply.pid))
                os.write(go_fd, b"1")  # lets the worker begin
                return process
        except (OSError, msgspec.DecodeError) as error:
            reply = ForkReply(failed=str(error))
        finally:
            os.close(read_fd)
            os.close(go_fd)
            if reply.is_stale or not reply.pid:
                server.send_signal(signal.SIGKILL)
        self._say(f"{self._spec.name} cannot fork a worker: {reply.failed}")
        return None


@contextmanager
def _adopting_orphans() -> Iterator[None]:
    """Adopt orphaned descendants within the block."""
    libc = ctypes.CDLL(None)
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1)
    try:
        yield
    finally:
        libc.prctl(_PR_SET_CHILD_SUBREAPER, 0)


def _foreign(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if not name.startswith(PREFIX)}
