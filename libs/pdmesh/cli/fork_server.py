"""The process that forks workers: ``python -m pdmesh.cli.fork_server FD``, started by `pdmesh.cli.forking`.

The server imports torch and everything else that a worker needs, loads the weights, and forks one worker for each
request. The server has one thread, and refuses to fork with more: a fork would copy locks whose owners are gone. No
event loop, gRPC channel, OpenMP pool or CUDA context exists before a fork.

A worker is forked twice, and the process between ends at once. So the worker becomes a child of the supervisor, like
one that the supervisor starts itself: the supervisor reaps it, and the kernel kills it when the supervisor ends. The
worker survives the fork server.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import os
import select
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

import msgspec
import structlog

from pdmesh.config import MeshConfig
from pdmesh.config_sources import load_config
from pdmesh.errors import ConfigError
from pdmesh.service import run_from_environment
from pdmesh.telemetry.log_lines import configure_logging

if TYPE_CHECKING:  # torch takes seconds to import
    from pdmesh.engine.preloaded import PreloadedModel

log = structlog.get_logger()

#: Largest request, mostly environment. Any socket takes as many bytes in one message.
MAX_REQUEST_BYTES = 1 << 17

NUM_REQUEST_FDS = 3

_PR_SET_PDEATHSIG = 1


class ForkRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Parameters of a worker's start. The `environment` is complete except for PDMESH_READY_FD.

    Three descriptors accompany the request: the worker's log, its pipe to the supervisor, and a pipe whose first byte
    lets it begin.
    """

    service: str
    environment: dict[str, str]


class ForkReply(msgspec.Struct, frozen=True, kw_only=True):
    """The worker's pid, or the reason why there is no worker."""

    pid: int = 0
    failed: str = ""
    #: The checkpoint has changed, so workers can share the new weights only with another fork server.
    is_stale: bool = False


def main(arguments: Sequence[str]) -> int:
    """Serve until the supervisor closes its socket. A forked worker returns from here with its exit code."""
    config = load_config(None, os.environ, {})
    configure_logging("fork-server", config.telemetry)
    os.environ["OPENBLAS_NUM_THREADS"] = "1"  # numpy's library would start threads when loaded
    for module in ("pdmesh_prefill.main", "pdmesh_decode.main"):
        importlib.import_module(module)
    preloaded = _preload(config) if config.worker.engine == "torch" else None
    gc.collect()
    gc.freeze()  # a collection would write to shared pages
    assert config.ready_fd is not None
    os.write(config.ready_fd, json.dumps({"pid": os.getpid(), "preloaded": preloaded is not None}).encode() + b"\n")
    requests = socket.socket(fileno=int(arguments[0]))
    worker = _serve(requests, preloaded)
    return 0 if worker is None else worker()


def _preload(config: MeshConfig) -> PreloadedModel | None:
    """Import the engine and load the weights. Return None if workers have to load them.

    A failure here happens in the worker, too, and the worker reports it.
    """
    importlib.import_module("pdmesh.engine.runner")
    if (config.worker.tensor_parallel_size, config.worker.pipeline_parallel_size) != (1, 1):
        return None
    from pdmesh.worker.engines import preload

    try:
        return preload(config)
    except (ConfigError, OSError) as error:
        log.warning("cannot preload the weights; each worker loads them", reason=str(error))
        return None


def _serve(requests: socket.socket, preloaded: PreloadedModel | None) -> Callable[[], int] | None:
    """Answer requests until the socket closes, and return None. In a forked worker, return the worker's program."""
    supervisor_pid = os.getppid()
    while True:
        data, fds, _, _ = socket.recv_fds(requests, MAX_REQUEST_BYTES, NUM_REQUEST_FDS)
        if not data:
            return None
        request = msgspec.json.decode(data, type=ForkRequest)
        is_stale = preloaded is not None and not preloaded.is_current
        try:
            pid = _fork_adopted(supervisor_pid)
        except OSError as error:
            reply = ForkReply(failed=str(error), is_stale=is_stale)
        else:
            if pid == 0:
                requests.detach()  # `_become` closes the descriptor
                _become(request, *fds)
                given = None if is_stale else preloaded
                return partial(run_from_environment, request.service, f"pdmesh_{request.service}.main", given)
            reply = ForkReply(pid=pid, is_stale=is_stale)
        for fd in fds:
            os.close(fd)
        requests.send(msgspec.json.encode(reply))


def _fork_adopted(supervisor_pid: int) -> int:
    """Fork a child of the supervisor: return 0 in the child, and the child's pid here.

    Raise OSError if this process has several threads or the system refuses to fork.
    """
    if (num_threads := len(os.listdir("/proc/self/task"))) != 1:
        raise OSError(f"the fork server has {num_threads} threads")
    read_fd, write_fd = os.pipe()
    between = os.fork()
    if between == 0:
        _fork_and_end(write_fd, supervisor_pid)
        return 0
    os.close(write_fd)
    try:
        os.waitpid(between, 0)
        told = os.read(read_fd, 32)
    finally:
        os.close(read_fd)
    if not told:
        raise OSError("the system refused to fork")
    return int(told)


def _fork_and_end(pid_fd: int, supervisor_pid: int) -> None:
    """Fork a worker, write its pid to ``pid_fd`` and end this process. Return only in the worker."""
    try:
        ends = os.pidfd_open(os.getpid())
        worker = os.fork()
        if worker:
            os.write(pid_fd, str(worker).encode())
    except OSError:
        os._exit(1)
    if worker:
        os._exit(0)
    _wait_for_adoption(ends, supervisor_pid)


def _wait_for_adoption(parent_ends: int, supervisor_pid: int) -> None:
    """Wait until the supervisor has adopted this worker, and have the kernel kill it with the supervisor.

    End this process if the supervisor is gone.
    """
    waiting = select.poll()
    waiting.register(parent_ends, select.POLLIN)
    waiting.poll()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != supervisor_pid:
        os._exit(1)


def _become(request: ForkRequest, log_fd: int, ready_fd: int, go_fd: int) -> None:
    """Begin a session for a worker, with output to ``log_fd`` and the environment of ``request``.

    Wait for a byte from ``go_fd``; without one, end this process. Close all other descriptors except ``ready_fd``.
    """
    os.setsid()
    if not os.read(go_fd, 1):
        os._exit(1)  # the supervisor does not know this process
    os.dup2(log_fd, 1)
    os.dup2(log_fd, 2)
    os.environ.clear()
    os.environ.update(request.environment)
    os.environ["PDMESH_READY_FD"] = str(ready_fd)
    for fd in map(int, os.listdir("/proc/self/fd")):
        if fd > 2 and fd != ready_fd:
            with suppress(OSError):  # the listing's own is closed already
                os.close(fd)
    sys.argv = [f"pdmesh_{request.service}"]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
