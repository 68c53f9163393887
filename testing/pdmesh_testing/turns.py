"""Stages of a stand-in engine: threads pass them one after the other, in the order in which they entered."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager


class StageTurns:
    """Each stage is one thread's at a time. Where there is only one, a step may run inside another's."""

    def __init__(self, num_stages: int) -> None:
        self.num_stages = num_stages
        self._changed = threading.Condition()
        self._num_entered = 0
        self._num_passed = [0] * num_stages

    def enter(self) -> int:
        """Return the number of a step that enters behind all others."""
        with self._changed:
            self._num_entered += 1
            return self._num_entered - 1

    @contextmanager
    def stage(self, stage: int, number: int) -> Iterator[float]:
        """Wait until a step may pass a stage, which is its own in the block; yield for how long, in seconds."""
        if self.num_stages == 1:
            yield 0.0
            return
        came_s = time.perf_counter()
        with self._changed:
            self._changed.wait_for(lambda: self._num_passed[stage] == number)
        try:
            yield time.perf_counter() - came_s
        finally:
            with self._changed:
                self._num_passed[stage] += 1
                self._changed.notify_all()

    def give_up(self, first_stage: int, number: int) -> None:
        """Let others pass the stages from ``first_stage`` on that a step does not come to."""
        for stage in range(first_stage, self.num_stages):
            with self.stage(stage, number):
                pass
