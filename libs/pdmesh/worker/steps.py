"""The step loop: the next plan if there is one, else a decode step over the residents, else wait.

An urgent plan that comes while a step with chunks is running is executed inside it, between two of its layers, and
handed out at once. Steps of decodes alone are short, and are not interrupted.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import anyio
import structlog
from anyio.streams.memory import MemoryObjectReceiveStream

from pdmesh.engine.base import Engine, SliceResult
from pdmesh.worker.batch import Batch, StepTime
from pdmesh.worker.instance import Instance
from pdmesh.worker.plans import MAX_QUEUED_PLANS, Plans
from pdmesh.worker.threads import EngineThread

log = structlog.get_logger()


class _Executed(NamedTuple):
    batch: Batch
    results: list[SliceResult]
    time: StepTime


class _Executor:
    """What runs on the engine's thread. ``on_inside`` is told there of each batch that ran inside another."""

    def __init__(self, plans: Plans, engine: Engine, on_inside: Callable[[_Executed], object]) -> None:
        self.broken: list[Batch] = []  # batches that ended with the engine's failure
        self._plans = plans
        self._engine = engine
        self._on_inside = on_inside
        self._block_size = engine.kv.layout.block_size

    def execute(self, batch: Batch, *, inside: bool = False) -> _Executed:
        send = batch.on_layer(self._block_size)
        nested_s = 0.0

        def layer_done(layer: int) -> None:
            nonlocal nested_s
            if send is not None:
                send(layer)
            urgent = self._plans.take_urgent()
            if urgent is not None:
                self._engine.settle()  # what a device has not done yet of the outer step is not the urgent one's time
                began_s = time.perf_counter()
                self._on_inside(self.execute(urgent, inside=True))
                nested_s += time.perf_counter() - began_s

        started_s = time.perf_counter()
        on_layer = layer_done if batch.chunks and not inside else send
        try:
            results = self._engine.execute(batch.slices, on_layer=on_layer)
        except Exception:
            self.broken.append(batch)
            raise
        ended_s = time.perf_counter()
        return _Executed(batch, results, StepTime(started_s, ended_s, ended_s - started_s - nested_s))


async def run_steps(instance: Instance, engine: Engine, thread: EngineThread) -> Exception:
    """Execute batches until cancelled. If the engine breaks, end the requests of its batches and return its error.

    While a step runs on the engine's thread, the event loop serves the links.
    """
    # anyio has no call from a thread that does not wait for its result.
    call_soon = asyncio.get_running_loop().call_soon_threadsafe
    done_inside, inside = anyio.create_memory_object_stream[_Executed](MAX_QUEUED_PLANS)
    executor = _Executor(instance.plans, engine, lambda executed: call_soon(partial(done_inside.send_nowait, executed)))
    failure: Exception | None = None
    async with done_inside, inside, anyio.create_task_group() as tasks:
        tasks.start_soon(_hand_out, instance, inside)
        failure = await _run_batches(instance, executor, thread)
        tasks.cancel_scope.cancel()
    assert failure is not None
    return failure


async def _run_batches(instance: Instance, executor: _Executor, thread: EngineThread) -> Exception:
    while True:
        batch = instance.plans.next_batch()
        if batch is None:
            await instance.plans.wait_for_work()
            continue
        try:
            executed = await thread.run(partial(executor.execute, batch))
        except Exception as error:
            log.exception("the engine failed")
            for broken in executor.broken:
                instance.fail_batch(broken, error)
            return error
        instance.finish_batch(*executed)


async def _hand_out(instance: Instance, inside: MemoryObjectReceiveStream[_Executed]) -> None:
    async for executed in inside:
        instance.finish_batch(*executed)
