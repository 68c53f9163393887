"""Small numbers for what comes and goes: each newcomer gets the least that is free."""

from __future__ import annotations

from collections.abc import Iterable
from heapq import heappop, heappush


class Numbers:
    """Gives out 1, 2, 3, …; a number that was given back goes to the next newcomer, the least first."""

    def __init__(self) -> None:
        self._next = 1
        self._free: list[int] = []  # a heap of those below `_next` that were given back

    def take(self) -> int:
        """Return the least number that nobody has, in logarithmic time."""
        if self._free:
            return heappop(self._free)
        self._next += 1
        return self._next - 1

    def give_back(self, number: int) -> None:
        """Let the next newcomer have a number that `take` gave."""
        heappush(self._free, number)

    def check_integrity(self, taken: Iterable[int]) -> None:
        """Compare with the numbers that are taken; AssertionError names what differs."""
        numbers = sorted([*self._free, *taken])
        assert numbers == list(range(1, self._next)), f"numbers {numbers} are free or taken, of 1 to {self._next - 1}"
