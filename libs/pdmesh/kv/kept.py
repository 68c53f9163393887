"""KV that an instance keeps for requests to come: granules, by the hash of all tokens up to their end.

The scheduling core says what is reused and what is given up: it knows of every granule that is kept here, because it is
told of everything that makes one. What is here is nevertheless what counts.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from pdmesh.kv.blocks import BlockPool
from pdmesh.model import PrefixHash, PrefixHashes, blocks_of_granule


class KeptGranules:
    """Which blocks of a pool hold the KV of which granule. Event loop only.

    A granule's blocks are full, nobody writes into them, and whoever reuses it reuses all that is before it. Those used
    longest ago come first, and of one chain the last: without its beginning the rest is of no use.
    """

    def __init__(self, pool: BlockPool, block_size: int) -> None:
        self._pool = pool
        self._num_blocks = blocks_of_granule(block_size)  # of each; 0 where nothing can be kept
        self._blocks: dict[PrefixHash, list[int]] = {}
        self._before: dict[PrefixHash, PrefixHash | None] = {}  # granule before each in its chain

    def __len__(self) -> int:
        return len(self._blocks)

    def __contains__(self, granule: object) -> bool:
        return granule in self._blocks

    @property
    def is_off(self) -> bool:
        """Whether nothing can be kept: a granule is not whole blocks."""
        return self._num_blocks == 0

    @property
    def hashes(self) -> PrefixHashes:
        """All of them, those used longest ago first."""
        return tuple(self._blocks)

    def blocks_of(self, granule: PrefixHash) -> list[int]:
        """Return the blocks of a granule; none if it is not here."""
        return self._blocks.get(granule, [])

    def num_kept_of(self, prefix: Sequence[PrefixHash]) -> int:
        """Return how many of a chain's first granules are here."""
        return next((number for number, granule in enumerate(prefix) if granule not in self._blocks), len(prefix))

    def num_kept_in(self, block_table: list[int], prefix: Sequence[PrefixHash]) -> int:
        """Return how many of a chain's first granules are here, and are a table's own first blocks."""
        for number, granule in enumerate(prefix):
            own = block_table[number * self._num_blocks : (number + 1) * self._num_blocks]
            if self._blocks.get(granule) != own:
                return number
        return len(prefix)

    def share(self, prefix: Sequence[PrefixHash]) -> list[int]:
        """Put the blocks of granules that are all here into one more table; return them in order."""
        block_ids = [block_id for granule in prefix for block_id in self._blocks[granule]]
        self._pool.share(block_ids)
        self._touch(prefix)
        return block_ids

    def keep(self, prefix: Sequence[PrefixHash], block_table: Sequence[int]) -> None:
        """Keep all granules of a chain, whose KV the first blocks of a table hold.

        Of one that is here already the other blocks are kept: equal KV that was computed twice is not merged.
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
        """Give granules up; those that are not here are ignored."""
        for granule in granules:
            block_ids = self._blocks.pop(granule, None)
            if block_ids is not None:
                del self._before[granule]
                self._pool.drop(block_ids)

    def drop_headless(self) -> None:
        """Drop granules without the beginning of their chains: a new scheduler would not know what to do with these."""
        while headless := [
            each for each, before in self._before.items() if before is not None and before not in self._blocks
        ]:
            self.drop(headless)

    def make_room(self, num_blocks: int) -> bool:
        """Give up the oldest that no request uses until so many blocks are free; whether any was."""
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
        """Each granule has whole blocks of its own, and no others are kept."""
        blocks = [block_id for block_ids in self._blocks.values() for block_id in block_ids]
        numbers = f"{len(blocks)} blocks in {len(self._blocks)} granules"
        assert len(blocks) == len(self._blocks) * self._num_blocks, numbers
        assert len(set(blocks)) == len(blocks), "a block is in two granules"
        assert self._pool.kept == set(blocks), "the pool keeps other blocks"

    def _touch(self, prefix: Sequence[PrefixHash]) -> None:
        for granule in reversed(prefix):
            self._blocks[granule] = self._blocks.pop(granule)
