"""The cached blocks of an instance, with the number of sequences that share each, and its offload tier.

The cache only obeys. It checks the beliefs of the core: a reused granule is cached, a dropped granule has no owner, and
the tier has the granules that are loaded, and room for the offloaded ones.
"""

from __future__ import annotations

from collections.abc import Iterable

from pdmesh.model import PrefixHash, PrefixHashes, blocks_of_granule
from pdmesh.plans import Evictions


class CachedPrefix:
    """The blocks of one sequence that are cached, or may be."""

    __slots__ = ("cached", "chain", "num_granules", "num_loaded")

    def __init__(self, chain: PrefixHashes = (), num_loaded: int = 0) -> None:
        """``chain``: granules of the prompt; ``num_loaded``: the last ones of the reused, which the tier has."""
        self.chain = chain
        self.num_loaded = num_loaded
        self.num_granules = 0  # granules whose KV is here
        self.cached: list[PrefixHash] = []  # granules that other sequences may share

    def clear(self) -> None:
        """Forget the chain: its blocks were freed."""
        self.chain = ()


class BlockCache:
    """The cache of one instance."""

    def __init__(self, block_size: int, num_offload_granules: int = 0) -> None:
        """``num_offload_granules`` is what its offload tier holds."""
        self._granule_blocks = blocks_of_granule(block_size)
        self._owners: dict[PrefixHash, int] = {}  # requests that have it in their blocks; let go of longest ago first
        self._before: dict[PrefixHash, PrefixHash | None] = {}  # granule before each cached one in its chain
        self._unreported: set[PrefixHash] = set()  # owned ones that no scheduler knows of
        self._num_shared = 0  # with an owner
        self._num_offload_granules = num_offload_granules
        self._offloaded: dict[PrefixHash, None] = {}  # used longest ago first
        self._lost: set[PrefixHash] = set()  # from there, by itself, and not offloaded again

    @property
    def num_blocks(self) -> int:
        """Blocks that are kept, those that requests have, too, among them."""
        return len(self._owners) * self._granule_blocks

    @property
    def num_idle_blocks(self) -> int:
        """Those of them that no request has."""
        return (len(self._owners) - self._num_shared) * self._granule_blocks

    @property
    def granules(self) -> PrefixHashes:
        """All that a scheduler may know of, the longest unused first."""
        return tuple([granule for granule in self._owners if granule not in self._unreported])

    def reported(self, prefix: CachedPrefix) -> PrefixHashes:
        """Return the cached granules of a sequence that a scheduler may know of."""
        return tuple([granule for granule in prefix.cached if granule not in self._unreported])

    @property
    def offloaded(self) -> PrefixHashes:
        """All that the tier has, the longest unused first."""
        return tuple(self._offloaded)

    def num_cached_blocks(self, prefix: CachedPrefix) -> int:
        """Return the number of a sequence's blocks that are cached."""
        return len(prefix.cached) * self._granule_blocks

    def missing(self, prefix: CachedPrefix, num_reused: int) -> str:
        """Return why a sequence cannot reuse the first ``num_reused`` granules; empty if it can."""
        num_shared = num_reused - prefix.num_loaded
        if any(granule not in self._owners for granule in prefix.chain[:num_shared]):
            return "a granule that is to be reused is not cached"
        if any(granule not in self._offloaded for granule in prefix.chain[num_shared:num_reused]):
            return "the offload tier lacks a granule that is to be loaded"
        return ""

    def share(self, prefix: CachedPrefix, num_reused: int) -> int:
        """Let a sequence share the first granules of its chain; return the number of shared blocks.

        The granules that come from the tier, the last ones, are in the sequence's own blocks.
        """
        num_shared = num_reused - prefix.num_loaded
        for granule in prefix.chain[:num_shared]:
            self._own(prefix, granule)
        prefix.num_granules = num_shared
        return num_shared * self._granule_blocks

    def computed(self, prefix: CachedPrefix, num_granules: int) -> int:
        """Cache the first granules of a sequence; return the number of blocks that were not cached before."""
        num_before, first = len(prefix.cached), prefix.num_granules
        before = prefix.chain[first - 1] if 0 < first <= len(prefix.chain) else None
        for granule in prefix.chain[first:num_granules] if self._granule_blocks else ():
            if granule not in self._owners:
                self._owners[granule] = 0
                self._own(prefix, granule)
            self._before[granule] = before
            self._unreported.discard(granule)
            before = granule
        prefix.num_granules = max(prefix.num_granules, num_granules)
        return (len(prefix.cached) - num_before) * self._granule_blocks

    def drawn(self, granules: PrefixHashes) -> tuple[PrefixHashes, int]:
        """Return which of the granules that a request drew stay when it ends, and how many of them are kept already.

        One that is kept without what is before it is about to be dropped.
        """
        is_kept = [granule in self._owners for granule in granules]
        num_known = is_kept.index(False) if False in is_kept else len(granules)
        num_staying = is_kept.index(True, num_known) if True in is_kept[num_known:] else len(granules)
        return granules[:num_staying], num_known

    def end(self, prefix: CachedPrefix, drawn: PrefixHashes) -> int:
        """Give back a sequence's blocks, ``drawn`` among them; return the number of blocks that stay cached."""
        num_cached = len(prefix.cached)
        before = prefix.chain[-1] if prefix.chain else None
        for granule in drawn if self._granule_blocks else ():
            self._before[granule] = before
            self._unreported.discard(granule)
            before = granule
        for granule in reversed(drawn) if self._granule_blocks else ():
            self._owners[granule] = self._owners.pop(granule, 0)
        own = set(prefix.cached)
        for granule in reversed(prefix.chain):
            if granule in self._owners:  # what is behind it must not outlive it, whoever has it
                number = self._owners.pop(granule) - (granule in own)
                self._num_shared -= not number and granule in own
                if number or granule not in self._unreported:
                    self._owners[granule] = number
                else:
                    self._forget(granule)
        prefix.cached.clear()
        return num_cached * self._granule_blocks

    def make_room(self, room: Evictions) -> PrefixHashes:
        """Evict what a command names.

        Return what the tier loses for it: the scheduler may not know of all that is there, if it heard late of a loss.
        """
        for granule in room.evict:
            has_it = self._offloaded.pop(granule, self._lost) is None
            assert has_it or granule in self._lost, "a granule is to be evicted that the tier does not have"
        for granule in (*room.drop, *room.offload):
            assert not self._owners.pop(granule), "a granule is to be dropped that requests have"
            self._forget(granule)
            if granule in self._offloaded:
                self._offloaded[granule] = self._offloaded.pop(granule)
        for granule in room.offload:
            assert granule not in self._offloaded, "a granule is to be offloaded again"
            self._offloaded[granule] = None
            self._lost.discard(granule)
        lost = tuple(self._offloaded)[: max(0, len(self._offloaded) - self._num_offload_granules)]
        self.lose(lost)
        return lost

    def drop_headless(self) -> None:
        """Drop granules without the beginning of their chains: the next scheduler will not know of these.

        Sequences that own such granules keep the blocks to their end.
        """
        while headless := [granule for granule in self.granules if not self._has_head(granule)]:
            for granule in headless:
                if self._owners[granule]:
                    self._unreported.add(granule)
                else:
                    del self._owners[granule]
                    self._forget(granule)

    def _has_head(self, granule: PrefixHash) -> bool:
        before = self._before[granule]
        return before is None or (before in self._owners and before not in self._unreported)

    def _forget(self, granule: PrefixHash) -> None:
        del self._before[granule]
        self._unreported.discard(granule)

    def lose(self, granules: Iterable[PrefixHash]) -> None:
        """Lose granules of the tier."""
        for granule in granules:
            del self._offloaded[granule]
            self._lost.add(granule)

    def lost_of(self, prefix: CachedPrefix, num_reused: int) -> PrefixHashes:
        """Return the granules that a sequence is to load, of the first ``num_reused``, and that the tier has lost."""
        to_load = prefix.chain[num_reused - prefix.num_loaded : num_reused]
        return tuple([granule for granule in to_load if granule in self._lost])

    def _own(self, prefix: CachedPrefix, granule: PrefixHash) -> None:
        self._num_shared += not self._owners[granule]
        self._owners[granule] += 1
        prefix.cached.append(granule)
