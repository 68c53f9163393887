"""KV that an instance caches for later requests: granules, by the hash of all tokens up to their end.

The scheduling core decides which granules are reused and evicted: every event that adds a granule here is reported to
it. If the two disagree, this table counts.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

from pdmesh.core.instances.kept_chains import jumps_of
from pdmesh.kv.blocks import BlockPool
from pdmesh.kv_layout import blocks_of_granule
from pdmesh.model import Jumps, PrefixHash, PrefixHashes


class CachedGranules:
    """The blocks of each cached granule. Event loop only.

    A granule's blocks are full, and no request writes into them. A request that reuses a granule reuses all granules
    before it. The table's order is the order of eviction: longest unused first, and in one chain the last first,
    because a granule is useless without the chain's beginning.
    """

    def __init__(self, pool: BlockPool, block_size: int) -> None:
        self._pool = pool
        self._num_blocks = blocks_of_granule(block_size)  # 0 if a granule is not whole blocks
        self._blocks: dict[PrefixHash, list[int]] = {}
        self._before: dict[PrefixHash, PrefixHash | None] = {}

    def __len__(self) -> int:
        return len(self._blocks)

    def __contains__(self, granule: object) -> bool:
        return granule in self._blocks

    @property
    def is_off(self) -> bool:
        """Whether nothing can be cached, because a granule is not whole blocks."""
        return self._num_blocks == 0

    @property
    def hashes(self) -> PrefixHashes:
        """All granules, longest unused first."""
        return tuple(self._blocks)

    @property
    def jumps(self) -> Jumps:
        """Return the jumps of `hashes` (`pdmesh.core.instances.kept_chains`)."""
        return jumps_of(self._before, self.hashes)

    def blocks_of(self, granule: PrefixHash) -> list[int]:
        """Return the blocks of a granule; none if it is not here."""
        return self._blocks.get(granule, [])

    def num_cached_of(self, prefix: Sequence[PrefixHash]) -> int:
        """Return the number of a chain's first granules that are here."""
        return next((number for number, granule in enumerate(prefix) if granule not in self._blocks), len(prefix))

    def num_cached_in(self, block_table: list[int], prefix: Sequence[PrefixHash]) -> int:
        """Return the number of a chain's first granules whose blocks here are the table's own first blocks."""
        for number, granule in enumerate(prefix):
            own = block_table[number * self._num_blocks : (number + 1) * self._num_blocks]
            if self._blocks.get(granule) != own:
                return number
        return len(prefix)

    def share(self, prefix: Sequence[PrefixHash]) -> list[int]:
        """Add the blocks of these granules to one more table, and return them in order. All granules must be here."""
        block_ids = [block_id for granule in prefix for block_id in self._blocks[granule]]
        self._pool.share(block_ids)
        self._touch(prefix)
        return block_ids

    def keep(self, prefix: Sequence[PrefixHash], block_table: Sequence[int]) -> None:
        """Cache all granules of a chain. The first blocks of ``block_table`` hold their KV.

        A granule that is here already keeps its other blocks: equal KV that was computed twice is not merged. With the
        cache off, nothing is cached.
        """
        if self._num_blocks == 0:
            return
        for number, granule in enumerate(prefix):
            if granule not in self._blocks:
                block_ids = list(block_table[number * self._num_blocks : (number + 1) * self._num_blocks])
                self._pool.keep(block_ids)
                self._blocks[granule] = block_ids
                self._before[granule] = prefix[number - 1] if number else None
        self._touch(prefix)

    def drop(self, granules: Iterable[PrefixHash]) -> None:
        """Evict granules; absent ones are ignored."""
        for granule in granules:
            block_ids = self._blocks.pop(granule, None)
            if block_ids is not None:
                del self._before[granule]
                self._pool.drop(block_ids)

    def drop_headless(self) -> None:
        """Evict granules without the beginning of their chains, which a new scheduler could not use."""
        after: defaultdict[PrefixHash | None, list[PrefixHash]] = defaultdict(list)
        for granule, before in self._before.items():
            after[before].append(granule)
        headless = [before for before in after if before is not None and before not in self._blocks]
        while headless:
            followers = after[headless.pop()]
            self.drop(followers)
            headless += followers

    def make_room(self, num_blocks: int) -> bool:
        """Evict the longest unused granules that no request uses, until ``num_blocks`` blocks are free.

        Return whether any granule was evicted. Fewer blocks may be free than asked for.
        """
        dropped: list[PrefixHash] = []
        num_missing = num_blocks - self._pool.num_free
        for granule, block_ids in self._blocks.items():
            if num_missing <= 0:
                break
            if block_ids[0] not in self._pool.references:
                dropped.append(granule)
                num_missing -= self._num_blocks
        self.drop(dropped)
        return bool(dropped)

    def check_integrity(self) -> None:
        """Raise AssertionError unless each granule has whole blocks of its own, and no others are kept."""
        blocks = [block_id for block_ids in self._blocks.values() for block_id in block_ids]
        numbers = f"{len(blocks)} blocks in {len(self._blocks)} granules"
        assert len(blocks) == len(self._blocks) * self._num_blocks, numbers
        assert len(set(blocks)) == len(blocks), "a block is in two granules"
        assert self._pool.kept == set(blocks), "the pool keeps other blocks"

    def _touch(self, prefix: Sequence[PrefixHash]) -> None:
        for granule in reversed(prefix):
            self._blocks[granule] = self._blocks.pop(granule)
