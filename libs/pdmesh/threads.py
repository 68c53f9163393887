"""Threads that make calls one after the other, beside the event loop."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue
from types import TracebackType
from typing import Self

import anyio
from anyio import to_thread


class CallThread:
    """Makes calls on one thread of its own, until it is left: what is in line by then is made first.

    The thread is waited for, ``end_s`` at most: one that is stuck in the system is left behind, and ends with the
    process.
    """

    def __init__(self, name: str, *, end_s: float | None = None) -> None:
        self._calls: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        self._end_s = end_s
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    async def __aenter__(self) -> Self:
        self._thread.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._calls.put(None)
        with anyio.CancelScope(shield=True):
            await to_thread.run_sync(self._thread.join, self._end_s)

    @property
    def has_ended(self) -> bool:
        """Whether the thread makes no call any more."""
        return not self._thread.is_alive()

    def put(self, call: Callable[[], object]) -> None:
        """Make a call in its turn. It must not raise. Any thread."""
        self._calls.put(call)

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            call()
