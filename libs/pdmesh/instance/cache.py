"""The cached blocks of an instance, with the number of sequences that share each, and the offload tier.

The cache only obeys the core, and checks the core's view: reused granules are cached, evicted granules have no owner,
and the tier has the granules to load.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from pdmesh.core.instances.kept_chains import jumps_of
from pdmesh.kv_layout import blocks_of_granule
from pdmesh.model import Jumps, PrefixHash, PrefixHashes
from pdmesh.plans import Evictions


class CachedPrefix:
    """Cached and cacheable blocks of one sequence.

    ``num_granules``: number of granules whose KV is here.
    ``cached``: granules that other sequences may share.
    ``num_computed``: number of granules whose KV was computed here, or has come; 0 if none was.
    """

    __slots__ = ("cached", "chain", "num_computed", "num_granules", "num_loaded", "states")

    def __init__(self, chain: PrefixHashes = (), num_loaded: int = 0, states: tuple[int, ...] = ()) -> None:
        """``chain``: granules of the prompt. ``num_loaded``: number of the last reused granules, found in the tier.

        ``states``: numbers, from 1 on, of the granules whose states are cached, too.
        """
        self.chain = chain
        self.num_loaded = num_loaded
        self.states = states
        self.num_computed = 0
        self.num_granules = 0
        self.cached: list[PrefixHash] = []

    def clear(self) -> None:
        """Forget the prompt's granules, because their blocks were freed. No further granules are cached."""
        self.chain = ()


class BlockCache:
    """The prefix cache of one instance.

    ``_owners`` counts the sequences that have a granule in their blocks; ``_num_shared`` counts granules with an owner.
    ``_before`` has each cached granule's predecessor in the chain, and ``_unreported`` owned granules that no scheduler
    knows. ``_lost`` has granules that the tier lost by itself and that were not offloaded again. Granules are in order
    of use, the least recently used first. ``states`` has the granules with a cached state.
    """

    def __init__(self, block_size: int, num_offload_granules: int = 0, *, has_states: bool = False) -> None:
        """``num_offload_granules`` is the capacity of the offload tier."""
        self._has_states = has_states
        self.states: set[PrefixHash] = set()
        self._granule_blocks = blocks_of_granule(block_size)
        self._owners: dict[PrefixHash, int] = {}
        self._before: dict[PrefixHash, PrefixHash | None] = {}
        self._unreported: set[PrefixHash] = set()
        self._num_shared = 0
        self._num_offload_granules = num_offload_granules
        self._offloaded: dict[PrefixHash, None] = {}
        self._lost: set[PrefixHash] = set()

    @property
    def num_blocks(self) -> int:
        """Number of cached blocks, including blocks that sequences share."""
        return len(self._owners) * self._granule_blocks

    @property
    def num_idle_blocks(self) -> int:
        """Number of cached blocks without an owner."""
        return (len(self._owners) - self._num_shared) * self._granule_blocks

    @property
    def granules(self) -> PrefixHashes:
        """All cached granules that a scheduler may know, the least recently used first."""
        return tuple([granule for granule in self._owners if granule not in self._unreported])

    @property
    def jumps(self) -> Jumps:
        """Return the jumps of `granules` (`pdmesh.core.instances.kept_chains`)."""
        return jumps_of(self._before, self.granules)

    @property
    def reported_states(self) -> PrefixHashes:
        """The granules with a cached state that a scheduler may know."""
        return tuple([granule for granule in self.granules if granule in self.states])

    def reported(self, prefix: CachedPrefix) -> PrefixHashes:
        """Return the cached granules of a sequence, except granules that no scheduler knows."""
        return tuple([granule for granule in prefix.cached if granule not in self._unreported])

    @property
    def offloaded(self) -> PrefixHashes:
        """All granules of the tier, the least recently used first."""
        return tuple(self._offloaded)

    def num_cached_blocks(self, prefix: CachedPrefix) -> int:
        """Return the number of a sequence's blocks that are cached."""
        return len(prefix.cached) * self._granule_blocks

    def missing(self, prefix: CachedPrefix, num_reused: int, *, computes: bool = False) -> str:
        """Return why a sequence cannot reuse the first ``num_reused`` granules; empty if it can.

        A sequence that ``computes`` the tokens behind them needs their state.
        """
        if computes and self._has_states and num_reused and prefix.chain[num_reused - 1] not in self.states:
            return "the state behind the cached blocks to reuse is missing"
        num_shared = num_reused - prefix.num_loaded
        if any(granule not in self._owners for granule in prefix.chain[:num_shared]):
            return "a cached block to reuse is missing"
        if any(granule not in self._offloaded for granule in prefix.chain[num_shared:num_reused]):
            return "the offload tier lacks a cached block to load"
        return ""

    def share(self, prefix: CachedPrefix, num_reused: int) -> int:
        """Let a sequence share the first granules of its chain; return the number of shared blocks.

        The last reused granules, which come from the tier, get blocks of the sequence's own.
        """
        num_shared = num_reused - prefix.num_loaded
        for granule in prefix.chain[:num_shared]:
            self._own(prefix, granule)
        prefix.num_granules = num_shared
        return num_shared * self._granule_blocks

    def computed(self, prefix: CachedPrefix, num_granules: int) -> int:
        """Cache the first granules of a sequence; return the number of newly cached blocks."""
        num_before, first = len(prefix.cached), prefix.num_granules
        before = prefix.chain[first - 1] if 0 < first <= len(prefix.chain) else None
        for granule in prefix.chain[first:num_granules] if self._granule_blocks else ():
            if granule not in self._owners:
                self._owners[granule] = 0
                self._own(prefix, granule)
            self._before[granule] = before
            self._unreported.discard(granule)
            before = granule
        prefix.num_computed = prefix.num_granules = max(prefix.num_granules, num_granules)
        for number in prefix.states:
            if number <= num_granules and prefix.chain[number - 1] in prefix.cached:
                self.states.add(prefix.chain[number - 1])
        return (len(prefix.cached) - num_before) * self._granule_blocks

    def drawn(self, granules: PrefixHashes) -> tuple[PrefixHashes, int]:
        """Return the drawn granules that stay cached when a request ends, and how many of them are cached already.

        A granule that is cached without its predecessor is about to be evicted, so it ends the result.
        """
        is_kept = [granule in self._owners for granule in granules]
        num_known = is_kept.index(False) if False in is_kept else len(granules)
        num_staying = is_kept.index(True, num_known) if True in is_kept[num_known:] else len(granules)
        return granules[:num_staying], num_known

    def end_states(self, prefix: CachedPrefix, drawn: PrefixHashes) -> PrefixHashes:
        """Cache the state behind the last granule of a sequence that ends, and asked states; return the new ones.

        Granules of the output that stay cached, ``drawn``, follow the prompt's.
        """
        if not self._has_states or not self._granule_blocks:
            return ()
        granules = (*prefix.chain[: prefix.num_computed], *drawn)
        numbers = sorted({len(granules), *[number for number in prefix.states if number <= len(granules)]})
        ends = [granules[number - 1] for number in numbers if number]
        new = [each for each in ends if each not in self.states and (each in self._owners or each in drawn)]
        self.states.update(new)
        return tuple(new)

    def end(self, prefix: CachedPrefix, drawn: PrefixHashes) -> int:
        """Free a sequence's blocks, and cache the granules ``drawn``.

        Returns the number of blocks that the sequence had in the cache. The chain's granules become the most recently
        used ones, the first granule last, so that no granule outlives its predecessor. Unreported granules without
        another owner leave the cache.
        """
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
            if granule in self._owners:
                number = self._owners.pop(granule) - (granule in own)
                self._num_shared -= not number and granule in own
                if number or granule not in self._unreported:
                    self._owners[granule] = number
                else:
                    self._forget(granule)
        prefix.cached.clear()
        return num_cached * self._granule_blocks

    def make_room(self, room: Evictions) -> PrefixHashes:
        """Evict the granules that a command names.

        Returns the granules that the tier loses by this. There may be some, since the scheduler may not know all
        granules in the tier if a report of a loss came late.
        """
        self.states.difference_update(room.states)
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
        """Evict granules without the beginning of their chains, because the next scheduler will not know them.

        Sequences that own such granules keep the blocks to their end.
        """
        after: defaultdict[PrefixHash | None, list[PrefixHash]] = defaultdict(list)
        for granule, before in self._before.items():
            after[before].append(granule)
        headless = [before for before in after if before is not None and not self._is_reported(before)]
        while headless:
            followers = after.pop(headless.pop(), [])
            for granule in followers:
                if self._owners[granule]:
                    self._unreported.add(granule)
                else:
                    del self._owners[granule]
                    self._forget(granule)
            headless += followers

    def _is_reported(self, granule: PrefixHash) -> bool:
        return granule in self._owners and granule not in self._unreported

    def _forget(self, granule: PrefixHash) -> None:
        del self._before[granule]
        self._unreported.discard(granule)
        self.states.discard(granule)

    def lose(self, granules: Iterable[PrefixHash]) -> None:
        """Remove granules from the tier and remember them as lost."""
        for granule in granules:
            del self._offloaded[granule]
            self._lost.add(granule)

    def lost_of(self, prefix: CachedPrefix, num_reused: int) -> PrefixHashes:
        """Return the granules that a sequence loads from the tier and that the tier has lost."""
        to_load = prefix.chain[num_reused - prefix.num_loaded : num_reused]
        return tuple([granule for granule in to_load if granule in self._lost])

    def _own(self, prefix: CachedPrefix, granule: PrefixHash) -> None:
        self._num_shared += not self._owners[granule]
        self._owners[granule] += 1
        prefix.cached.append(granule)
