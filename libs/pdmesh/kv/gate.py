"""Where a step waits, before a layer's attention, for KV before it: other instances compute it, or it is loaded.

The engine's thread waits. Pages are brought by it and by the event loop (`pdmesh.kv.ledger`), and the event loop aborts
waits. A thread that changes what a waiting thread looks at calls `Wakeup.ring` afterwards, and the waiting thread looks
under the wakeup's lock before it sleeps, so no wake-up is lost.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import NamedTuple

from pdmesh.kv.ledger import PageLedger


class Wakeup:
    """Wakes the threads of an instance where they wait, above all the engine's. Any thread may ring."""

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


class Progress:
    """When something last came that gates wait for."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock = clock
        self.last_s = clock()

    def came(self) -> None:
        """Note that something comes just now. Any thread."""
        self.last_s = self.clock()


class Gate(ABC):
    """Lets a step pass once the KV before it is here, which others bring.

    A waiting thread is woken by every abort, and by what completes that for which it waits. If there was no
    ``progress`` for ``no_progress_s``, the wait itself aborts the gate.
    """

    def __init__(self, wakeup: Wakeup, progress: Progress, *, no_progress_s: float, source: str) -> None:
        """``source`` says from where KV comes, for those who read why none did."""
        self._wakeup = wakeup
        self._progress = progress
        self._no_progress_s = no_progress_s
        self._source = source
        self._aborted: str | None = None
        self._awaited: tuple[int, int] | None = None  # a layer, and how many of its first blocks

    @abstractmethod
    def _is_here(self, layer: int, num_blocks: int) -> bool:
        """Whether the context's first ``num_blocks`` blocks are here in this layer. Under the wakeup's lock, or not."""

    def _is_given_up(self, plan_id: int) -> bool:
        """Whether chunks of this plan are to end where they would wait. Under the wakeup's lock."""
        return False

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

    def wait(self, layer: int, num_blocks: int, urgent: Urgent, plan_id: int = 0) -> bool:
        """Wait until the context's first ``num_blocks`` blocks are here in this layer. The engine's thread.

        Runs what is ``urgent`` meanwhile. Returns False if the blocks will not come: the gate was aborted (see
        `aborted`), or this plan was given up.
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
        """Some KV of these layers is here now. Any thread."""
        self._progress.came()
        awaited = self._awaited
        if awaited is not None and awaited[0] in layers and self._is_here(*awaited):
            self._wakeup.ring()

    def _nothing_came(self, reason: str) -> None:
        """Give up, after too long. The engine's thread."""
        self.abort(reason)

    def _left_s(self, since_s: float) -> float:
        return max(since_s, self._progress.last_s) + self._no_progress_s - self._progress.clock()


class GroupGate(Gate):
    """Lets a step pass once the first blocks of a request are in a ledger: other members of its group compute them."""

    def __init__(self, wakeup: Wakeup, ledger: PageLedger, *, no_progress_s: float, clock: Callable[[], float]) -> None:
        super().__init__(wakeup, Progress(clock), no_progress_s=no_progress_s, source="other members of the group")
        self._ledger = ledger
        self._given_up_plan_id = -1  # plans up to this one do not wait
        ledger.on_here = self._came

    def _is_here(self, layer: int, num_blocks: int) -> bool:
        return self._ledger.has_first(layer, num_blocks)

    def _is_given_up(self, plan_id: int) -> bool:
        return plan_id <= self._given_up_plan_id

    def give_up(self, plan_id: int) -> None:
        """Let chunks of plans up to this one end where they wait or would wait: what they wait for is planned anew."""
        with self._wakeup.lock:
            self._given_up_plan_id = max(self._given_up_plan_id, plan_id)
            self._wakeup.ring()
