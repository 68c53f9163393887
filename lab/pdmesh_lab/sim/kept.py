"""What a modelled instance keeps of KV for other requests, as a worker's store has it: blocks with counted owners.

It only obeys. What the core thinks is kept is checked against it: a granule that is to be shared must be here, one that
is to be dropped must be nobody's, and the tier must have what is to be loaded, and room for what is offloaded.
"""

from __future__ import annotations

from collections.abc import Iterable

from pdmesh.model import PrefixHash, PrefixHashes, blocks_of_granule
from pdmesh.plans import Evictions
from pdmesh_lab.sim.held import Held


class SimulatedKept:
    """The store of one instance."""

    def __init__(self, block_size: int, num_offload_granules: int = 0) -> None:
        """``num_offload_granules`` is what its offload tier holds."""
        self._granule_blocks = blocks_of_granule(block_size)
        self._owners: dict[PrefixHash, int] = {}  # requests that have it in their blocks; let go of longest ago first
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
        """All that is kept, the longest unused first."""
        return tuple(self._owners)

    @property
    def offloaded(self) -> PrefixHashes:
        """All that the tier has, the longest unused first."""
        return tuple(self._offloaded)

    def num_own_blocks(self, held: Held) -> int:
        """Blocks of a request that are not kept."""
        return held.num_blocks - len(held.kept) * self._granule_blocks

    def share(self, held: Held, num_reused: int) -> int:
        """Let a request have the first granules of its chain; the number of blocks that it shares.

        Those that it loads from the tier, the last ones, are in its own.
        """
        num_shared = num_reused - held.num_loaded_granules
        for granule in held.chain[:num_shared]:
            assert granule in self._owners, f"{held.key} is to share a granule that is not kept"
            self._own(held, granule)
        for granule in held.chain[num_shared:num_reused]:
            assert granule in self._offloaded, f"{held.key} is to load a granule that the tier does not have"
        held.num_granules = num_shared
        return num_shared * self._granule_blocks

    def computed(self, held: Held, num_granules: int) -> int:
        """Keep what a request has of its chain; the number of blocks that are kept now and were not."""
        before = len(held.kept)
        for granule in held.chain[held.num_granules : num_granules] if self._granule_blocks else ():
            if granule not in self._owners:
                self._owners[granule] = 0
                self._own(held, granule)
        held.num_granules = max(held.num_granules, num_granules)
        return (len(held.kept) - before) * self._granule_blocks

    def drawn(self, granules: PrefixHashes) -> tuple[PrefixHashes, int]:
        """Return which of the granules that a request drew stay when it ends, and how many of them are kept already.

        One that is kept without what is before it is about to be dropped.
        """
        is_kept = [granule in self._owners for granule in granules]
        num_known = is_kept.index(False) if False in is_kept else len(granules)
        num_staying = is_kept.index(True, num_known) if True in is_kept[num_known:] else len(granules)
        return granules[:num_staying], num_known

    def end(self, held: Held, drawn: PrefixHashes) -> int:
        """Let go of a request's blocks; the number of those that stay, some that it draws among them."""
        num_kept = len(held.kept)
        for granule in reversed(drawn) if self._granule_blocks else ():
            self._owners[granule] = self._owners.pop(granule, 0)
        own = set(held.kept)
        for granule in reversed(held.chain):
            if granule in self._owners:  # what is behind it must not outlive it, whoever has it
                number = self._owners.pop(granule) - (granule in own)
                self._owners[granule] = number
                self._num_shared -= not number and granule in own
        held.kept.clear()
        return num_kept * self._granule_blocks

    def make_room(self, room: Evictions) -> PrefixHashes:
        """Evict what a command names.

        Return what the tier loses for it: the scheduler may not know of all that is there, if it heard late of a loss.
        """
        for granule in room.evict:
            has_it = self._offloaded.pop(granule, self._lost) is None
            assert has_it or granule in self._lost, "a granule is to be evicted that the tier does not have"
        for granule in (*room.drop, *room.offload):
            assert not self._owners.pop(granule), "a granule is to be dropped that requests have"
            if granule in self._offloaded:
                self._offloaded[granule] = self._offloaded.pop(granule)
        for granule in room.offload:
            assert granule not in self._offloaded, "a granule is to be offloaded again"
            self._offloaded[granule] = None
            self._lost.discard(granule)
        lost = tuple(self._offloaded)[: max(0, len(self._offloaded) - self._num_offload_granules)]
        self.lose(lost)
        return lost

    def lose(self, granules: Iterable[PrefixHash]) -> None:
        """Lose granules of the tier."""
        for granule in granules:
            del self._offloaded[granule]
            self._lost.add(granule)

    def lost_of(self, held: Held, num_reused: int) -> PrefixHashes:
        """Return what a request is to load of the first ``num_reused`` granules, and the tier has lost."""
        to_load = held.chain[num_reused - held.num_loaded_granules : num_reused]
        return tuple([granule for granule in to_load if granule in self._lost])

    def _own(self, held: Held, granule: PrefixHash) -> None:
        self._num_shared += not self._owners[granule]
        self._owners[granule] += 1
        held.kept.append(granule)
