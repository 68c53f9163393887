"""Which of a request's KV is in this instance's cache, where several instances compute its prompt in turn.

The engine's thread writes pages and, before a layer's attention, waits for those that others compute; the event loop
notes what has landed, and aborts. All that a waiting thread waits for is changed, or told of by `Wakeup.ring`, under
the wakeup's lock, and the thread looks again under that lock before it sleeps: so no wake-up is lost.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import NamedTuple


class Wakeup:
    """Wakes the engine's thread of an instance where it waits. One thread waits at a time; any thread rings."""

    def __init__(self) -> None:
        self._condition = threading.Condition()

    @property
    def lock(self) -> AbstractContextManager[object]:
        """Return the lock to hold while changing what a waiting thread looks at."""
        return self._condition

    def ring(self) -> None:
        """Something was changed: whoever waits looks again."""
        with self._condition:
            self._condition.notify_all()

    def wait_for(self, condition: Callable[[], bool], limit_s: float) -> bool:
        """Return True once ``condition`` holds, or False after ``limit_s``. It is looked at under the lock."""
        with self._condition:
            return self._condition.wait_for(condition, max(0.0, limit_s))


class Urgent(NamedTuple):
    """What a thread does instead of idling. Both are called on the waiting thread."""

    waits: Callable[[], bool]  # whether there is something; cheap, called under the wakeup's lock
    run: Callable[[], object]


class KvPresence:
    """The pages, that is (layer, block), of one request's context that are here.

    A thread that waits is told of by every abort, and by every page that completes what it waits for. When nothing has
    been added for ``no_progress_s``, waiting itself aborts.
    """

    def __init__(
        self,
        wakeup: Wakeup,
        *,
        num_layers: int,
        num_blocks: int,
        no_progress_s: float,
        clock: Callable[[], float],
    ) -> None:
        self._wakeup = wakeup
        self._here = [bytearray(num_blocks) for _ in range(num_layers)]
        self._num_first = [0] * num_layers  # so many blocks from the context's beginning, without a gap
        self._no_progress_s = no_progress_s
        self._clock = clock
        self._progress_s = clock()
        self._aborted: str | None = None
        self._given_up_plan_id = -1  # plans up to this one do not wait
        self._awaited: tuple[int, int] | None = None  # a layer, and how many of its first blocks

    @property
    def aborted(self) -> str | None:
        """Why nothing is waited for any more."""
        return self._aborted

    def add(self, layer: int, first_block: int, num_blocks: int) -> None:
        """Mark pages as present: written here, or landed. Any thread."""
        with self._wakeup.lock:
            here = self._here[layer]
            here[first_block : first_block + num_blocks] = b"\1" * num_blocks
            missing = here.find(0, self._num_first[layer])
            self._num_first[layer] = len(here) if missing < 0 else missing
            self._progress_s = self._clock()
            if self._awaited is not None and self._awaited[0] == layer and self.has(*self._awaited):
                self._wakeup.ring()

    def abort(self, reason: str) -> None:
        """End every wait, now and later, because nothing more will come. Any thread; the first reason counts."""
        with self._wakeup.lock:
            if self._aborted is None:
                self._aborted = reason
            self._wakeup.ring()

    def give_up(self, plan_id: int) -> None:
        """Chunks of plans up to this one end where they would wait, or do: what they wait for is planned anew."""
        with self._wakeup.lock:
            self._given_up_plan_id = max(self._given_up_plan_id, plan_id)
            self._wakeup.ring()

    @property
    def num_complete_blocks(self) -> int:
        """Number of the context's first blocks that are present in all layers."""
        return min(self._num_first)

    def has(self, layer: int, num_blocks: int) -> bool:
        """Whether the context's first ``num_blocks`` blocks are all here in this layer."""
        return self._num_first[layer] >= num_blocks

    def wait(self, layer: int, num_blocks: int, urgent: Urgent, plan_id: int = 0) -> bool:
        """Wait until the context's first ``num_blocks`` blocks are here in this layer. The engine's thread.

        What is ``urgent`` is run meanwhile. False if it was aborted (see `aborted`), or this plan was given up: they
        will not come.
        """

        def is_over() -> bool:
            return self._aborted is not None or (plan_id <= self._given_up_plan_id and not self.has(layer, num_blocks))

        def can_go_on() -> bool:
            return is_over() or self.has(layer, num_blocks) or urgent.waits()

        since_s = self._clock()
        while True:
            with self._wakeup.lock:
                self._awaited = layer, num_blocks
                self._wakeup.wait_for(can_go_on, self._left_s(since_s))
                self._awaited = None
                if is_over():
                    return False
                if self.has(layer, num_blocks):
                    return True
                is_urgent = urgent.waits()
                if not is_urgent and self._left_s(since_s) <= 0:
                    self.abort(f"no KV came from other members of the group for {self._no_progress_s:g} s")
            if is_urgent:
                urgent.run()
                since_s = self._clock()

    def _left_s(self, since_s: float) -> float:
        return max(since_s, self._progress_s) + self._no_progress_s - self._clock()
