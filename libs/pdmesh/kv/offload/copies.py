"""Copies between the cache and the offload tier: on threads of their own, in an order that keeps them right."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from types import TracebackType

from pdmesh.kv.blocks import BlockGuard
from pdmesh.kv.gate import Gate, Progress, Wakeup
from pdmesh.threads import CallThread

#: How long a thread is waited for that does not come back from the disk.
_END_S = 5.0


class TierCopy:
    """One copy. Whoever writes what it reads, or writes, waits for it first."""

    def __init__(self, run: Callable[[], object], after: Sequence[BlockGuard], wakeup: Wakeup) -> None:
        """``run`` is called once all ``after`` which it comes have ended; these were begun before.

        ``wakeup`` wakes who waits for it.
        """
        self.error: Exception | None = None
        self.after = after
        self._run = run
        self._wakeup = wakeup
        self._is_over = False
        self._writing = threading.Lock()

    @property
    def has_ended(self) -> bool:
        return self._is_over and not self._writing.locked()

    def wait(self) -> None:
        """Return when it has ended. Any thread but the event loop's."""
        self._wakeup.wait_for(lambda: self._is_over, threading.TIMEOUT_MAX)
        with self._writing:
            pass

    def write(self, call: Callable[[], object]) -> bool:
        """Call what writes into blocks, as long as it has not ended: False if it has, and nothing was written."""
        with self._writing:
            if self._is_over:
                return False
            call()
            return True

    def end(self) -> None:
        """Let it have ended, made or not: nothing is written any more. Any thread; does not wait for it."""
        self.after = ()
        self._is_over = True
        self._wakeup.ring()

    def execute(self) -> None:
        """Make it. An error is kept."""
        try:
            for guard in self.after:
                guard.wait()
            self._run()
        except Exception as error:
            self.error = error
        finally:
            self.end()


class CopyThread(CallThread):
    """Makes copies one after the other, until it is left: what is in line by then is not made.

    ``call_soon`` runs a callback on the event loop, from any thread.
    """

    def __init__(self, name: str, call_soon: Callable[[Callable[[], object]], object]) -> None:
        super().__init__(name, end_s=_END_S)
        self._call_soon = call_soon
        self._is_closing = False

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_closing = True
        await super().__aexit__(kind, error, trace)

    def make(self, copy: TierCopy, on_ended: Callable[[], object]) -> None:
        """Make a copy in its turn; ``on_ended`` is called on the event loop after it."""
        self.put(partial(self._make, copy, on_ended))

    def _make(self, copy: TierCopy, on_ended: Callable[[], object]) -> None:
        if self._is_closing:
            copy.end()
            return
        copy.execute()
        self._call_soon(on_ended)


class KvLoad(Gate):
    """KV of one request on its way from the tier, layer by layer. Once it is aborted, nothing is written any more."""

    def __init__(
        self,
        wakeup: Wakeup,
        progress: Progress,
        bring: Callable[[KvLoad], object],
        after: Sequence[BlockGuard] = (),
        *,
        no_progress_s: float,
        on_stuck: Callable[[str], object] = lambda reason: None,
    ) -> None:
        """``bring`` writes the layers in order, by `write`, and calls `loaded` after each.

        ``progress`` is that of all loads, which come one after the other. ``wakeup`` wakes the engine's thread, on
        which ``on_stuck`` is called if it waited in vain.
        """
        super().__init__(wakeup, progress, no_progress_s=no_progress_s, source="the offload tier")
        self._on_stuck = on_stuck
        self.copy = TierCopy(partial(bring, self), after, wakeup)
        self._num_layers = 0  # that are here

    def _is_here(self, layer: int, num_blocks: int) -> bool:
        return self._num_layers > layer

    def abort(self, reason: str) -> None:
        super().abort(reason)
        self.copy.end()

    def _nothing_came(self, reason: str) -> None:
        super()._nothing_came(reason)
        self._on_stuck(reason)

    def write(self, call: Callable[[], object]) -> bool:
        """Call what writes some of it: False if it was aborted, and nothing was written."""
        self._progress.came()
        return self.copy.write(call)

    def loaded(self, num_layers: int) -> None:
        """So many of the first layers are here."""
        self._num_layers = num_layers
        self._came(range(num_layers))
