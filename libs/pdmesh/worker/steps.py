"""The step loop: execute the next plan, else a decode step over the residents, else wait.

An urgent plan that comes while a step with chunks runs is executed inside this step, between two layers, and its
results are distributed at once. Steps of decodes alone are short, and are not interrupted.

A chunk waits before each layer's attention for earlier KV that a group computes or that comes from the offload tier.

An engine of several stages has several steps under way. The next step is made when the last one begins, so that only
one waits at the first stage. An urgent plan is the step after that one, and runs inside no other. Some steps may wait
for KV, or compute chunks again. The next step may need this KV, so it begins only after the end of such a step.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import AsyncExitStack
from functools import partial
from typing import NamedTuple

import anyio
import anyio.lowlevel
import structlog
from anyio.abc import TaskGroup
from anyio.streams.memory import MemoryObjectReceiveStream

from pdmesh.engine.base import Engine, SequenceSlice, SliceResult, StepFlight
from pdmesh.errors import InstanceUnavailable
from pdmesh.kv.gate import Urgent
from pdmesh.kv.remote_kv import RemoteKvLost
from pdmesh.worker.batch import Batch, BatchChunk, BatchDecode
from pdmesh.worker.cores import LentCores, LentLayers
from pdmesh.worker.instance import Instance
from pdmesh.worker.plans import MAX_QUEUED_PLANS, Plans
from pdmesh.worker.threads import EngineThread
from pdmesh.worker.times import StepTime

log = structlog.get_logger()


class _Executed(NamedTuple):
    """An executed batch. Chunks whose waiting was aborted, and rows whose remote KV was lost, have no result."""

    batch: Batch
    results: list[SliceResult | None]
    time: StepTime


class _EndsEarly(Exception):
    """Signal to stop a running step, because all rows were aborted or a chunk must be removed."""


class _Step:
    """A batch on the engine's thread, and the work between its layers.

    Between layers, new KV is published, urgent batches run, and chunks wait for earlier KV, while urgent batches run,
    too. A chunk whose wait is aborted is computed with any contents of its blocks, which are freed next. A chunk that
    lost a member of its group keeps its blocks, and some of its pages may already be sent to others. So such a chunk
    must not be computed without the earlier KV, and the other rows of the step begin again.

    ``run_inside`` runs an urgent batch; None inside another step, and with several stages.
    """

    def __init__(
        self,
        batch: Batch,
        plans: Plans,
        engine: Engine,
        run_inside: Callable[[Batch], None] | None,
        flight: StepFlight | None = None,
        cores: LentCores | None = None,
    ) -> None:
        self._batch = batch
        self._cores = cores
        self._plans = plans
        self._engine = engine
        self._run_inside = run_inside
        self._flight = flight or StepFlight()
        self._block_size = engine.kv.layout.block_size
        self._aborted: list[BatchChunk] = []
        #: Rows whose KV on another instance gets no answer.
        self._lost: list[BatchChunk | BatchDecode] = []
        self._publish = batch.on_layer(self._block_size, self._aborted)
        self._waiting = batch.waiting
        self._urgent = Urgent(lambda: run_inside is not None and plans.has_urgent, self._run_urgent)
        self._nested_s = 0.0
        self._waited_s = 0.0

    def run(self) -> _Executed:
        batch = self._batch
        is_open = self._run_inside is not None and bool(batch.chunks)
        hook = self._layer_done if is_open or self._waiting else self._publish
        started_s = time.perf_counter()
        before = LentLayers() if self._cores is None else self._cores.lent_layers
        for guard in batch.guards:
            guard.wait()
        self._waited_s += time.perf_counter() - started_s
        results: list[SliceResult | None] = [None] * (len(batch.chunks) + len(batch.decodes))
        while rows := self._rows():
            try:
                computed = self._engine.execute(list(rows.values()), on_layer=hook, flight=self._flight)
                for row, result in zip(rows, computed, strict=True):
                    results[row] = result
                break
            except _EndsEarly:
                continue
            except RemoteKvLost as lost:
                rows_of_all: list[BatchChunk | BatchDecode] = [*batch.chunks, *batch.decodes]
                of_it = [each for each in rows_of_all if each.request.sequence.elsewhere is lost.elsewhere]
                assert of_it, "nobody computes with what was lost"
                self._lost += of_it
        ended_s = time.perf_counter()
        for index, chunk in enumerate(batch.chunks):
            if chunk in self._aborted:
                results[index] = None
        duration_s = ended_s - started_s - self._nested_s - self._waited_s - self._flight.queued_s
        step_time = StepTime(started_s, ended_s, duration_s, self._waited_s)
        if self._cores is not None:
            num_lent = self._cores.lent_layers.mean_since(before)
            step_time = step_time._replace(num_lent_cores=num_lent, num_own_cores=self._cores.num_own)
        return _Executed(batch, results, step_time)

    def _rows(self) -> dict[int, SequenceSlice]:
        """Return the rows left to compute, by their place in the batch."""
        rows = [*self._batch.chunks, *self._batch.decodes]
        ended = {index for index, row in enumerate(rows) if row in self._aborted or row in self._lost}
        return {index: part for index, part in enumerate(self._batch.slices) if index not in ended}

    def _layer_done(self, layer: int) -> None:
        if self._publish is not None:
            self._publish(layer)
        self._run_urgent()
        if self._waiting:
            self._wait(layer)

    def _run_urgent(self) -> None:
        if self._run_inside is None:
            return
        urgent = self._plans.take_urgent()
        if urgent is not None:
            # Let the device finish the queued work of the outer step, which is not the urgent step's time.
            self._engine.settle()
            began_s = time.perf_counter()
            self._run_inside(urgent)
            self._nested_s += time.perf_counter() - began_s

    def _wait(self, layer: int) -> None:
        began_s, nested_s = time.perf_counter(), self._nested_s
        plan_id = 0 if self._batch.plan is None else self._batch.plan.plan_id
        given_up = False
        for chunk in list(self._waiting):
            num_blocks = chunk.plan.start // self._block_size
            if not all(gate.wait(layer, num_blocks, self._urgent, plan_id) for gate in chunk.gates):
                self._waiting.remove(chunk)
                self._aborted.append(chunk)
                given_up = given_up or chunk.aborted is None
        self._waited_s += time.perf_counter() - began_s - (self._nested_s - nested_s)
        if given_up or (len(self._aborted) == len(self._batch.chunks) and not self._batch.decodes):
            raise _EndsEarly


class _Executor:
    """Executor of batches on the engine's thread. ``on_inside`` gets each batch that ran inside another.

    ``broken`` has the batches that ended with the engine's failure.
    """

    def __init__(
        self, plans: Plans, engine: Engine, on_inside: Callable[[_Executed], object], cores: LentCores | None
    ) -> None:
        self.broken: list[Batch] = []
        self._plans = plans
        self._engine = engine
        self._on_inside = on_inside
        self._cores = cores

    def execute(self, batch: Batch) -> _Executed:
        return self._run(batch, self._execute_inside)

    def execute_in_flight(self, batch: Batch, flight: StepFlight) -> _Executed:
        return self._run(batch, None, flight)

    def _execute_inside(self, batch: Batch) -> None:
        self._on_inside(self._run(batch, None))

    def _run(
        self, batch: Batch, run_inside: Callable[[Batch], None] | None, flight: StepFlight | None = None
    ) -> _Executed:
        try:
            return _Step(batch, self._plans, self._engine, run_inside, flight, self._cores).run()
        except Exception:
            self.broken.append(batch)
            raise


async def run_steps(
    instance: Instance, engine: Engine, thread: EngineThread, cores: LentCores | None = None
) -> Exception:
    """Execute batches until cancelled. If the engine breaks, end the requests of its batches and return its error.

    If a rank is lost, no requests end here: they restart elsewhere. While a step runs on the engine's thread, the event
    loop serves the links. ``cores`` is this worker's row of the table, if workers lend each other cores.
    """
    # anyio has no call from a thread that returns without waiting for the result.
    call_soon = asyncio.get_running_loop().call_soon_threadsafe
    done_inside, inside = anyio.create_memory_object_stream[_Executed](MAX_QUEUED_PLANS)
    executor = _Executor(
        instance.plans, engine, lambda executed: call_soon(partial(done_inside.send_nowait, executed)), cores
    )
    failure: Exception | None = None
    async with AsyncExitStack() as stack:
        lanes = [thread]
        if engine.num_stages > 1:
            lanes += [await stack.enter_async_context(EngineThread("lane")) for _ in range(engine.num_stages)]
        await stack.enter_async_context(done_inside)
        await stack.enter_async_context(inside)
        tasks = await stack.enter_async_context(anyio.create_task_group())
        tasks.start_soon(_hand_out, instance, inside)
        tasks.start_soon(instance.plans.grammars.run, engine.prepare)
        if len(lanes) == 1:
            failure = await _run_batches(instance, executor, thread, cores)
        else:
            failure = await _Pipelined(instance, executor, lanes).run()
        tasks.cancel_scope.cancel()
    assert failure is not None
    return failure


async def _run_batches(
    instance: Instance, executor: _Executor, thread: EngineThread, cores: LentCores | None
) -> Exception:
    while True:
        batch = instance.plans.next_batch()
        if batch is None:
            if cores is not None:
                cores.release()
            await instance.plans.wait_for_work()
            continue
        if cores is not None:
            cores.occupy()
        try:
            executed = await thread.run(partial(executor.execute, batch), on_cancel=instance.stop_waiting)
        except Exception as error:
            return _failed(instance, executor, error)
        if instance.results.hand_out(*executed):
            await anyio.lowlevel.checkpoint()


def _failed(instance: Instance, executor: _Executor, error: Exception) -> Exception:
    """End the requests of the batches with which the engine broke, and return the error.

    If a rank is lost, the requests are left to restart elsewhere, as after the loss of this process.
    """
    if not isinstance(error, InstanceUnavailable):
        log.error("the engine failed", exc_info=error)
        while executor.broken:
            instance.results.fail(executor.broken.pop(), error)
    return error


class _Pipelined:
    """Loop with several steps under way, each on one of ``lanes``. Results are distributed in the steps' order."""

    def __init__(self, instance: Instance, executor: _Executor, lanes: Iterable[EngineThread]) -> None:
        self._instance = instance
        self._executor = executor
        self._free = deque(lanes)
        self._changed = anyio.Event()
        self._last_done = anyio.Event()
        self._last_done.set()
        self._failure: Exception | None = None

    async def run(self) -> Exception:
        """Execute batches until cancelled, or until the engine's failure, which is returned."""
        async with anyio.create_task_group() as steps:
            while self._failure is None:
                if not self._free:
                    await self._change()
                elif (batch := self._instance.plans.next_batch()) is not None:
                    await self._begin(batch, steps)
                else:
                    await self._instance.plans.wait_for_work()
        assert self._failure is not None
        return self._failure

    async def _change(self) -> None:
        self._changed = anyio.Event()
        await self._changed.wait()

    async def _begin(self, batch: Batch, steps: TaskGroup) -> None:
        """Begin a batch, and return once the first stage computes it.

        A batch that may wait for KV, or be computed again, is awaited to its end.
        """
        call_soon = asyncio.get_running_loop().call_soon_threadsafe
        begun, before, done = anyio.Event(), self._last_done, anyio.Event()
        self._last_done = done
        flight = StepFlight(waits=bool(batch.waiting), on_begin=lambda: call_soon(begun.set))

        async def execute(lane: EngineThread) -> None:
            call = partial(self._executor.execute_in_flight, batch, flight)
            try:
                executed = await lane.run(call, on_cancel=self._instance.stop_waiting)
            except Exception as error:
                self._failure = _failed(self._instance, self._executor, error)
            else:
                await before.wait()
                if self._failure is None:
                    self._instance.results.hand_out(*executed)
            finally:
                self._free.append(lane)
                begun.set()
                done.set()
                self._changed.set()
                self._instance.plans.wake()

        steps.start_soon(execute, self._free.popleft())
        await (done if flight.waits or batch.may_begin_again else begun).wait()


async def _hand_out(instance: Instance, inside: MemoryObjectReceiveStream[_Executed]) -> None:
    async for executed in inside:
        instance.results.hand_out(*executed)
