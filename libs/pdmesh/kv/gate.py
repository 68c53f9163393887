"""Where a step waits, before a layer's attention, for the KV that other instances compute of the same prompt.

The engine's thread waits. Pages are brought by it and by the event loop (`pdmesh.kv.ledger`), and the event loop aborts
waits. A thread that changes what a waiting thread looks at calls `Wakeup.ring` afterwards, and the waiting thread looks
under the wakeup's lock before it sleeps, so no wake-up is lost.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import NamedTuple

from pdmesh.kv.ledger import PageLedger


class Wakeup:
    """Wakes the engine's thread of an instance where it waits. One thread waits at a time; any thread may ring."""

    def __init__(self) -> None:
        self._condition = threading.Condition()

    @property
    def lock(self) -> AbstractContextManager[object]:
        """Return the lock that a thread holds from its last look until it sleeps."""
        return self._condition

    def ring(self) -> None:
        """Make the waiting thread look again, because something has changed."""
        with self._condition:
            self._condition.notify_all()

    def wait_for(self, condition: Callable[[], bool], limit_s: float) -> bool:
        """Return True once ``condition`` holds, or False after ``limit_s``. The condition is called under the lock."""
        with self._condition:
            return self._condition.wait_for(condition, max(0.0, limit_s))


class Urgent(NamedTuple):
    """What a waiting thread does instead of idling. Both methods are called on that thread."""

    waits: Callable[[], bool]  # whether there is something; cheap, called under the wakeup's lock
    run: Callable[[], object]


class KvGate:
    """Lets a step pass once the first blocks of a request are in a ledger.

    A waiting thread is woken by every abort, and by every page that completes what it waits for. If nothing has come
    for ``no_progress_s``, the wait itself aborts the gate.
    """

    def __init__(self, wakeup: Wakeup, ledger: PageLedger, *, no_progress_s: float, clock: Callable[[], float]) -> None:
        self._wakeup = wakeup
        self._ledger = ledger
        self._no_progress_s = no_progress_s
        self._clock = clock
        self._progress_s = clock()
        self._aborted: str | None = None
        self._given_up_plan_id = -1  # plans up to this one do not wait
        self._awaited: tuple[int, int] | None = None  # a layer, and how many of its first blocks
        ledger.on_here = self._here

    @property
    def aborted(self) -> str | None:
        """Why steps no longer wait; None as long as they do."""
        return self._aborted

    def abort(self, reason: str) -> None:
        """End every wait, now and later, because nothing more will come. Any thread; the first reason counts."""
        with self._wakeup.lock:
            if self._aborted is None:
                self._aborted = reason
            self._wakeup.ring()

    def give_up(self, plan_id: int) -> None:
        """Let chunks of plans up to this one end where they wait or would wait: what they wait for is planned anew."""
        with self._wakeup.lock:
            self._given_up_plan_id = max(self._given_up_plan_id, plan_id)
            self._wakeup.ring()

    def wait(self, layer: int, num_blocks: int, urgent: Urgent, plan_id: int = 0) -> bool:
        """Wait until the context's first ``num_blocks`` blocks are here in this layer. The engine's thread.

        Runs what is ``urgent`` meanwhile. Returns False if the blocks will not come: the gate was aborted (see
        `aborted`), or this plan was given up.
        """

        def is_here() -> bool:
            return self._ledger.has_first(layer, num_blocks)

        def is_over() -> bool:
            return self._aborted is not None or (plan_id <= self._given_up_plan_id and not is_here())

        def can_go_on() -> bool:
            return is_over() or is_here() or urgent.waits()

        since_s = self._clock()
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
                    self.abort(f"no KV came from other members of the group for {self._no_progress_s:g} s")
            if is_urgent:
                urgent.run()
                since_s = self._clock()

    def _here(self, layers: range) -> None:
        self._progress_s = self._clock()
        awaited = self._awaited
        if awaited is not None and awaited[0] in layers and self._ledger.has_first(*awaited):
            self._wakeup.ring()

    def _left_s(self, since_s: float) -> float:
        return max(since_s, self._progress_s) + self._no_progress_s - self._clock()
