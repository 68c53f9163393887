"""What a service finds around it, replaced while a simulation runs: clocks, chance, threads, gRPC.

Only names of the standard library, gRPC, anyio, and of two composition roots are replaced; all is as before when the
block is left.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any
from unittest import mock

import anyio
import anyio.to_thread
import grpc.aio
import sniffio
import structlog

import pdmesh.kv.mover as kv_mover
import pdmesh.kv.offload.tier as offload_tier
import pdmesh.worker.runtime as worker_runtime
import pdmesh_scheduler.main as scheduler_main
from pdmesh.core.commands import Command
from pdmesh.core.events import Event
from pdmesh.core.scheduler import SchedulerCore
from pdmesh.kv.mover import KvMover
from pdmesh.wire.link import FrameLink
from pdmesh.wire.session import PeerSession
from pdmesh.worker.instance import Instance
from pdmesh_scheduler.driver import Driver
from pdmesh_testing.dst.engine import SimulatedCallThreads, SimulatedCopyThread, run_for
from pdmesh_testing.dst.network import Network
from pdmesh_testing.dst.process import ProcessLoop, current_process, running_process
from pdmesh_testing.dst.servers import Server

#: Where the mesh's wall clock begins, Unix seconds.
EPOCH_S = 1_700_000_000.0

#: Called with each event that a core has handled, the time, and the core's commands.
OnDecision = Callable[[SchedulerCore, Event, float, list[Command]], None]


@contextmanager
def simulated_surroundings(
    loop: ProcessLoop, network: Network, rng: random.Random, on_decision: OnDecision, *, max_outbox: int, copy_s: float
) -> Iterator[None]:
    """Let all code in the block read clocks, draw, start threads and open channels in ``loop``."""

    def monotonic() -> float:
        return loop.time()

    def perf_counter() -> float:
        process = current_process()
        return loop.time() + (0.0 if process is None else process.busy_s)

    class SeededRandom(random.Random):
        def __init__(self, seed: Any = None) -> None:
            super().__init__(rng.getrandbits(64) if seed is None else seed)

    async def run_sync(call: Callable[..., Any], *args: Any, limiter: Any = None, **_: Any) -> Any:
        async with limiter or nullcontext():
            return await run_for(rng, copy_s, partial(call, *args))

    class WatchedCore(SchedulerCore):
        def handle(self, event: Event, now_s: float) -> list[Command]:
            commands = super().handle(event, now_s)
            on_decision(self, event, now_s, commands)
            return commands

    def server(*_args: Any, interceptors: Sequence[Any] = (), **_options: Any) -> Server:
        return Server(network, interceptors)

    @contextmanager
    def no_metrics(*_args: Any, **_options: Any) -> Generator[int]:
        yield 0

    with ExitStack() as stack:
        for owner, name, substitute in (
            (time, "monotonic", monotonic),
            (time, "perf_counter", perf_counter),
            (time, "time", lambda: EPOCH_S + loop.time()),
            (random, "Random", SeededRandom),
            (random, "_urandom", rng.randbytes),
            (random, "uniform", rng.uniform),
            (os, "urandom", rng.randbytes),
            (os, "getpid", lambda: 1),
            (anyio.to_thread, "run_sync", run_sync),
            # current_task() calls it each time, which would cost a system call.
            (asyncio.events, "get_running_loop", lambda: loop),
            # Otherwise anyio looks for it at each call.
            (sniffio.thread_local, "name", "asyncio"),
            (grpc.aio, "insecure_channel", network.insecure_channel),
            (grpc.aio, "server", server),
            (worker_runtime, "serve_metrics", no_metrics),
            (offload_tier, "CopyThread", partial(SimulatedCopyThread, rng, copy_s)),
            (kv_mover, "CallThreads", partial(SimulatedCallThreads, rng, copy_s)),
            (worker_runtime, "Instance", _remembered(Instance, "instance")),
            (scheduler_main, "serve_metrics", no_metrics),
            (scheduler_main, "is_refused", network.is_refused),
            (scheduler_main, "rare_collections", nullcontext),
            (scheduler_main, "SchedulerCore", WatchedCore),
            (scheduler_main, "Driver", _remembered(Driver, "driver")),
        ):
            stack.enter_context(mock.patch.object(owner, name, substitute))
        for defaults, name, value in (
            (KvMover.__init__, "clock", monotonic),
            (FrameLink.__init__, "max_queued", max_outbox),
            (PeerSession.__init__, "max_queued", max_outbox),
        ):
            stack.enter_context(mock.patch.dict(defaults.__kwdefaults__, {name: value}))
        stack.enter_context(_quiet_log())
        yield


def _remembered(made: type[Any], name: str) -> type[Any]:
    """``made``, whose object becomes a part of the process that makes it."""

    class Remembered(made):  # type: ignore[misc]
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            running_process().parts[name] = self

    return Remembered


@contextmanager
def _quiet_log() -> Generator[None]:
    """Log nothing: what matters is in the timeline. Bound loggers of modules look at the configuration at each call."""
    before = structlog.get_config()
    structlog.configure(
        wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL), cache_logger_on_first_use=False
    )
    try:
        yield
    finally:
        structlog.configure(**before)
