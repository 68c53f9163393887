"""What a modelled instance keeps of KV for other requests, as a worker's store has it: blocks with counted owners.

It only obeys. What the core thinks is kept is checked against it: a granule that is to be shared must be here, one that
is to be dropped must be nobody's.
"""

from __future__ import annotations

from collections.abc import Iterable

from pdmesh.model import PrefixHash, PrefixHashes, blocks_of_granule
from pdmesh.sim.held import Held


class SimulatedKept:
    """The store of one instance."""

    def __init__(self, block_size: int) -> None:
        self._granule_blocks = blocks_of_granule(block_size)
        self._owners: dict[PrefixHash, int] = {}  # requests that have it in their blocks; let go of longest ago first
        self._num_shared = 0  # with an owner

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

    def num_own_blocks(self, held: Held) -> int:
        """Blocks of a request that are not kept."""
        return held.num_blocks - len(held.kept) * self._granule_blocks

    def share(self, held: Held, num_reused: int) -> int:
        """Let a request have the first granules of its chain; the number of their blocks."""
        for granule in held.chain[:num_reused]:
            assert granule in self._owners, f"{held.key} is to share a granule that is not kept"
            self._own(held, granule)
        held.num_granules = num_reused
        return num_reused * self._granule_blocks

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

    def drop(self, granules: Iterable[PrefixHash]) -> None:
        for granule in granules:
            assert not self._owners.pop(granule), "a granule is to be dropped that requests have"

    def _own(self, held: Held, granule: PrefixHash) -> None:
        self._num_shared += not self._owners[granule]
        self._owners[granule] += 1
        held.kept.append(granule)
