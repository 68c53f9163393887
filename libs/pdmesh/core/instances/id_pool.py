"""Pool of small numbers for objects that come and go: each new object gets the least free number."""

from __future__ import annotations

from collections.abc import Iterable
from heapq import heappop, heappush


class IdPool:
    """Pool of the numbers 1, 2, 3, …; returned numbers are used again first, the least of them before others."""

    def __init__(self) -> None:
        self._next = 1
        #: Heap of the returned numbers, all below `_next`.
        self._free: list[int] = []

    def take(self) -> int:
        """Take and return the least free number, in logarithmic time."""
        if self._free:
            return heappop(self._free)
        self._next += 1
        return self._next - 1

    def give_back(self, number: int) -> None:
        """Return a taken number to the pool."""
        heappush(self._free, number)

    def check_integrity(self, taken: Iterable[int]) -> None:
        """Compare with the numbers that are taken; AssertionError names the difference."""
        numbers = sorted([*self._free, *taken])
        assert numbers == list(range(1, self._next)), f"numbers {numbers} are free or in use, of 1 to {self._next - 1}"
