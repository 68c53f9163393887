"""Sorted whole numbers that come and go, for queries of the least and the greatest."""

from __future__ import annotations

from bisect import bisect_left, insort


class Lengths:
    """A sorted bag of lengths, in tokens or blocks."""

    def __init__(self) -> None:
        self._sorted: list[int] = []

    def __len__(self) -> int:
        return len(self._sorted)

    def add(self, length: int) -> None:
        insort(self._sorted, length)

    def remove(self, length: int) -> None:
        """Remove one entry of this length, which must be present."""
        index = bisect_left(self._sorted, length)
        assert self._sorted[index] == length, f"there is no {length}"
        del self._sorted[index]

    @property
    def least(self) -> int:
        """The least length; 0 without one."""
        return self._sorted[0] if self._sorted else 0

    @property
    def greatest(self) -> int:
        """The greatest length; 0 without one."""
        return self._sorted[-1] if self._sorted else 0

    def all(self) -> list[int]:
        """Return all lengths in ascending order."""
        return list(self._sorted)
