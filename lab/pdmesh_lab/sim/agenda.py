"""Virtual time: appointments, in order."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from heapq import heappop, heappush


@dataclass(slots=True, eq=False)
class Timer:
    """An action at a set time, unless it is cancelled."""

    action: Callable[[], None] | None

    def cancel(self) -> None:
        self.action = None


class Agenda:
    """Heap of appointments with key (time, sequence). Appointments at the same time run in the order they were made."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._heap: list[tuple[float, int, Timer]] = []
        self._sequence = 0

    def at(self, at_s: float, action: Callable[[], None]) -> Timer:
        assert at_s >= self.now_s, f"{at_s} s is over at {self.now_s} s"
        appointment = Timer(action)
        heappush(self._heap, (at_s, self._sequence, appointment))
        self._sequence += 1
        return appointment

    @property
    def next_s(self) -> float | None:
        """Time of the next appointment; None if there is none."""
        while self._heap and self._heap[0][2].action is None:
            heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def advance(self) -> bool:
        """Move the clock to the next appointment and run it. Return False if there is none."""
        while self._heap:
            at_s, _, appointment = heappop(self._heap)
            if appointment.action is not None:
                self.now_s = at_s
                appointment.action()
                return True
        return False
