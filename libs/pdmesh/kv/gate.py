"""Gates: where a step waits, before a layer's attention, for earlier KV that is computed elsewhere or loaded.

The engine's thread waits. Pages are added by that thread and by the event loop (`pdmesh.kv.ledger`), and the event loop
aborts waits. A thread that changes the awaited state calls `Wakeup.ring` afterwards. The waiting thread looks under the
wakeup's lock before it sleeps, so no wake-up is lost.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import NamedTuple

from pdmesh.kv.ledger import PageLedger


class Wakeup:
    """Wakes waiting threads of an instance, above all the engine's. Any thread may ring."""

    def __init__(self) -> None:
        self._condition = threading.Condition()

    @property
    def lock(self) -> AbstractContextManager[object]:
        """The lock that a thread holds from its last look until it sleeps."""
        return self._condition

    def ring(self) -> None:
        """Make the waiting threads look again, because the state has changed."""
        with self._condition:
            self._condition.notify_all()

    def wait_for(self, condition: Callable[[], bool], limit_s: float) -> bool:
        """Return True once ``condition`` holds, or False after ``limit_s``. The condition is called under the lock."""
        with self._condition:
            return self._condition.wait_for(condition, max(0.0, limit_s))


class Urgent(NamedTuple):
    """Work for a waiting thread. Both functions are called on that thread.

    ``waits`` returns whether there is work; it is cheap, and is called under the wakeup's lock. ``run`` does the work.
    """

    waits: Callable[[], bool]
    run: Callable[[], object]


class Progress:
    """The last time at which KV came that gates wait for."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock = clock
        self.last_s = clock()

    def came(self) -> None:
        """Note that KV comes now. Any thread."""
        self.last_s = self.clock()


class Gate(ABC):
    """Lets a step pass once earlier KV is here, which other instances or threads bring.

    A waiting thread is woken by every abort, and when its awaited blocks are complete. Without ``progress`` for
    ``no_progress_s``, the wait itself aborts the gate.
    """

    def __init__(self, wakeup: Wakeup, progress: Progress, *, no_progress_s: float, source: str) -> None:
        """``source`` names where KV comes from, for the message if none came."""
        self._wakeup = wakeup
        self._progress = progress
        self._no_progress_s = no_progress_s
        self._source = source
        self._aborted: str | None = None
        self._awaited: tuple[int, int] | None = None  # (layer, number of first blocks)

    @abstractmethod
    def _is_here(self, layer: int, num_blocks: int) -> bool:
        """Whether the context's first ``num_blocks`` blocks are here in this layer. The lock may be held."""

    def _is_given_up(self, plan_id: int) -> bool:
        """Whether chunks of this plan end instead of waiting. Called under the wakeup's lock."""
        return False

    @property
    def aborted(self) -> str | None:
        """The reason why steps no longer wait; None as long as they do."""
        return self._aborted

    def abort(self, reason: str) -> None:
        """End every wait, now and later, because nothing more will come. Any thread. Only the first reason counts."""
        with self._wakeup.lock:
            if self._aborted is None:
                self._aborted = reason
            self._wakeup.ring()

    def wait(self, layer: int, num_blocks: int, urgent: Urgent, plan_id: int = 0) -> bool:
        """Wait until the context's first ``num_blocks`` blocks are here in this layer. The engine's thread.

        ``urgent`` work runs meanwhile. Return False if the blocks will not come: the gate was aborted (see `aborted`),
        or this plan's chunks end early.
        """

        def is_here() -> bool:
            return self._is_here(layer, num_blocks)

        def is_over() -> bool:
            return self._aborted is not None or (self._is_given_up(plan_id) and not is_here())

        def can_go_on() -> bool:
            return is_over() or is_here() or urgent.waits()

        since_s = self._progress.clock()
        while True:
            with self._wakeup.lock:
                self._awaited = layer, num_blocks
                self._wakeup.wait_for(can_go_on, self._left_s(since_s))
                self._awaited = None
                if is_over():
                    return False
                if is_here():
                    return True
                is_urgent = urgent.waits()
                if not is_urgent and self._left_s(since_s) <= 0:
                    self._nothing_came(f"no KV came from {self._source} for {self._no_progress_s:g} s")
            if is_urgent:
                urgent.run()
                since_s = self._progress.clock()

    def _came(self, layers: range) -> None:
        """Note that KV of these layers has come, and wake the waiting thread if its blocks are complete. Any thread."""
        self._progress.came()
        awaited = self._awaited
        if awaited is not None and awaited[0] in layers and self._is_here(*awaited):
            self._wakeup.ring()

    def _nothing_came(self, reason: str) -> None:
        """Abort, because nothing came for too long. The engine's thread."""
        self.abort(reason)

    def _left_s(self, since_s: float) -> float:
        return max(since_s, self._progress.last_s) + self._no_progress_s - self._progress.clock()


class GroupGate(Gate):
    """Lets a step pass once the first blocks of a request are in a ledger; other members of its group compute them."""

    def __init__(self, wakeup: Wakeup, ledger: PageLedger, *, no_progress_s: float, clock: Callable[[], float]) -> None:
        super().__init__(wakeup, Progress(clock), no_progress_s=no_progress_s, source="other members of the group")
        self._ledger = ledger
        self._given_up_plan_id = -1
        ledger.on_here = self._came

    def _is_here(self, layer: int, num_blocks: int) -> bool:
        return self._ledger.has_first(layer, num_blocks)

    def _is_given_up(self, plan_id: int) -> bool:
        return plan_id <= self._given_up_plan_id

    def give_up(self, plan_id: int) -> None:
        """End chunks of plans up to ``plan_id`` instead of waiting: their remaining tokens are planned anew."""
        with self._wakeup.lock:
            self._given_up_plan_id = max(self._given_up_plan_id, plan_id)
            self._wakeup.ring()
