"""Laws of frames: what a table may still see has one that nobody else writes into, and none is lost.

Tables begin, grow, pass by what they no longer see, are kept, shared and end, while copies pin blocks; beside each
frame a number says whose tokens it holds.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from pdmesh.kv.blocks import BlockPool
from pdmesh.kv.frames import FrameMap, OutOfFrames, WindowFrames
from pdmesh.kv.store import HostKvStore
from pdmesh.kv_layout import GRANULE_TOKENS, IndexRange, KvLayout, num_blocks_for
from pdmesh.worker.windows import HeldBlocks, Windows
from pdmesh_testing.examples import examples

BLOCK, WINDOW, NUM_BLOCKS, NUM_FRAMES = 32, 64, 60, 12
LAYOUT = KvLayout(
    num_layers=3, num_kv_heads=1, head_dim=8, block_size=BLOCK, dtype="float32", window=WINDOW, windowed_layers=(0, 2)
)


class Store(HostKvStore):
    """A cache of which only the places matter."""

    layout, num_blocks = LAYOUT, NUM_BLOCKS

    def __init__(self) -> None:
        self._frames = FrameMap.shared_out(NUM_BLOCKS, NUM_FRAMES)

    @property
    def frames(self) -> FrameMap:
        return self._frames

    def gather(self, layer: int, block_ids: object, out: memoryview) -> None:
        raise NotImplementedError

    def scatter(self, layer: int, block_ids: object, data: memoryview) -> None:
        raise NotImplementedError


@dataclass(eq=False)
class Table:
    blocks: list[int]
    num_tokens: int  # that have their KV
    contents: list[int]  # of each block, which tokens it holds
    held: HeldBlocks = field(default_factory=HeldBlocks)


class FramesMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.pool, self.store = BlockPool(NUM_BLOCKS), Store()
        self.windows = Windows(self.store, self.pool)
        self.tables: list[Table] = []
        self.kept: list[tuple[list[int], list[int]]] = []  # chains of granules, as blocks and contents
        self.written: dict[int, int] = {}  # by frame
        self.copies: list[tuple[ExitStack, dict[int, int]]] = []  # and what they copy, by frame
        self.number = 0

    def frame(self, block_id: int) -> int:
        return int(self.store.frames.of_block[block_id])

    def write(self, table: Table, first: int, end: int) -> None:
        """New tokens in blocks ``first`` … ``end - 1``, each in a frame of its own."""
        for place in range(first, end):
            assert self.frame(table.blocks[place]) != self.store.frames.zeros
            if place == len(table.contents):
                self.number += 1
                table.contents.append(self.number)
            self.written[self.frame(table.blocks[place])] = table.contents[place]

    def attempt(self, act: Callable[[], None]) -> bool:
        try:
            act()
        except OutOfFrames:
            return False
        return True

    @rule(num_blocks=st.integers(1, 16))
    def begin(self, num_blocks: int) -> None:
        if num_blocks <= self.pool.num_free:
            table = Table(self.pool.allocate(num_blocks), 0, [])
            self.windows.begin(table.held, table.blocks, 0)
            self.tables.append(table)

    @precondition(lambda self: self.kept)
    @rule(data=st.data(), num_more=st.integers(1, 6), comes=st.booleans())
    def go_on(self, data: st.DataObject, num_more: int, comes: bool) -> None:
        """From the end of a granule that is kept, or of what ``comes`` behind it, if what is seen has its frames."""
        blocks, contents = data.draw(st.sampled_from(self.kept))
        num_granules = data.draw(st.integers(1, len(blocks) * BLOCK // GRANULE_TOKENS))
        num_shared = num_granules * GRANULE_TOKENS // BLOCK
        if num_more > self.pool.num_free:
            return
        self.pool.share(blocks[:num_shared])
        table = Table(
            blocks[:num_shared] + self.pool.allocate(num_more), num_shared * BLOCK, list(contents[:num_shared])
        )
        end = num_shared + (num_more if comes else 0)
        if not self.windows.is_seen(table.blocks, end * BLOCK, num_shared):
            self.pool.free(table.blocks)
            return
        self.tables.append(table)
        if not self.attempt(lambda: self.windows.begin(table.held, table.blocks, end * BLOCK)):
            assert comes
            self.end(table)
            return
        first = max(num_shared, LAYOUT.first_held_block(end * BLOCK))
        table.contents += [0] * (first - num_shared)
        self.write(table, first, end)
        table.num_tokens = end * BLOCK

    @precondition(lambda self: self.tables)
    @rule(data=st.data(), num_tokens=st.integers(1, 300), keeps=st.booleans())
    def compute(self, data: st.DataObject, num_tokens: int, keeps: bool) -> None:
        table = data.draw(st.sampled_from(self.tables))
        end = min(table.num_tokens + num_tokens, len(table.blocks) * BLOCK)
        before = set(table.held.places)
        if not self.attempt(lambda: self.windows.take(table.held, table.blocks, end)):
            assert table.held.places == before
            return
        self.check_seen(table)  # what a chunk reads is there while it is computed
        self.write(table, min(table.num_tokens // BLOCK, len(table.contents)), num_blocks_for(end, BLOCK))
        table.num_tokens = end
        if keeps:
            self.keep(table)
        self.windows.pass_by(table.held, table.blocks, end)

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def receive(self, data: st.DataObject) -> None:
        """What moves here comes in any order: as far as there is room for it."""
        table = data.draw(st.sampled_from(self.tables))
        if table.num_tokens or table.held.places:
            return
        total = data.draw(st.integers(1, len(table.blocks))) * BLOCK
        first = LAYOUT.first_held_block(total)
        for place in data.draw(st.permutations(range(first, total // BLOCK))):
            blocks = IndexRange(place, place + 1)
            if not self.attempt(lambda blocks=blocks: self.windows.extend(table.held, table.blocks, blocks)):  # type: ignore[misc]
                self.end(table)
                return
        table.contents = [0] * first
        self.write(table, first, total // BLOCK)
        table.num_tokens = total

    def keep(self, table: Table) -> None:
        """Keep the granules of a table, unless some of it came from elsewhere or is kept."""
        num_blocks = table.num_tokens // GRANULE_TOKENS * GRANULE_TOKENS // BLOCK
        blocks = table.blocks[:num_blocks]
        if num_blocks and 0 not in table.contents[:num_blocks] and self.pool.kept.isdisjoint(blocks):
            self.pool.keep(blocks)
            self.kept.append((blocks, table.contents[:num_blocks]))

    @precondition(lambda self: self.kept)
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        chain = data.draw(st.sampled_from(self.kept))
        self.kept.remove(chain)
        self.pool.drop(chain[0])

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def copy(self, data: st.DataObject) -> None:
        """On a thread, what a table holds: the table may end before."""
        table = data.draw(st.sampled_from(self.tables))
        copied = [place for place in sorted(table.held.places) if place < len(table.contents)]
        pins = ExitStack()
        pins.enter_context(self.pool.pinned([table.blocks[place] for place in copied]))
        self.copies.append((pins, {self.frame(table.blocks[place]): table.contents[place] for place in copied}))

    @precondition(lambda self: self.copies)
    @rule(data=st.data())
    def copied(self, data: st.DataObject) -> None:
        self.copies.pop(data.draw(st.integers(0, len(self.copies) - 1)))[0].close()

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        self.end(data.draw(st.sampled_from(self.tables)))

    def end(self, table: Table) -> None:
        self.tables.remove(table)
        self.windows.end(table.held, table.blocks)
        self.pool.free(table.blocks)
        assert not table.held.places

    def check_seen(self, table: Table) -> None:
        end = min(len(table.contents), num_blocks_for(table.num_tokens, BLOCK))
        for place in range(LAYOUT.first_seen_block(table.num_tokens), end):
            assert place in table.held.places
            assert self.written[self.frame(table.blocks[place])] == table.contents[place], "somebody wrote there"

    @invariant()
    def what_is_seen_is_there(self) -> None:
        self.pool.check_integrity()
        self.windows.check_integrity((table.held, table.blocks) for table in self.tables)
        for table in self.tables:
            self.check_seen(table)
        for _, contents in self.copies:
            assert {frame: self.written[frame] for frame in contents} == contents, "written while it is copied"


FramesMachine.TestCase.settings = settings(deadline=None, max_examples=examples(100), stateful_step_count=40)
test_frames = FramesMachine.TestCase


def test_what_a_table_shares_does_not_lose_its_frames_to_what_comes_with_it() -> None:
    """Of six kept blocks, in six frames, four are shared by a table that needs two more: the others give way."""
    pool, frames = BlockPool(8), FrameMap.shared_out(8, 6)
    windows = WindowFrames(pool, frames)
    kept = pool.allocate(6)
    windows.hold(kept)
    pool.keep(kept)
    windows.let_go(kept)
    pool.free(kept)
    shared, placed = kept[:4], frames.of_block[kept[:4]].tolist()
    pool.share(shared)
    windows.hold(shared + pool.allocate(2))
    assert frames.of_block[shared].tolist() == placed
    assert not windows.has_all(kept[4:5])
    assert not windows.has_all(kept[5:])
    windows.check_integrity({*shared, 6, 7})


def test_a_frame_stays_while_a_copy_touches_it() -> None:
    """Also if no table holds the block, which is cached, and another block needs a frame."""
    pool = BlockPool(4)
    frames = WindowFrames(pool, FrameMap.shared_out(4, 1))
    first, second = pool.allocate(1), pool.allocate(1)
    frames.hold(first)
    pool.keep(first)
    with pool.pinned(first):
        frames.let_go(first)
        with pytest.raises(OutOfFrames):
            frames.hold(second)
        assert frames.has_all(first)
    frames.hold(second)
    assert not frames.has_all(first)
