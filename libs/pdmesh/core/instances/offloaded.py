"""The *offload tier* behind an instance's cache: KV in host memory and on disk, for later requests.

Granules that the cache has no room for are *offloaded*, and granules that a request can use are *loaded*. A loaded
granule stays in the tier as well, so that evicting it from the cache again costs no copy. The core decides about the
tier, too: its commands say which granules are offloaded, loaded, and *evicted* for room. The tier has lines by tenant,
as the cache has (`pdmesh.core.instances.idle`). Granules in live requests' chains are never evicted: a load of them may
be under way.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from pdmesh.core.instances.cache_index import GranuleIndex
from pdmesh.core.instances.idle import IdleGranules, IdleLine
from pdmesh.model import PrefixHash
from pdmesh.plans import Evictions


class OffloadedHere:
    """Granules in the tier of one instance, at most ``capacity``."""

    def __init__(self, where: GranuleIndex, bit: int, capacity: int) -> None:
        """``bit`` is the bit of the instance in the index ``where``."""
        self.capacity = capacity
        self._where = where
        self._bit = bit
        #: Line of each granule in a live request's chain.
        self._in_use: dict[PrefixHash, IdleLine] = {}
        self._idle = IdleGranules()

    def __len__(self) -> int:
        return len(self._in_use) + len(self._idle)

    def __contains__(self, granule: PrefixHash) -> bool:
        return granule in self._in_use or granule in self._idle

    def use(self, chain: Iterable[PrefixHash], line: IdleLine, of: IdleGranules) -> None:
        """Mark a live request's granules as in use by the tenant of ``line``, a line of the cache's granules ``of``."""
        idle, in_use = self._idle, self._in_use
        idle.forget_tenants()
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
        """Make a granule idle that no live request has any more."""
        line = self._in_use.pop(granule, None)
        if line is not None:
            line.num_live -= 1
            self._idle.add(granule, line)

    def take_in(self, given_up: Mapping[PrefixHash, IdleLine], of: IdleGranules) -> Evictions:
        """Offload granules that the cache evicts, given with their lines, and evict idle ones of the tier for room.

        Granules that are in the tier already count as used just now. If there is room for a part only, the last ones
        are offloaded. Returns the dropped, offloaded and evicted granules, for the command.
        """
        idle = self._idle
        idle.forget_tenants()
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
        """Remove granules that the instance lost or dropped by itself."""
        for granule in granules:
            if granule in self._idle:
                self._idle.remove(granule)
            elif granule in self._in_use:
                self._in_use.pop(granule).num_live -= 1
            else:
                continue
            self._where.discard(granule, self._bit)

    def replace(self, kept: Sequence[PrefixHash], users: Mapping[PrefixHash, int]) -> None:
        """Replace the granules by the instance's report, the longest unused first.

        ``users`` counts the live requests of each granule. A granule known before keeps its line.
        """
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
        """Remove all granules."""
        self.lose([*self._in_use, *self._idle.lines()])

    def check_integrity(self, name: str, users: Mapping[PrefixHash, int]) -> None:
        """Check capacity, users and index; AssertionError names the difference.

        ``users`` counts the live requests of each granule.
        """
        idle = self._idle.lines().keys()
        self._idle.check_integrity(name)
        assert len(self) <= self.capacity, f"{name}: {len(self)} of {self.capacity} granules offloaded"
        assert self._in_use.keys() <= users.keys(), f"{name}: offloaded granules without a user are in use"
        assert not idle & users.keys(), f"{name}: idle offloaded granules have users"
        assert self._where.of(self._bit) == self._in_use.keys() | idle, f"{name}: the index has other offloaded ones"
