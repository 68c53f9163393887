"""Copies between the cache and the offload tier: on threads of their own, in an order that keeps them right."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from types import TracebackType
from typing import Self

import anyio
from anyio import to_thread

from pdmesh.kv.blocks import BlockGuard
from pdmesh.kv.gate import Urgent, Wakeup


class Copy:
    """One copy. Whoever writes what it reads, or writes, waits for it first."""

    def __init__(self, run: Callable[[], object], after: Sequence[BlockGuard]) -> None:
        """``run`` is called once all ``after`` which it comes have ended; these were begun before."""
        self.error: Exception | None = None
        self._run = run
        self._after = after
        self._ended = threading.Event()

    @property
    def has_ended(self) -> bool:
        return self._ended.is_set()

    def wait(self) -> None:
        """Return when it has ended. Any thread but the event loop's."""
        self._ended.wait()

    def end(self) -> None:
        """Let it have ended without having been made."""
        self._after = ()
        self._ended.set()

    def execute(self) -> None:
        """Make it. An error is kept."""
        try:
            for guard in self._after:
                guard.wait()
            self._run()
        except Exception as error:
            self.error = error
        finally:
            self.end()


class CopyThread:
    """Makes copies one after the other, until it is left: what is in line by then is not made.

    ``call_soon`` runs a callback on the event loop, from any thread.
    """

    def __init__(self, name: str, call_soon: Callable[[Callable[[], object]], object]) -> None:
        self._call_soon = call_soon
        self._copies: SimpleQueue[tuple[Copy, Callable[[], object]] | None] = SimpleQueue()
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    async def __aenter__(self) -> Self:
        self._thread.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_closing = True
        self._copies.put(None)
        with anyio.CancelScope(shield=True):
            await to_thread.run_sync(self._thread.join)

    def put(self, copy: Copy, on_ended: Callable[[], object]) -> None:
        """Make a copy in its turn; ``on_ended`` is called on the event loop after it."""
        self._copies.put((copy, on_ended))

    def _run(self) -> None:
        while (entry := self._copies.get()) is not None:
            copy, on_ended = entry
            if self._is_closing:
                copy.end()
                continue
            copy.execute()
            self._call_soon(on_ended)


class KvLoad:
    """KV of one request on its way from the tier, layer by layer; steps wait for it as at a `pdmesh.kv.gate.KvGate`."""

    def __init__(self, wakeup: Wakeup) -> None:
        """``wakeup`` wakes the engine's thread."""
        self._wakeup = wakeup
        self._num_layers = 0  # that are here
        self._aborted: str | None = None

    @property
    def aborted(self) -> str | None:
        """Why nothing more comes; None as long as something does, or all has come."""
        return self._aborted

    def abort(self, reason: str) -> None:
        """End every wait, now and later. Any thread; the first reason counts."""
        with self._wakeup.lock:
            if self._aborted is None:
                self._aborted = reason
            self._wakeup.ring()

    def loaded(self, num_layers: int) -> None:
        """So many of the first layers are here. Any thread."""
        with self._wakeup.lock:
            self._num_layers = num_layers
            self._wakeup.ring()

    def wait(self, layer: int, num_blocks: int, urgent: Urgent, plan_id: int = 0) -> bool:
        """Wait until a layer is here, and run what is ``urgent`` meanwhile; False if it does not come.

        The engine's thread. ``num_blocks`` and ``plan_id`` are for gates of other kinds.
        """

        def is_over() -> bool:
            return self._aborted is not None or self._num_layers > layer

        while True:
            with self._wakeup.lock:
                self._wakeup.wait_for(lambda: is_over() or urgent.waits(), threading.TIMEOUT_MAX)
                if is_over():
                    return self._num_layers > layer
            urgent.run()
