"""What a request holds in layers with a window: the frames of its blocks that may still be seen, and of no others."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from pdmesh.kv.blocks import BlockPool
from pdmesh.kv.frames import WindowFrames
from pdmesh.kv.store import KvStore
from pdmesh.model import IndexRange, num_blocks_for


@dataclass(slots=True, eq=False)
class HeldBlocks:
    """Of a request's block table, by their places in it, the blocks whose frames it holds."""

    places: set[int] = field(default_factory=set[int])
    first: int = 0  # nothing before it is held
    end: int = 0  # nothing from here on


class Windows:
    """Lets block tables hold frames as their sequences go on. Does nothing where no layer's KV is given up.

    Event loop only. Whatever takes frames raises `pdmesh.kv.frames.OutOfFrames`, and changes nothing, if there are too
    few.
    """

    def __init__(self, store: KvStore, pool: BlockPool) -> None:
        self._layout = store.layout
        self.frames = None if store.frames is None else WindowFrames(pool, store.frames)

    @property
    def are_freed(self) -> bool:
        """Whether anything is given up behind windows."""
        return self.frames is not None

    @property
    def num_available(self) -> int:
        """Frames that can be taken."""
        return 0 if self.frames is None else self.frames.num_available

    def begin(self, held: HeldBlocks, block_table: Sequence[int], num_tokens: int) -> None:
        """Hold what the token behind so many sees, whether they are there or to come."""
        first, end = self._layout.first_held_block(num_tokens), num_blocks_for(num_tokens, self._layout.block_size)
        held.first = held.end = first
        self.extend(held, block_table, IndexRange(first, end))
        held.end = end

    def is_seen(self, block_table: Sequence[int], num_tokens: int, num_blocks: int) -> bool:
        """Whether of the first ``num_blocks`` of a table those are there that the token behind ``num_tokens`` sees."""
        return self.frames is None or self.frames.has_all(
            block_table[self._layout.first_held_block(num_tokens) : num_blocks]
        )

    def take(self, held: HeldBlocks, block_table: Sequence[int], num_tokens: int) -> None:
        """Hold the blocks that so many first tokens fill, before those behind what is held are written."""
        end = num_blocks_for(num_tokens, self._layout.block_size)
        if end > held.end:
            self.extend(held, block_table, IndexRange(held.end, end))

    def num_to_take(self, held: HeldBlocks, num_tokens: int) -> int:
        """Return how many frames `take` would need."""
        return max(0, num_blocks_for(num_tokens, self._layout.block_size) - held.end) if self.are_freed else 0

    def extend(self, held: HeldBlocks, block_table: Sequence[int], blocks: IndexRange) -> None:
        """Hold these blocks, too."""
        if self.frames is not None:
            new = [place for place in range(*blocks) if place not in held.places]
            self.frames.hold([block_table[place] for place in new])
            held.places.update(new)
        held.first, held.end = min(held.first, blocks.start), max(held.end, blocks.stop)

    def pass_by(self, held: HeldBlocks, block_table: Sequence[int], num_tokens: int) -> None:
        """Give up what nobody sees from the token behind so many on."""
        first = self._layout.first_held_block(num_tokens)
        if first > held.first:
            self._let_go(held, block_table, range(held.first, first))
            held.first = first

    def end(self, held: HeldBlocks, block_table: Sequence[int]) -> None:
        """Give up everything. Another request may go on from here."""
        self._let_go(held, block_table, sorted(held.places), resumable=True)

    def check_integrity(self, tables: Iterable[tuple[HeldBlocks, Sequence[int]]]) -> None:
        """AssertionError names what does not balance."""
        if self.frames is not None:
            self.frames.check_integrity({table[place] for held, table in tables for place in held.places})

    def _let_go(
        self, held: HeldBlocks, block_table: Sequence[int], places: Iterable[int], *, resumable: bool = False
    ) -> None:
        if self.frames is not None:
            gone = [place for place in places if place in held.places]
            self.frames.let_go([block_table[place] for place in gone], resumable=resumable)
            held.places.difference_update(gone)
