"""The life of a service's process: configure, announce, serve until told to stop, drain, exit.

Each service's ``main(config)`` calls `run_service` with its ``serve`` coroutine, its composition root.
"""

from __future__ import annotations

import faulthandler
import importlib
import json
import os
import resource
import signal
import sys
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import anyio
import anyio.to_thread
import structlog

from pdmesh.config import MeshConfig
from pdmesh.config_sources import load_config
from pdmesh.errors import ConfigError, ServiceSuperseded, leaves
from pdmesh.failures import sentences
from pdmesh.telemetry.log_lines import configure_logging
from pdmesh.telemetry.tracing import Tracing, configure_tracing

log = structlog.get_logger()

EXIT_CONFIG = 2

#: Seconds for a service to end running requests once told; then it is cancelled. A third signal cancels at once.
ENDING_LIMIT_S = 5.0

#: Enough for a hundred thousand streams. Programs that look through all descriptors are slow with more.
MAX_DESCRIPTORS = 1 << 20

#: With fewer descriptors, a gateway starts but hangs at its first requests.
MIN_DESCRIPTORS = 64


@dataclass(slots=True)
class ServiceContext:
    """Interface of a process to its service."""

    ready_fd: int | None
    #: Set at the first SIGINT or SIGTERM: take no new work, finish what runs, return.
    stopping: anyio.Event = field(default_factory=anyio.Event)
    #: Set at the second signal, or after `drain_s`: end running requests with an error to their clients, and return.
    ending: anyio.Event = field(default_factory=anyio.Event)
    tracing: Tracing = field(default_factory=Tracing)

    def announce(self, **facts: Any) -> None:
        """Report, once, that the service can be reached; ``facts`` are addresses and the like.

        Facts go to the log and, as one JSON line, to the pipe from the supervisor.
        """
        log.info("serving", **facts)
        _tell_supervisor(self.ready_fd, {"pid": os.getpid(), **facts})


def _tell_supervisor(ready_fd: int | None, facts: dict[str, Any]) -> None:
    """Write one JSON line to the supervisor's pipe. The pipe stays open until this process ends, as a sign of life."""
    if ready_fd is not None:
        with suppress(OSError):
            os.write(ready_fd, json.dumps(facts).encode() + b"\n")


Serve = Callable[[MeshConfig, ServiceContext], Awaitable[None]]


def run_service(name: str, config: MeshConfig, serve: Serve) -> int:
    """Run ``serve`` to its end and return the exit code: 0 stopped, 1 failed, 2 the configuration is wrong."""
    try:
        faulthandler.enable()
        if config.ready_fd is not None:
            os.set_inheritable(config.ready_fd, False)
        configure_logging(name, config.telemetry)
        raise_descriptor_limit()
        anyio.run(_run, name, config, serve, backend_options={"use_uvloop": True})
    except Exception as error:
        return _failed(name, error, config.ready_fd)
    return 0


def _failed(name: str, error: Exception, ready_fd: int | None) -> int:
    """Report why the service ends, on stderr and to the supervisor. Return `EXIT_CONFIG` for a ConfigError, else 1."""
    why = sentences(error)
    causes = leaves(error)
    is_configuration = any(isinstance(cause, ConfigError) for cause in causes)
    if not is_configuration and not all(isinstance(cause, ServiceSuperseded) for cause in causes):
        log.error("service failed", exc_info=error)
    sys.stderr.write("".join(f"pdmesh {name}: {sentence}\n" for sentence in why))
    _tell_supervisor(ready_fd, {"failed": why})
    return EXIT_CONFIG if is_configuration else 1


def raise_descriptor_limit() -> None:
    """Raise the soft limit of open descriptors to the hard one, at most `MAX_DESCRIPTORS`: each client's stream takes
    one.

    Raises ConfigError if the hard limit is too low.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < MIN_DESCRIPTORS:
        raise ConfigError(
            f"a process may open only {hard} files: raise the limit to {MIN_DESCRIPTORS} or more, better 4096 "
            "(`ulimit -Hn`, `docker run --ulimit nofile=4096`)"
        )
    wanted = MAX_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MAX_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def run_from_environment(name: str, module: str, *given: object) -> int:
    """Configure by the environment, call ``module.main`` with that and ``given``, and return the exit code.

    A module that cannot be imported is reported like any failure.
    """
    try:
        config = load_config(None, os.environ, {})
        main: Callable[..., int] = importlib.import_module(module).main
    except Exception as error:
        ready_fd = os.environ.get("PDMESH_READY_FD", "")
        return _failed(name, error, int(ready_fd) if ready_fd.isdigit() else None)
    return main(config, *given)


async def _run(name: str, config: MeshConfig, serve: Serve) -> None:
    tracing = configure_tracing(name, config.telemetry)
    try:
        await _serve_until_stopped(config, serve, ServiceContext(ready_fd=config.ready_fd, tracing=tracing))
    finally:
        if tracing.on:
            with anyio.CancelScope(shield=True):
                await anyio.to_thread.run_sync(tracing.close)


async def _serve_until_stopped(config: MeshConfig, serve: Serve, context: ServiceContext) -> None:
    async with anyio.create_task_group() as tasks:

        async def watch_signals() -> None:
            with anyio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
                async for received in signals:
                    if context.ending.is_set():
                        log.warning("stopping now", signal=received.name)
                        tasks.cancel_scope.cancel()
                        return
                    if context.stopping.is_set():
                        context.ending.set()
                    else:
                        log.info("draining", signal=received.name, drain_s=config.drain_s)
                        context.stopping.set()

        async def end_in_time() -> None:
            await context.stopping.wait()
            with anyio.move_on_after(config.drain_s):
                await context.ending.wait()
            context.ending.set()
            log.warning("the drain time is over; ending the requests that still run")
            await anyio.sleep(ENDING_LIMIT_S)
            log.warning("stopping now")
            tasks.cancel_scope.cancel()

        tasks.start_soon(watch_signals)
        tasks.start_soon(end_in_time)
        await serve(config, context)
        tasks.cancel_scope.cancel()
