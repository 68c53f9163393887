"""The thread that the engine lives on, and how many cores it may use."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

import anyio

from pdmesh.host import num_usable_cores
from pdmesh.kv.gate import Wakeup
from pdmesh.threads import CallThread

T = TypeVar("T")


def fair_num_threads(num_threads: int, num_ranks: int = 1) -> int:
    """Return ``num_threads``, or for 0 a rank's share of half of the process's cores.

    The other pool's instance gets the rest.
    """
    return num_threads or max(1, num_usable_cores() // 2 // num_ranks)


class EngineThread(CallThread):
    """Runs blocking calls one after the other on one thread of its own.

    Always the same thread, for two reasons: native thread pools and device contexts belong to the thread that made
    them, and a hand-over to it costs less than one to a pool's (0.11 instead of 0.16 ms, two cores, 2026-11).
    """

    def __init__(self, name: str = "engine") -> None:
        super().__init__(name)
        self.wakeup = Wakeup()  #: for calls that wait for something

    async def run(self, call: Callable[[], T], *, on_cancel: Callable[[], object] = lambda: None) -> T:
        """Run ``call`` and return its result. Cancellation waits for it, because a running step cannot be abandoned.

        ``on_cancel`` is called on cancellation, and ends what the call waits for.
        """
        call_soon = asyncio.get_running_loop().call_soon_threadsafe  # anyio's would let the thread wait for the loop
        done = anyio.Event()
        outcome: list[Any] = []

        def job() -> None:
            try:
                outcome.extend((call(), None))
            except BaseException as error:  # handed to the caller
                outcome.extend((None, error))
            call_soon(done.set)

        self.put(job)
        try:
            await done.wait()
        except anyio.get_cancelled_exc_class():  # comes again at whatever the caller awaits next
            on_cancel()
            with anyio.CancelScope(shield=True):
                await done.wait()
        result, error = outcome
        if error is not None:
            raise error
        return result  # type: ignore[no-any-return]  # T, through an untyped list
