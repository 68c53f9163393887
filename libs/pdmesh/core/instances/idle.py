"""Granules that are kept and that no live request has: whose they are, and which go first when room is needed.

Each tenant has a line, the longest unused first. From a tenant nothing is taken while that would leave it less than its
share of what stays idle: so nobody flushes what others keep, however much it sends. Of those that have more the longest
unused granule goes.

What is behind a granule must not outlive it, and a chain can be several tenants' where these share. So what several
have used goes after what one alone has, and what nobody is known to have used goes first: as an instance registers, it
says what it keeps, and not whose that is. Whoever uses the end of a chain uses its beginning.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from heapq import heapify, heappop, heapreplace
from itertools import islice
from typing import Final

from pdmesh.model import PrefixHash

#: Tenants with nothing there are forgotten when there are twice as many lines, and so many more, as at the last time.
_SPARE_LINES: Final = 64


class IdleLine:
    """A tenant's idle granules on one instance, and what stands for those of nobody, or of several."""

    # Not a dataclass: mypyc would leave __init__ to the interpreter.
    def __init__(self, tenant: str | None = None) -> None:
        self.tenant = tenant  # None: nobody's, or several tenants'
        self.share = 1
        self.num_live = 0  # requests of it that are there, or granules that are used: it is not forgotten
        # With when each came, in order. (An OrderedDict finds its first entry at once after many deletions in front.)
        self.granules: OrderedDict[PrefixHash, int] = OrderedDict()

    @property
    def first(self) -> tuple[int, PrefixHash]:
        """When its longest unused granule came, and that."""
        granule, number = next(iter(self.granules.items()))
        return number, granule


class IdleGranules:
    """Keeps the idle granules of one instance, and says which go first."""

    def __init__(self) -> None:
        self.unknown, self.shared = IdleLine(), IdleLine()
        self.line_by_granule: dict[PrefixHash, IdleLine] = {}  # to be looked at alone: a call for each granule is slow
        self._tenants: dict[str, IdleLine] = {}
        self._num_added = 0
        self._num_known_lines = 0

    def __len__(self) -> int:
        return len(self.line_by_granule)

    def __contains__(self, granule: PrefixHash) -> bool:
        return granule in self.line_by_granule

    def lines(self) -> dict[PrefixHash, IdleLine]:
        """Return all of them, with whose they are."""
        return dict(self.line_by_granule)

    def line_of(self, tenant: str | None, share: int) -> IdleLine:
        """Return the line of a tenant, for a request of it; None: nobody knows whose that is."""
        if tenant is None:
            return self.unknown
        line = self._tenants.get(tenant)
        if line is None:
            if len(self._tenants) > 2 * self._num_known_lines + _SPARE_LINES:
                self._tenants = {name: line for name, line in self._tenants.items() if line.granules or line.num_live}
                self._num_known_lines = len(self._tenants)
            line = self._tenants[tenant] = IdleLine(tenant)
        line.share = share
        return line

    def line_like(self, line: IdleLine, others: IdleGranules) -> IdleLine:
        """Return the line here of whose granules are in a line of others."""
        return self.shared if line is others.shared else self.line_of(line.tenant, line.share)

    def used_by(self, before: IdleLine, line: IdleLine) -> IdleLine:
        """Return whose a granule is that was one's before, and is used by another now, or by the same."""
        if before is line or before is self.unknown:
            return line
        return before if line is self.unknown else self.shared

    def add(self, granule: PrefixHash, line: IdleLine) -> None:
        """Add one that was used just now."""
        self._num_added += 1
        line.granules[granule] = self._num_added
        self.line_by_granule[granule] = line

    def add_all(self, granules: Iterable[tuple[PrefixHash, IdleLine]]) -> None:
        """Add some that were used just now, in this order, with whose they are."""
        number, line_by_granule = self._num_added, self.line_by_granule
        for granule, line in granules:
            number += 1
            line.granules[granule] = number
            line_by_granule[granule] = line
        self._num_added = number

    def remove(self, granule: PrefixHash) -> IdleLine:
        """Take one out, and return whose it was."""
        line = self.line_by_granule.pop(granule)
        del line.granules[granule]
        return line

    def take(self, number: int) -> dict[PrefixHash, IdleLine]:
        """Take so many out, or all there are: those that go first, with whose they were."""
        number = min(number, len(self.line_by_granule))
        taken = self._take_first(self.unknown, number)
        taken |= self._take_fairly(number - len(taken))
        taken |= self._take_first(self.shared, number - len(taken))
        return taken

    def _take_first(self, line: IdleLine, number: int) -> dict[PrefixHash, IdleLine]:
        taken, line_by_granule = list(islice(line.granules, number)), self.line_by_granule
        for granule in taken:
            del line.granules[granule], line_by_granule[granule]
        return dict.fromkeys(taken, line)

    def _take_fairly(self, number: int) -> dict[PrefixHash, IdleLine]:
        lines = [line for line in self._tenants.values() if line.granules] if number else []
        if len(lines) < 2:
            return self._take_first(lines[0], number) if lines else {}
        total, shares = sum([len(line.granules) for line in lines]), sum([line.share for line in lines])
        number = min(number, total)
        spare = [len(line.granules) - (total - number) * line.share // shares for line in lines]
        heap = [(*line.first, index) for index, line in enumerate(lines) if spare[index] > 0]
        heapify(heap)
        taken: dict[PrefixHash, IdleLine] = {}
        while len(taken) < number:
            _, granule, index = heap[0]
            taken[granule] = self.remove(granule)
            spare[index] -= 1
            if spare[index] and lines[index].granules:
                heapreplace(heap, (*lines[index].first, index))
            else:
                heappop(heap)
        return taken

    def clear(self) -> None:
        for line in (self.unknown, self.shared, *self._tenants.values()):
            line.granules.clear()
        self.line_by_granule.clear()

    def check_integrity(self, name: str) -> None:
        """AssertionError names what does not balance."""
        lines = [self.unknown, self.shared, *self._tenants.values()]
        assert sum([len(line.granules) for line in lines]) == len(self.line_by_granule), (
            f"{name}: idle granules without a line"
        )
        for line in lines:
            numbers = list(line.granules.values())
            assert numbers == sorted(numbers), f"{name}: a line is out of order"
            assert all(self.line_by_granule.get(granule) is line for granule in line.granules), (
                f"{name}: in another line"
            )
