"""KV in an instance's host memory and on its disk, for requests to come: the *offload tier* behind the cache.

What the cache has no room for goes there (*offloaded*), and what a request can use of it comes back (*loaded*); it
stays in the tier as well, so that giving it up in the cache again costs no copy. The core is the truth of this, too:
its commands say what is offloaded, loaded, and *evicted* for room. The tier has lines of its tenants like those of the
cache (`pdmesh.core.instances.idle`). What live requests have in their chains is never evicted: it may be on its way.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from pdmesh.core.instances.idle import IdleGranules, IdleLine
from pdmesh.core.instances.kept_where import GranuleIndex
from pdmesh.model import PrefixHash
from pdmesh.plans import Evictions


class OffloadedHere:
    """What the tier of one instance keeps, ``capacity`` granules at most."""

    def __init__(self, where: GranuleIndex, bit: int, capacity: int) -> None:
        """``bit`` is the instance's in the index."""
        self.capacity = capacity
        self._where = where
        self._bit = bit
        self._in_use: dict[PrefixHash, IdleLine] = {}  # in live requests' chains, by whose they are
        self._idle = IdleGranules()

    def __len__(self) -> int:
        return len(self._in_use) + len(self._idle)

    def __contains__(self, granule: PrefixHash) -> bool:
        return granule in self._in_use or granule in self._idle

    def use(self, chain: Iterable[PrefixHash], line: IdleLine, of: IdleGranules) -> None:
        """A request has these in its chain; ``line`` is its tenant's in the cache."""
        idle, in_use = self._idle, self._in_use
        for granule in chain:
            if granule in idle:
                before = idle.remove(granule)
            elif granule in in_use:
                before = in_use[granule]
                before.num_live -= 1
            else:
                continue
            mine = in_use[granule] = idle.used_by(before, idle.line_like(line, of))
            mine.num_live += 1

    def let_go(self, granule: PrefixHash) -> None:
        """No live request has it any more."""
        line = self._in_use.pop(granule, None)
        if line is not None:
            line.num_live -= 1
            self._idle.add(granule, line)

    def take_in(self, given_up: Mapping[PrefixHash, IdleLine], of: IdleGranules) -> Evictions:
        """Take what is given up in the cache, in this order, and whose that was; as much of its end as there is room.

        What is here is used last by now.
        """
        idle = self._idle
        fresh: dict[PrefixHash, IdleLine] = {}
        for granule, line in given_up.items():
            mine = idle.line_like(line, of)
            if granule in idle:
                idle.add(granule, idle.used_by(idle.remove(granule), mine))
            else:
                fresh[granule] = mine
        num_wanted = min(len(fresh), self.capacity)
        evicted = idle.take(max(0, len(self) + num_wanted - self.capacity))
        self._where.discard_all(evicted, self._bit)
        num_taken = min(num_wanted, self.capacity - len(self))
        offloaded = tuple(fresh)[len(fresh) - num_taken :]
        for granule in offloaded:
            idle.add(granule, fresh[granule])
        self._where.add_all(offloaded, self._bit)
        taken = set(offloaded)
        dropped = tuple([granule for granule in given_up if granule not in taken])
        return Evictions(drop=dropped, offload=offloaded, evict=tuple(evicted))

    def lose(self, granules: Iterable[PrefixHash]) -> None:
        """The instance has these no more, for a reason of its own."""
        for granule in granules:
            if granule in self._idle:
                self._idle.remove(granule)
            elif granule in self._in_use:
                self._in_use.pop(granule).num_live -= 1
            else:
                continue
            self._where.discard(granule, self._bit)

    def replace(self, kept: Sequence[PrefixHash], users: Mapping[PrefixHash, int]) -> None:
        """The instance keeps exactly this, the longest unused first; ``users`` are live requests that have it."""
        known = self._idle.lines() | self._in_use
        self.clear()
        for granule in list(dict.fromkeys(kept))[-self.capacity :]:
            line = known.get(granule, self._idle.unknown)
            if granule in users:
                self._in_use[granule] = line
                line.num_live += 1
            else:
                self._idle.add(granule, line)
            self._where.add(granule, self._bit)

    def clear(self) -> None:
        """Forget all."""
        self.lose([*self._in_use, *self._idle.lines()])

    def check_integrity(self, name: str, users: Mapping[PrefixHash, int]) -> None:
        """AssertionError names what does not balance; ``users`` are live requests that have each granule."""
        idle = self._idle.lines().keys()
        self._idle.check_integrity(name)
        assert len(self) <= self.capacity, f"{name}: {len(self)} of {self.capacity} granules offloaded"
        assert self._in_use.keys() <= users.keys(), f"{name}: offloaded granules without a user are in use"
        assert not idle & users.keys(), f"{name}: idle offloaded granules have users"
        assert self._where.of(self._bit) == self._in_use.keys() | idle, f"{name}: the index has other offloaded ones"
