"""An engine on virtual time: steps take what they are told; tokens prove that the right KV was in the right place."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import anyio

from pdmesh.engine.base import LayerHook, SequenceSlice, SliceResult
from pdmesh.testing.dst.process import running_process
from pdmesh.testing.engine import FAKE_LAYOUT, FakeEngine, FakeKvStore
from pdmesh.worker.threads import EngineThread

T = TypeVar("T")

#: Seconds of a step: for itself, and for each token of it.
STEP_S = 0.03
TOKEN_S = 0.001


class _Store(FakeKvStore):
    """Copies of more than ``inline_bytes`` are made on a thread."""

    inline_bytes = 1 << 20

    @property
    def inline_copy_bytes(self) -> int:
        return self.inline_bytes


class SimulatedEngine(FakeEngine):
    """`pdmesh.testing.engine.FakeEngine`, each step of which makes its process busy."""

    def __init__(self, *, num_blocks: int, max_model_len: int, copies_on_threads: bool) -> None:
        super().__init__(num_blocks=num_blocks, max_model_len=max_model_len)
        self.kv = store = _Store(FAKE_LAYOUT, num_blocks)
        store.inline_bytes = 0 if copies_on_threads else 1 << 20
        self.breaks = False  # its next step fails, as with a broken device
        self.broke = False

    def execute(self, batch: Sequence[SequenceSlice], *, on_layer: LayerHook | None = None) -> list[SliceResult]:
        if self.breaks:
            self.broke = True
            raise RuntimeError("the simulated device broke")
        process = running_process()
        process.busy_s += process.slowness * (STEP_S + TOKEN_S * sum(part.num_tokens for part in batch))
        results = super().execute(batch, on_layer=on_layer)
        self.batches.clear()
        return results


class SimulatedThread(EngineThread):
    """Runs a step at some moment between its beginning and its end, both on virtual time.

    So KV is written while others may believe the blocks free or full, as with a real thread.
    """

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    async def __aenter__(self) -> SimulatedThread:
        return self

    async def __aexit__(self, *_: Any) -> None:
        return None

    async def run(self, call: Callable[[], T]) -> T:
        process = running_process()
        early_s = self._rng.uniform(0, STEP_S)
        await sleep_through(early_s)
        before_s = process.busy_s
        try:
            return call()
        finally:
            await sleep_through(max(0.0, process.busy_s - before_s - early_s))


async def sleep_through(seconds: float) -> None:
    """What a thread does cannot be abandoned."""
    with anyio.CancelScope(shield=True):
        await anyio.sleep(seconds)
