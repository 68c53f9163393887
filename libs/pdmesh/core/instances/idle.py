"""Idle granules: cached, in no live request's chain. Their tenants, and their order of eviction.

Each tenant has a line, the longest unused granule first. No eviction leaves a tenant less than its share of the
granules that stay idle. So no tenant flushes the cache of others, however much it sends. Of the tenants with more than
their share, the longest unused granule goes first.

A granule must not outlive the granules before it in its chain, and tenants may share the beginning of a chain. So
granules that several tenants used go after granules of one tenant. Granules without a known user go first: an instance
that registers reports its cache without the tenants. A user of the end of a chain is a user of the beginning, too.

Of one tenant's granules, *leased* ones go last. Leases do not change how many granules each tenant loses, because
leased granules count by their age, too. So a tenant's leases only cost the tenant itself.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from heapq import heapify, heappop, heapreplace
from itertools import chain, islice
from typing import Final

from pdmesh.model import PrefixHash

#: Tenants without granules and requests are forgotten once the lines exceed twice the last number by this.
_SPARE_LINES: Final = 64


#: No granule is leased.
NO_LEASES: Final[Mapping[PrefixHash, int]] = {}

#: Number of granules of protected chains after which no more chains are passed over for one eviction. Passing over one
#: takes 0.2 us.
_SPARED: Final = 8192


class IdleLine:
    """The idle granules of one tenant on one instance; also used for granules of no known or of several tenants.

    In these cases ``tenant`` is None. ``num_live`` counts the tenant's live requests, or its granules in use: the line
    is not forgotten while there are any. ``granules`` maps each granule to the number at which it was added, in order,
    and ``leased`` likewise the granules that go last.
    """

    # Not a dataclass: mypyc would leave __init__ to the interpreter.
    def __init__(self, tenant: str | None = None) -> None:
        self.tenant = tenant
        self.share = 1
        self.num_live = 0
        # An OrderedDict finds its first entry at once after many deletions in front.
        self.granules: OrderedDict[PrefixHash, int] = OrderedDict()
        self.leased: OrderedDict[PrefixHash, int] = OrderedDict()

    def __len__(self) -> int:
        return len(self.granules) + len(self.leased)

    @property
    def first_use(self) -> int:
        """Number at which the longest unused granule was added."""
        return min([next(iter(part.values())) for part in (self.granules, self.leased) if part])

    @property
    def next_evicted(self) -> PrefixHash:
        """The granule that the tenant loses next."""
        return next(iter(self.granules or self.leased))


class UseCounter:
    """Number of uses of granules so far. Instances that share a counter can compare the uses of their granules."""

    def __init__(self) -> None:
        self.number = 0


class IdleGranules:
    """The idle granules of one instance, in lines by tenant. ``line_by_granule`` must not be changed from outside."""

    def __init__(self, uses: UseCounter | None = None, leased: Mapping[PrefixHash, int] = NO_LEASES) -> None:
        """``leased`` has the granules that are leased at present."""
        self._leased = leased
        self._uses = UseCounter() if uses is None else uses
        self.unknown, self.shared = IdleLine(), IdleLine()
        # Public, because a call for each granule is slow.
        self.line_by_granule: dict[PrefixHash, IdleLine] = {}
        self._tenants: dict[str, IdleLine] = {}
        self._num_known_lines = 0

    def __len__(self) -> int:
        return len(self.line_by_granule)

    def __contains__(self, granule: PrefixHash) -> bool:
        return granule in self.line_by_granule

    @property
    def num_leased(self) -> int:
        """Number of idle granules with a lease."""
        return sum([len(line.leased) for line in self._tenants.values()]) if self._leased else 0

    def lines(self) -> dict[PrefixHash, IdleLine]:
        """Return the line of each granule, as a copy."""
        return dict(self.line_by_granule)

    def line_of(self, tenant: str | None, share: int) -> IdleLine:
        """Return the line of a tenant, created if necessary, and set its share; for None the line without a tenant."""
        if tenant is None:
            return self.unknown
        line = self._tenants.get(tenant)
        if line is None:
            line = self._tenants[tenant] = IdleLine(tenant)
        line.share = share
        return line

    def forget_tenants(self, in_use: Iterable[IdleLine] = ()) -> None:
        """Forget tenants without granules and live requests, if there are many lines. Lines ``in_use`` stay.

        Granules that are added to the line of a forgotten tenant are never evicted. So call this only before `line_of`.
        """
        if len(self._tenants) > 2 * self._num_known_lines + _SPARE_LINES:
            stay = set(in_use)
            self._tenants = {
                name: line for name, line in self._tenants.items() if len(line) or line.num_live or line in stay
            }
            self._num_known_lines = len(self._tenants)

    def line_like(self, line: IdleLine, others: IdleGranules) -> IdleLine:
        """Return the line here that corresponds to ``line`` of ``others``."""
        return self.shared if line is others.shared else self.line_of(line.tenant, line.share)

    def used_by(self, before: IdleLine, line: IdleLine) -> IdleLine:
        """Return the new line of a granule of line ``before`` that is used by ``line`` now.

        The shared line if both are known and differ.
        """
        if before is line or before is self.unknown:
            return line
        return before if line is self.unknown else self.shared

    def add(self, granule: PrefixHash, line: IdleLine) -> None:
        """Add a granule that was used just now."""
        self.add_all(((granule, line),))

    def add_all(self, granules: Iterable[tuple[PrefixHash, IdleLine]]) -> None:
        """Add granules that were used just now, in this order, each to its line."""
        number, line_by_granule, leased = self._uses.number, self.line_by_granule, self._leased
        for granule, line in granules:
            number += 1
            # A lease of a shared granule would cost other tenants.
            if leased and granule in leased and line.tenant is not None:
                line.leased[granule] = number
            else:
                line.granules[granule] = number
            line_by_granule[granule] = line
        self._uses.number = number

    def remove(self, granule: PrefixHash) -> IdleLine:
        """Remove a granule, and return its line."""
        line = self.line_by_granule.pop(granule)
        if line.granules.pop(granule, None) is None:
            del line.leased[granule]
        return line

    def end_leases(self, granules: Iterable[PrefixHash]) -> None:
        """Count leased granules, given in the order of their chain, as used just now, because their lease ended.

        Granules behind them may be in the cache, and must go before them.
        """
        here = [granule for granule in granules if granule in self.line_by_granule]
        for granule in reversed(here):
            line = self.line_by_granule[granule]
            if line.leased.pop(granule, None) is not None:
                self.add(granule, line)

    def spare(self, chains: Mapping[PrefixHash, Sequence[PrefixHash]], number: int) -> None:
        """Count chains as used just now that an eviction of ``number`` granules would reach.

        ``chains`` are named by their last granules. With at least `_SPARED` granules of such chains, others are evicted
        although they are named, since all granules may be in these chains.
        """
        for line in self._tenants.values():
            found: list[Sequence[PrefixHash]] = []
            spared: set[PrefixHash] = set()
            num_left = number
            for granule in line.granules:
                if num_left <= 0 or len(spared) >= _SPARED:
                    break
                if granule in chains:
                    found.append(chains[granule])
                    spared.update(chains[granule])
                elif granule not in spared:
                    num_left -= 1
            for passed in found:
                for granule in reversed(passed):
                    if granule in line.granules:
                        self._uses.number += 1
                        line.granules[granule] = self._uses.number
                        line.granules.move_to_end(granule)

    def take(self, number: int) -> dict[PrefixHash, IdleLine]:
        """Remove ``number`` granules, or all if there are fewer, by order of eviction. Return each with its line."""
        number = min(number, len(self.line_by_granule))
        taken = self._take_first(self.unknown, number)
        taken |= self._take_fairly(number - len(taken))
        taken |= self._take_first(self.shared, number - len(taken))
        return taken

    def _take_first(self, line: IdleLine, number: int) -> dict[PrefixHash, IdleLine]:
        taken = list(islice(chain(line.granules, line.leased), number))
        for granule in taken:
            self.remove(granule)
        return dict.fromkeys(taken, line)

    def _take_fairly(self, number: int) -> dict[PrefixHash, IdleLine]:
        lines = [line for line in self._tenants.values() if len(line)] if number else []
        if len(lines) < 2:
            return self._take_first(lines[0], number) if lines else {}
        total, shares = sum([len(line) for line in lines]), sum([line.share for line in lines])
        number = min(number, total)
        spare = [len(line) - (total - number) * line.share // shares for line in lines]
        heap = [(line.first_use, index) for index, line in enumerate(lines) if spare[index] > 0]
        heapify(heap)
        taken: dict[PrefixHash, IdleLine] = {}
        while len(taken) < number:
            _, index = heap[0]
            granule = lines[index].next_evicted
            taken[granule] = self.remove(granule)
            spare[index] -= 1
            if spare[index] and len(lines[index]):
                heapreplace(heap, (lines[index].first_use, index))
            else:
                heappop(heap)
        return taken

    def last_use(self, granule: PrefixHash) -> int:
        """Return the number of a granule's last use; the latest number if the granule is not idle."""
        line = self.line_by_granule.get(granule)
        return self._uses.number if line is None else line.granules.get(granule) or line.leased[granule]

    def num_older(self, number: int, most: int) -> int:
        """Return how many granules without a lease were last used before the use ``number``, at most ``most``."""
        found = 0
        for line in (self.unknown, self.shared, *self._tenants.values()):
            for last_use in line.granules.values():
                if last_use >= number or found == most:
                    break
                found += 1
        return found

    def clear(self) -> None:
        """Remove all granules. The lines remain."""
        for line in (self.unknown, self.shared, *self._tenants.values()):
            line.granules.clear()
            line.leased.clear()
        self.line_by_granule.clear()

    def check_integrity(self, name: str) -> None:
        """Check that the lines agree with the index and are in order; AssertionError names the difference."""
        lines = [self.unknown, self.shared, *self._tenants.values()]
        assert sum([len(line) for line in lines]) == len(self.line_by_granule), f"{name}: idle granules without a line"
        for line in lines:
            for part in (line.granules, line.leased):
                numbers = list(part.values())
                assert numbers == sorted(numbers), f"{name}: a line is out of order"
                assert all(self.line_by_granule.get(granule) is line for granule in part), f"{name}: in another line"
