"""Frames of requests in layers with a window: a request holds frames only for blocks that may still be seen."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from pdmesh.kv.blocks import BlockPool
from pdmesh.kv.frames import WindowFrames
from pdmesh.kv.store import KvStore
from pdmesh.kv_layout import IndexRange, num_blocks_for


@dataclass(slots=True, eq=False)
class HeldBlocks:
    """Places in a request's block table whose frames the request holds: none before ``first`` or from ``end`` on.

    In layers with states, a chunk takes no frames for blocks that end within it, except the blocks ``wanted``.
    """

    wanted: frozenset[int] = frozenset()
    places: set[int] = field(default_factory=set[int])
    first: int = 0
    end: int = 0


class Windows:
    """Frames of all block tables as their sequences grow. Does nothing where no layer frees KV. Event loop only.

    Methods that take frames raise `pdmesh.kv.frames.OutOfFrames`, and change nothing, if there are too few.
    """

    def __init__(self, store: KvStore, pool: BlockPool) -> None:
        self._layout = store.layout
        self.frames = None
        if store.frames is not None:
            self.frames = WindowFrames(pool, store.frames, has_states=store.layout.has_states)

    @property
    def are_freed(self) -> bool:
        """Whether frames behind windows are freed."""
        return self.frames is not None

    @property
    def num_available(self) -> int:
        """Number of frames that can be taken."""
        return 0 if self.frames is None else self.frames.num_available

    def begin(self, held: HeldBlocks, block_table: Sequence[int], num_tokens: int) -> None:
        """Hold the frames that token ``num_tokens`` sees, whether their KV is there or comes. Raises OutOfFrames."""
        first, end = self._layout.first_held_block(num_tokens), num_blocks_for(num_tokens, self._layout.block_size)
        held.first = held.end = first
        self.extend(held, block_table, IndexRange(first, end))
        held.end = end

    def is_seen(self, block_table: Sequence[int], num_tokens: int, num_blocks: int) -> bool:
        """Whether token ``num_tokens`` finds all frames that it sees among the first ``num_blocks`` of a table."""
        return self.frames is None or self.frames.has_all(
            block_table[self._layout.first_held_block(num_tokens) : num_blocks]
        )

    def take(self, held: HeldBlocks, block_table: Sequence[int], num_tokens: int) -> None:
        """Hold frames for the first ``num_tokens`` from ``held.end`` on; if too few are free, raise OutOfFrames."""
        end = num_blocks_for(num_tokens, self._layout.block_size)
        if end > held.end:
            self._hold(held, block_table, self._to_take(held, num_tokens))
            held.end = end

    def num_to_take(self, held: HeldBlocks, num_tokens: int) -> int:
        """Return how many frames `take` would need."""
        return len(self._to_take(held, num_tokens)) if self.are_freed else 0

    def extend(self, held: HeldBlocks, block_table: Sequence[int], blocks: IndexRange) -> None:
        """Hold the frames of these blocks, too. Raises OutOfFrames, and changes nothing, if there are too few."""
        self._hold(held, block_table, range(*blocks))
        held.first, held.end = min(held.first, blocks.start), max(held.end, blocks.stop)

    def pass_by(self, held: HeldBlocks, block_table: Sequence[int], num_tokens: int) -> None:
        """Free frames outside the attention window of token ``num_tokens``.

        Wanted states that are not cached yet stay: another request computed their granules first.
        """
        first, frames = self._layout.first_held_block(num_tokens), self.frames
        if first > held.first:
            passed = [
                place
                for place in range(held.first, first)
                if frames is None or place not in held.wanted or frames.is_cached(block_table[place])
            ]
            self._let_go(held, block_table, passed)
            held.first = first

    def end(self, held: HeldBlocks, block_table: Sequence[int]) -> None:
        """Free all frames. Another request may continue from the end of this one."""
        self._let_go(held, block_table, sorted(held.places), resumable=True)

    def check_integrity(self, tables: Iterable[tuple[HeldBlocks, Sequence[int]]]) -> None:
        """Raise AssertionError if the tables and the counts of frames contradict each other."""
        if self.frames is not None:
            self.frames.check_integrity({table[place] for held, table in tables for place in held.places})

    def _to_take(self, held: HeldBlocks, num_tokens: int) -> Sequence[int]:
        """Return the places from ``held.end`` on whose frames a request of ``num_tokens`` needs.

        A state is written behind the last token, behind the last granule, and behind the blocks that are wanted.
        """
        places = range(held.end, num_blocks_for(num_tokens, self._layout.block_size))
        if not self._layout.has_states:
            return places
        first = self._layout.first_held_block(num_tokens)
        return [place for place in places if place >= first or place in held.wanted]

    def _hold(self, held: HeldBlocks, block_table: Sequence[int], places: Iterable[int]) -> None:
        if self.frames is not None:
            new = [place for place in places if place not in held.places]
            self.frames.hold([block_table[place] for place in new])
            held.places.update(new)

    def _let_go(
        self, held: HeldBlocks, block_table: Sequence[int], places: Iterable[int], *, resumable: bool = False
    ) -> None:
        if self.frames is not None:
            gone = [place for place in places if place in held.places]
            self.frames.let_go([block_table[place] for place in gone], resumable=resumable)
            held.places.difference_update(gone)
