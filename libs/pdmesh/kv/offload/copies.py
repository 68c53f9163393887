"""Copies between the cache and the offload tier, on separate threads, in an order that keeps them correct."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from types import TracebackType

from pdmesh.kv.blocks import BlockGuard
from pdmesh.kv.gate import Gate, Progress, Wakeup
from pdmesh.threads import CallThread

#: Time limit for the end of a thread that waits for the disk.
_END_S = 5.0


class TierCopy:
    """A copy between the cache and the tier. Wait for its end before writing blocks that it reads or writes."""

    def __init__(self, run: Callable[[], object], after: Sequence[BlockGuard], wakeup: Wakeup) -> None:
        """``run`` is called once all of ``after`` have ended, which are copies that began earlier.

        ``wakeup`` wakes the threads that wait for the copy.
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
        """Wait until the copy has ended. Any thread but the event loop's."""
        self._wakeup.wait_for(lambda: self._is_over, threading.TIMEOUT_MAX)
        with self._writing:
            pass

    def write(self, call: Callable[[], object]) -> bool:
        """Call ``call``, which writes into blocks, unless the copy has ended. Return whether it was called."""
        with self._writing:
            if self._is_over:
                return False
            call()
            return True

    def end(self) -> None:
        """End the copy, made or not: `write` does nothing from now on. Any thread; a running write is not awaited."""
        self.after = ()
        self._is_over = True
        self._wakeup.ring()

    def execute(self) -> None:
        """Make the copy, and end it. An exception is stored in ``error``."""
        try:
            for guard in self.after:
                guard.wait()
            self._run()
        except Exception as error:
            self.error = error
        finally:
            self.end()


class CopyThread(CallThread):
    """A thread that makes copies one after the other. Copies still queued when it is left end without being made.

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
        """Queue a copy. ``on_ended`` is called on the event loop after it was made."""
        self.put(partial(self._make, copy, on_ended))

    def _make(self, copy: TierCopy, on_ended: Callable[[], object]) -> None:
        if self._is_closing:
            copy.end()
            return
        copy.execute()
        self._call_soon(on_ended)


class KvLoad(Gate):
    """KV of one request on its way from the tier, layer by layer. After an abort, nothing more is written."""

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

        All loads share ``progress``, because they run one after the other. ``wakeup`` wakes the engine's thread, which
        calls ``on_stuck`` if it waited in vain.
        """
        super().__init__(wakeup, progress, no_progress_s=no_progress_s, source="the offload tier")
        self._on_stuck = on_stuck
        self.copy = TierCopy(partial(bring, self), after, wakeup)
        self._num_layers = 0

    def _is_here(self, layer: int, num_blocks: int) -> bool:
        return self._num_layers > layer

    def abort(self, reason: str) -> None:
        super().abort(reason)
        self.copy.end()

    def _nothing_came(self, reason: str) -> None:
        super()._nothing_came(reason)
        self._on_stuck(reason)

    def write(self, call: Callable[[], object]) -> bool:
        """Call ``call``, which writes some of the KV, unless the load was aborted. Return whether it was called.

        Each `write` counts as progress, so that no load of the tier is taken for stuck.
        """
        self._progress.came()
        return self.copy.write(call)

    def loaded(self, num_layers: int) -> None:
        """Note that the first ``num_layers`` layers are here."""
        self._num_layers = num_layers
        self._came(range(num_layers))
