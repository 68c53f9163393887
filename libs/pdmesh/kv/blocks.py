"""An instance's KV blocks: free, in block tables, cached for later tables, or quarantined during a copy."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from typing import Protocol

from pdmesh.errors import PdmeshError


class OutOfBlocks(PdmeshError):
    """Too few free blocks in the pool: the scheduler miscounted, or blocks are quarantined."""


class BlockGuard(Protocol):
    """A copy of blocks that may belong to another request by now. No writer may touch them before it has ended."""

    @property
    def has_ended(self) -> bool: ...

    def wait(self) -> None:
        """Wait until the copy has ended. Any thread but the event loop's."""
        ...


class BlockPool:
    """Allocator of ``num_blocks`` block ids, in contiguous runs where possible. Used from one thread.

    A block may be in several tables. It is *held* until each of them has freed it, and is *cached* afterwards if `keep`
    was called for it. `pinned` marks blocks that a copy on another thread touches; blocks freed meanwhile are
    *quarantined* until the copy ends. ``on_free`` is called with each block that becomes free.
    """

    def __init__(self, num_blocks: int) -> None:
        self._num_blocks = num_blocks
        self._num_free = num_blocks
        self._runs = [(0, num_blocks)] if num_blocks else []  # free (start, end), ascending, never adjacent
        self._references: dict[int, int] = {}
        self._kept: set[int] = set()
        self._num_cached = 0
        self._quarantined: dict[int, _Release] = {}
        self._pins: Counter[int] = Counter()
        self._guards: dict[int, list[BlockGuard]] = {}
        self.on_free: Callable[[int], object] = _ignore

    @property
    def num_blocks(self) -> int:
        return self._num_blocks

    @property
    def num_free(self) -> int:
        return self._num_free

    @property
    def num_held(self) -> int:
        return len(self._references)

    @property
    def num_cached(self) -> int:
        """Number of cached blocks that are in no table."""
        return self._num_cached

    @property
    def kept(self) -> AbstractSet[int]:
        """All cached blocks, in tables or not."""
        return self._kept

    @property
    def references(self) -> Mapping[int, int]:
        """Number of tables of each held block."""
        return self._references

    @property
    def num_quarantined(self) -> int:
        return len(self._quarantined)

    def allocate(self, num_blocks: int) -> list[int]:
        """Return ascending ids, for one table: the smallest free run that holds them all, else the largest runs.

        Raises `OutOfBlocks`, and changes nothing, if there are too few.
        """
        if num_blocks > self._num_free:
            raise OutOfBlocks(f"{num_blocks} blocks asked for, {self._num_free} of {self._num_blocks} free")
        fitting = [run for run in self._runs if run[1] - run[0] >= num_blocks]
        if fitting:
            runs = [min(fitting, key=lambda run: run[1] - run[0])]
        else:
            runs = sorted(self._runs, key=lambda run: run[0] - run[1])
        block_ids: list[int] = []
        for start, end in runs:
            taken = min(num_blocks - len(block_ids), end - start)
            if taken == 0:
                break
            block_ids.extend(range(start, start + taken))
            index = bisect_left(self._runs, (start, end))
            self._runs[index : index + 1] = [(start + taken, end)] if taken < end - start else []
        block_ids.sort()
        self._num_free -= num_blocks
        self._references.update(dict.fromkeys(block_ids, 1))
        return block_ids

    def share(self, block_ids: Sequence[int]) -> None:
        """Add held or cached blocks to one more table. From now on no request may write into them."""
        self._check_held(block_ids, or_cached=True)
        for block_id in block_ids:
            num_tables = self._references.get(block_id, 0)
            self._num_cached -= num_tables == 0
            self._references[block_id] = num_tables + 1

    def keep(self, block_ids: Sequence[int]) -> None:
        """Keep held blocks until `drop`, even if no table has them. From now on no request may write into them."""
        self._check_held(block_ids)
        assert self._kept.isdisjoint(block_ids), "a block is kept twice"
        self._kept.update(block_ids)

    def drop(self, block_ids: Sequence[int]) -> None:
        """Keep blocks no longer. Blocks in no table become free, at once or when no copy touches them."""
        assert self._kept.issuperset(block_ids), "a block is dropped that is not kept"
        self._kept.difference_update(block_ids)
        for block_id in block_ids:
            if block_id not in self._references:
                self._num_cached -= 1
                self._give_back(block_id, _Release(None))

    def is_shared(self, block_id: int) -> bool:
        """Whether a held block is in several tables or cached, so that no request may write into it."""
        return block_id in self._kept or self._references[block_id] > 1

    def free(self, block_ids: Sequence[int], *, on_released: Callable[[], None] | None = None) -> None:
        """Remove held blocks from one table. Blocks in no other table become free unless they are cached.

        ``on_released`` is called when none of the freed blocks is pinned any more: at once, unless one is.
        """
        self._check_held(block_ids)
        release = _Release(on_released)
        for block_id in block_ids:
            self._references[block_id] -= 1
            if self._references[block_id]:
                continue
            del self._references[block_id]
            if block_id in self._kept:
                self._num_cached += 1
            else:
                self._give_back(block_id, release)
        release.settle()

    def is_pinned(self, block_id: int) -> bool:
        """Whether a block is read or written off the event loop."""
        return block_id in self._pins

    @contextmanager
    def pinned(self, block_ids: Sequence[int]) -> Iterator[None]:
        """Return a context until whose end the blocks are not allocated again, even if they are freed.

        For blocks that are read or written off the event loop.
        """
        self._pins.update(block_ids)
        try:
            yield
        finally:
            for block_id in block_ids:
                self._unpin(block_id)

    def guard(self, block_ids: Iterable[int], guard: BlockGuard) -> None:
        """Let `guards_of` return ``guard`` for these blocks, whether they are freed and allocated or not."""
        for block_id in block_ids:
            self._guards.setdefault(block_id, []).append(guard)

    def unguard(self, block_ids: Iterable[int], guard: BlockGuard) -> None:
        """Remove a guard whose copy has ended."""
        for block_id in block_ids:
            guards = self._guards[block_id]
            guards.remove(guard)
            if not guards:
                del self._guards[block_id]

    def guards_of(self, block_ids: Iterable[int]) -> list[BlockGuard]:
        """Return the copies that must end before any of these blocks is written."""
        if not self._guards:
            return []
        found = {id(guard): guard for block_id in block_ids for guard in self._guards.get(block_id, ())}
        return [guard for guard in found.values() if not guard.has_ended]

    def check_integrity(self) -> None:
        """Raise AssertionError unless ``free + held + kept + quarantined = total`` without overlap."""
        num_free = sum(end - start for start, end in self._runs)
        idle = self._kept - self._references.keys()
        used = f"{self.num_held} held + {len(idle)} kept + {self.num_quarantined} quarantined"
        numbers = f"{num_free} free + {used} of {self._num_blocks}"
        assert num_free == self._num_free, f"blocks: {numbers}, but {self._num_free} counted free"
        assert len(idle) == self._num_cached, f"blocks: {numbers}, but {self._num_cached} counted kept"
        assert num_free + self.num_held + len(idle) + self.num_quarantined == self._num_blocks, f"blocks: {numbers}"
        assert all(count > 0 for count in self._references.values()), f"blocks are held for no table: {numbers}"
        assert not self._quarantined.keys() & (self._references.keys() | idle), f"used and quarantined: {numbers}"
        assert all(block_id in self._pins for block_id in self._quarantined), f"quarantined without a copy: {numbers}"
        ends = [end for _, end in self._runs]
        starts = [start for start, _ in self._runs]
        assert all(end < start for end, start in zip(ends, starts[1:], strict=False)), f"free runs touch: {numbers}"
        free = {block_id for start, end in self._runs for block_id in range(start, end)}
        used_blocks = self._references.keys() | self._quarantined.keys() | idle
        assert not free & used_blocks, f"blocks both free and used: {numbers}"
        assert not free & self._pins.keys(), f"blocks are free while a copy touches them: {numbers}"

    def _check_held(self, block_ids: Sequence[int], *, or_cached: bool = False) -> None:
        assert len(set(block_ids)) == len(block_ids), "a block is named twice in one call"
        unheld = [
            block_id
            for block_id in block_ids
            if block_id not in self._references and not (or_cached and block_id in self._kept)
        ]
        assert not unheld, f"blocks {unheld} are named but not held"

    def _give_back(self, block_id: int, release: _Release) -> None:
        """Free a block, now or when no copy touches it."""
        if block_id in self._pins:
            self._quarantined[block_id] = release
            release.num_pinned += 1
        else:
            self._add_free(block_id)

    def _unpin(self, block_id: int) -> None:
        self._pins[block_id] -= 1
        if self._pins[block_id] > 0:
            return
        del self._pins[block_id]
        release = self._quarantined.pop(block_id, None)
        if release is not None:
            self._add_free(block_id)
            release.num_pinned -= 1
            release.settle()

    def _add_free(self, block_id: int) -> None:
        start, end = block_id, block_id + 1
        index = bisect_left(self._runs, (start, end))
        if index < len(self._runs) and self._runs[index][0] == end:
            end = self._runs.pop(index)[1]
        if index > 0 and self._runs[index - 1][1] == start:
            start = self._runs.pop(index - 1)[0]
        insort(self._runs, (start, end))
        self._num_free += 1
        self.on_free(block_id)


def _ignore(block_id: int) -> None:
    pass


class _Release:
    """Blocks freed together. Some of them are still pinned."""

    def __init__(self, on_released: Callable[[], None] | None) -> None:
        self.num_pinned = 0
        self._on_released = on_released

    def settle(self) -> None:
        if self.num_pinned == 0 and self._on_released is not None:
            on_released, self._on_released = self._on_released, None
            on_released()
