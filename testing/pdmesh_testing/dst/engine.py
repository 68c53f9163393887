"""An engine on virtual time: steps take configured times, and tokens prove that the right KV was in the right place."""

from __future__ import annotations

import random
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from contextvars import Context, copy_context
from types import TracebackType
from typing import Any, Generic, NamedTuple, Self, TypeVar

import anyio
import numpy as np

from pdmesh.engine.base import LayerHook, SequenceSlice, SliceResult, StepFlight
from pdmesh.engine.states import StateSlice
from pdmesh.kv.gate import Wakeup
from pdmesh.kv.offload.copies import CopyThread, TierCopy
from pdmesh.kv_layout import KvLayout
from pdmesh.threads import CallThreads
from pdmesh.worker.threads import EngineThread
from pdmesh_testing.dst.process import running_process
from pdmesh_testing.fake_engine import FakeEngine, FakeKvStore, Words

T = TypeVar("T")

#: Seconds of a step: for itself, and for each token of it.
STEP_S = 0.03
TOKEN_S = 0.001

#: Longest slice whose states are computed twice.
MAX_TOKENS_AGAIN = 4


class _Store(FakeKvStore):
    """Copies of more than ``inline_bytes`` are made on a thread."""

    inline_bytes = 1 << 20

    @property
    def inline_copy_bytes(self) -> int:
        return self.inline_bytes


class SimulatedEngine(FakeEngine):
    """`pdmesh_testing.fake_engine.FakeEngine` whose steps make the process busy."""

    def __init__(
        self, layout: KvLayout, *, num_blocks: int, num_frames: int, max_model_len: int, copies_on_threads: bool
    ) -> None:
        super().__init__(layout, num_blocks=num_blocks, max_model_len=max_model_len)
        self.kv = store = _Store(layout, num_blocks, num_frames)
        store.inline_bytes = 0 if copies_on_threads else 1 << 20
        # The next step fails, as with a broken device.
        self.breaks = False
        self.broke = False

    def execute(
        self, batch: Sequence[SequenceSlice], *, on_layer: LayerHook | None = None, flight: StepFlight | None = None
    ) -> list[SliceResult]:
        if self.breaks:
            self.broke = True
            raise RuntimeError("the simulated device broke")
        process = running_process()
        process.busy_s += process.slowness * (STEP_S + TOKEN_S * sum(part.num_tokens for part in batch))
        results = super().execute(batch, on_layer=on_layer, flight=flight)
        self.batches.clear()
        return results

    def _fold(self, layer: int, part: SequenceSlice, rows: StateSlice, hidden: Words) -> Words:
        """Advance a sequence's state as the base class does, and short slices twice: a step may be computed again.

        Raise AssertionError if the second result differs, and RuntimeError if the state before ``part`` is gone.
        """
        folded = super()._fold(layer, part, rows, hidden)
        if part.num_tokens <= MAX_TOKENS_AGAIN:
            again = super()._fold(layer, part, rows, hidden)
            assert np.array_equal(again, folded), f"{part.sequence.request_id}: another state when computed again"
        return folded


class _Wait(NamedTuple):
    """What a step waits for between two of its layers."""

    condition: Callable[[], bool]
    limit_s: float


class SimulatedWakeup(Wakeup):
    """Waiting hands the turn back to the simulation's loop. Only one of them runs at a time, so there is no lock."""

    def __init__(self) -> None:
        self._suspend: Callable[[_Wait], None] | None = None
        self._rung = anyio.Event()

    @property
    def lock(self) -> AbstractContextManager[object]:
        return nullcontext()

    def ring(self) -> None:
        self._rung.set()

    def wait_for(self, condition: Callable[[], bool], limit_s: float) -> bool:
        if not condition():
            assert self._suspend is not None, "nothing that waits runs"
            self._suspend(_Wait(condition, limit_s))
        return condition()

    def running(self, suspend: Callable[[_Wait], None] | None) -> None:
        """Let waits from now on call ``suspend``; None: no step runs."""
        self._suspend = suspend

    async def until(self, wait: _Wait) -> None:
        """Return when the condition of ``wait`` is true, or its time limit has passed."""
        with anyio.move_on_after(wait.limit_s):
            while not wait.condition():
                self._rung = anyio.Event()
                await self._rung.wait()


class SimulatedThread(EngineThread):
    """Engine thread that runs a step at some moment between the step's beginning and end, both on virtual time.

    So KV is written while other code may believe the blocks free or full, as with a real thread. A step runs on a real
    thread while the loop is paused, and the thread waits while the loop runs: a step may wait between its layers.
    """

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self.wakeup = self._simulated_wakeup = SimulatedWakeup()

    async def __aenter__(self) -> SimulatedThread:
        return self

    async def __aexit__(self, *_: Any) -> None:
        return None

    async def run(self, call: Callable[[], T], *, on_cancel: Callable[[], object] = lambda: None) -> T:
        process = running_process()
        early_s = self._rng.uniform(0, STEP_S)
        await sleep_through(early_s)
        before_s = process.busy_s
        turns = _Turns(copy_context(), call)
        wakeup = self._simulated_wakeup
        try:
            wakeup.running(turns.suspend)
            while (wait := turns.resume()) is not None:
                try:
                    await wakeup.until(wait)
                except anyio.get_cancelled_exc_class():
                    # The caller's next await raises again.
                    on_cancel()
            wakeup.running(None)
            return turns.result()
        finally:
            await sleep_through(max(0.0, process.busy_s - before_s - early_s))


class SimulatedCallThreads(CallThreads):
    """Makes calls at a moment of virtual time each, ``call_s`` after they are begun at most."""

    def __init__(self, rng: random.Random, call_s: float, name: str, num_threads: int) -> None:
        super().__init__(name, 0)
        self._rng = rng
        self._call_s = call_s
        self._free = anyio.CapacityLimiter(num_threads)

    async def run(self, call: Callable[[], T], *, on_cancel: Callable[[], object] = lambda: None) -> T:
        async with self._free:
            return await run_for(self._rng, self._call_s, call)


class SimulatedCopyThread(CopyThread):
    """Makes copies one after the other, each at one moment of virtual time, ``copy_s`` after it is begun at most."""

    def __init__(
        self,
        rng: random.Random,
        copy_s: float,
        name: str,
        call_soon: Callable[[Callable[[], object]], object],
    ) -> None:
        super().__init__(name, call_soon)
        self._rng = rng
        self._copy_s = copy_s
        self._tasks = anyio.create_task_group()
        self._line: deque[tuple[TierCopy, Callable[[], object]]] = deque()
        self._more = anyio.Event()

    async def __aenter__(self) -> Self:
        await self._tasks.__aenter__()
        self._tasks.start_soon(self._copy_in_turn)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._tasks.cancel_scope.cancel()
        await self._tasks.__aexit__(kind, error, trace)

    def make(self, copy: TierCopy, on_ended: Callable[[], object]) -> None:
        self._line.append((copy, on_ended))
        self._more.set()

    async def _copy_in_turn(self) -> None:
        while True:
            await self._more.wait()
            copy, on_ended = self._line.popleft()
            await anyio.sleep(self._rng.uniform(0, self._copy_s / 2))
            while not all(guard.has_ended for guard in copy.after):  # noqa: ASYNC110  # they tell threads alone
                await anyio.sleep(self._copy_s / 10 or TOKEN_S)
            copy.execute()
            await anyio.sleep(self._rng.uniform(0, self._copy_s / 2))
            on_ended()
            if not self._line:
                self._more = anyio.Event()


class _Turns(Generic[T]):
    """A call on a thread that runs only while its caller waits in `resume`."""

    def __init__(self, context: Context, call: Callable[[], T]) -> None:
        self._call = call
        self._goes = threading.Semaphore(0)
        self._stands = threading.Semaphore(0)
        self._wait: _Wait | None = None
        self._outcome: Future[T] = Future()
        self._thread = threading.Thread(target=context.run, args=(self._run,), daemon=True)
        self._thread.start()

    def resume(self) -> _Wait | None:
        """Let the call run until it waits or ends. Return its wait, or None at the end."""
        self._wait = None
        self._goes.release()
        self._stands.acquire()
        return self._wait

    def suspend(self, wait: _Wait) -> None:
        """Return from `resume` with ``wait``, and block until the next `resume`. Runs on the call's own thread."""
        self._wait = wait
        self._stands.release()
        self._goes.acquire()

    def result(self) -> T:
        return self._outcome.result()

    def _run(self) -> None:
        self._goes.acquire()
        try:
            self._outcome.set_result(self._call())
        except BaseException as error:
            self._outcome.set_exception(error)
        self._wait = None
        self._stands.release()


async def run_for(rng: random.Random, call_s: float, call: Callable[[], T]) -> T:
    """Make a call as a thread would that takes up to ``call_s`` for it, at some moment of these."""
    await sleep_through(rng.uniform(0, call_s / 2))
    try:
        return call()
    finally:
        await sleep_through(rng.uniform(0, call_s / 2))


async def sleep_through(seconds: float) -> None:
    """Sleep without being cancelled, since a thread's work cannot be abandoned."""
    with anyio.CancelScope(shield=True):
        await anyio.sleep(seconds)
