"""Stages of a stand-in engine: threads pass them one after the other, in the order in which they entered."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class Turns:
    """Each stage is one thread's at a time."""

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
    def stage(self, stage: int, number: int) -> Iterator[None]:
        """Wait until a step may pass a stage, which is its own in the block."""
        with self._changed:
            self._changed.wait_for(lambda: self._num_passed[stage] == number)
        try:
            yield
        finally:
            with self._changed:
                self._num_passed[stage] += 1
                self._changed.notify_all()

    def give_up(self, first_stage: int, number: int) -> None:
        """Let others pass the stages from ``first_stage`` on that a step does not come to."""
        for stage in range(first_stage, self.num_stages):
            with self.stage(stage, number):
                pass
