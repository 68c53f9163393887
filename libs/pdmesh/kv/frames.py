"""Places of KV in layers with a window: *frames*. There are fewer frames than blocks.

A block is the same tokens in all layers. In layers without a window its KV is in the page with the block's own number.
In layers with a window its KV is in a frame while some request may see it, and else is gone. So requests, ledgers and
transfers name blocks only, and a block outside the window frees just its frame.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence, Set
from dataclasses import dataclass
from itertools import chain, islice

import numpy as np
import numpy.typing as npt

from pdmesh.errors import PdmeshError
from pdmesh.kv.blocks import BlockPool


class OutOfFrames(PdmeshError):
    """Too few frames: more blocks must be visible at once in layers with a window than there is memory for."""


@dataclass(frozen=True, slots=True, eq=False)
class FrameMap:
    """The frame of each block. One more frame, the last, is always zeros: it stands for blocks without a frame."""

    num_frames: int
    of_block: npt.NDArray[np.int64]

    @classmethod
    def shared_out(cls, num_blocks: int, num_frames: int, memory: npt.NDArray[np.int64] | None = None) -> FrameMap:
        """Return a map in which each block has a frame, for a user of at most ``num_frames`` blocks at once.

        The map is in ``memory`` if other processes read it, too.
        """
        of_block = np.empty(num_blocks, dtype=np.int64) if memory is None else memory
        of_block[:] = np.arange(num_blocks) % num_frames
        return cls(num_frames, of_block)

    @property
    def zeros(self) -> int:
        """The frame of blocks that have none."""
        return self.num_frames


class WindowFrames:
    """Allocator of frames for blocks. Event loop only; steps and copies read the map meanwhile.

    A table *holds* the frames of blocks that it may come to see. A frame that no table holds is free, unless its block
    is cached: then the frame stays until another block needs it. Blocks that fell behind a window (*passed*) lose their
    frames first; *resumable* blocks, at whose end a request ended or began, follow. In each class the longest unused go
    first.

    In layers with states, a frame that no table holds is free unless `cache` was called for its block. Then the block
    counts as resumable. ``on_lost`` is called if such a frame was taken, because too few were free.
    """

    def __init__(self, pool: BlockPool, frames: FrameMap, *, has_states: bool = False) -> None:
        self.has_states = has_states
        self.on_lost: Callable[[], object] = _ignore
        self._cached: set[int] = set()
        self._pool = pool
        self._map = frames
        frames.of_block.fill(frames.zeros)
        self._free = list(reversed(range(frames.num_frames)))
        self._holders: dict[int, int] = {}  # number of tables that hold its frame
        self._passed: dict[int, None] = {}
        self._resumable: dict[int, None] = {}
        pool.on_free = self._drop

    @property
    def num_frames(self) -> int:
        return self._map.num_frames

    @property
    def num_available(self) -> int:
        """Number of frames that can be allocated: free ones, and frames that no table holds."""
        return len(self._free) + len(self._passed) + len(self._resumable)

    @property
    def num_free(self) -> int:
        """Number of frames without a block."""
        return len(self._free)

    @property
    def num_held(self) -> int:
        """Number of blocks whose frames tables hold."""
        return len(self._holders)

    def has_all(self, block_ids: Sequence[int]) -> bool:
        """Whether all of these blocks have a frame."""
        return all(self._has(block_id) for block_id in block_ids)

    def hold(self, block_ids: Sequence[int]) -> None:
        """Hold blocks and frames for one more table. Raises OutOfFrames, and changes nothing, if too few are free."""
        num_missing = sum(not self._has(block_id) for block_id in block_ids)
        victims = self._victims(num_missing - len(self._free), besides=set(block_ids))
        if num_missing > len(self._free) + len(victims):
            raise OutOfFrames(
                f"{num_missing} more blocks need frames in layers with a window: {self.num_held} have one, of "
                f"{self.num_frames} frames"
            )
        for block_id in block_ids:
            self._holders[block_id] = self._holders.get(block_id, 0) + 1
            self._passed.pop(block_id, None)
            self._resumable.pop(block_id, None)
        num_cached = len(self._cached)
        for block_id in victims:
            self._drop(block_id)
        for block_id in block_ids:
            if not self._has(block_id):
                self._map.of_block[block_id] = self._free.pop()
        if len(self._cached) < num_cached:
            self.on_lost()

    def let_go(self, block_ids: Sequence[int], *, resumable: bool = False) -> None:
        """Hold blocks for one table less.

        Frames that no table holds become free, unless their blocks are cached or pinned. Frames of cached blocks stay
        as long as there is room, and longer for ``resumable`` blocks.
        """
        for block_id in block_ids:
            self._holders[block_id] -= 1
            if self._holders[block_id]:
                continue
            del self._holders[block_id]
            is_kept = block_id in self._pool.kept and (block_id in self._cached or not self.has_states)
            if not is_kept and not self._pool.is_pinned(block_id):
                self._drop(block_id)
            elif resumable or block_id in self._cached:
                self._resumable[block_id] = None
            else:
                self._passed[block_id] = None

    # --- cached states ---

    def cache(self, block_id: int) -> None:
        """Keep the frame of a cached block, which has one, until `uncache`."""
        assert self._has(block_id), f"block {block_id} has no frame to keep"
        assert block_id in self._pool.kept, f"block {block_id} is not cached"
        self._cached.add(block_id)
        if block_id not in self._holders:
            self._passed.pop(block_id, None)
            self._resumable[block_id] = None

    def is_cached(self, block_id: int) -> bool:
        """Whether `cache` was called for a block that still has its frame."""
        return block_id in self._cached

    def uncache(self, block_ids: Iterable[int]) -> None:
        """Free the frames of blocks that no table holds; other frames are free once no table holds them."""
        for block_id in block_ids:
            self._cached.discard(block_id)
            if block_id in self._resumable:
                if self._pool.is_pinned(block_id):
                    del self._resumable[block_id]
                    self._passed[block_id] = None
                else:
                    self._drop(block_id)

    def hand_on(self, block_id: int, target_id: int) -> bool:
        """Hand the frame of a block that one table holds to a block with equal tokens, if that has none.

        The table no longer holds the frame. Returns False, and changes nothing, if a copy or another table uses the
        frame, or if the target has a frame.
        """
        if self._has(target_id) or self._holders[block_id] > 1 or self._pool.is_pinned(block_id):
            return False
        del self._holders[block_id]
        self._map.of_block[target_id] = self._map.of_block[block_id]
        self._map.of_block[block_id] = self._map.zeros
        self._resumable[target_id] = None
        return True

    def check_integrity(self, held: Collection[int]) -> None:
        """Raise AssertionError unless each frame is free or one block's, and tables hold exactly the blocks ``held``.

        All other blocks with frames must be cached, pinned or in a table.
        """
        numbers = f"{self.num_held} held + {self.num_available} to be had of {self.num_frames} frames"
        idle = self._passed.keys() | self._resumable.keys()
        placed = {
            block_id: frame for block_id, frame in enumerate(self._map.of_block.tolist()) if frame != self._map.zeros
        }
        assert self.num_held + self.num_available == self.num_frames, numbers
        assert not self._passed.keys() & self._resumable.keys(), f"passed and resumable: {numbers}"
        assert not idle & self._holders.keys(), f"held and idle: {numbers}"
        assert placed.keys() == self._holders.keys() | idle, f"blocks with a frame are not those in use: {numbers}"
        frames = [*placed.values(), *self._free]
        assert sorted(frames) == list(range(self.num_frames)), f"frames of two, or of nobody: {numbers}"
        assert self._holders.keys() <= self._pool.references.keys(), f"frames are held of blocks of no table: {numbers}"
        assert self._holders.keys() == set(held), f"{len(set(held))} blocks are seen, {numbers}"
        assert self._cached <= placed.keys(), f"cached states without a frame: {numbers}"
        unused = idle - self._pool.references.keys() - self._pool.kept
        assert all(map(self._pool.is_pinned, unused)), f"free blocks have frames: {numbers}"

    def _has(self, block_id: int) -> bool:
        return bool(self._map.of_block[block_id] != self._map.zeros)

    def _victims(self, num_blocks: int, besides: Set[int]) -> list[int]:
        """Return ``num_blocks`` blocks whose frames can be taken, or all such blocks if there are fewer."""
        idle = chain(self._passed, self._resumable)
        return list(islice((each for each in idle if self._can_lose(each, besides)), max(0, num_blocks)))

    def _can_lose(self, block_id: int, besides: Set[int]) -> bool:
        return block_id not in besides and not self._pool.is_pinned(block_id)

    def _drop(self, block_id: int) -> None:
        """Free the frame of a block that no table holds and no copy touches, if the block has one."""
        assert block_id not in self._holders, f"block {block_id} is free, and somebody sees it"
        assert not self._pool.is_pinned(block_id), f"a copy touches the frame of block {block_id}"
        self._passed.pop(block_id, None)
        self._resumable.pop(block_id, None)
        self._cached.discard(block_id)
        frame = int(self._map.of_block[block_id])
        if frame != self._map.zeros:
            self._map.of_block[block_id] = self._map.zeros
            self._free.append(frame)


def _ignore() -> None:
    """Do nothing."""
