"""Laws of the block pool: blocks are never lost, never in two places, and contiguous where that is possible."""

from __future__ import annotations

from collections import Counter
from contextlib import ExitStack

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from pdmesh.kv.blocks import BlockPool, OutOfBlocks
from pdmesh_testing.examples import examples

NUM_BLOCKS = 24


class BlockPoolMachine(RuleBasedStateMachine):
    """A pool beside a plain model of it."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(NUM_BLOCKS)
        self.held: list[list[int]] = []
        self.pins: list[tuple[list[int], ExitStack]] = []
        self.releasing: list[list[int]] = []  # freed, not yet released
        self.kept: set[int] = set()
        self.dropped: set[int] = set()

    def pinned(self) -> set[int]:
        return {block for blocks, _ in self.pins for block in blocks}

    def held_blocks(self) -> set[int]:
        return {block for blocks in self.held for block in blocks}

    def free_blocks(self) -> set[int]:
        freed = {block for blocks in self.releasing for block in blocks} | self.dropped
        return set(range(NUM_BLOCKS)) - self.held_blocks() - self.kept - (freed & self.pinned())

    @rule(num_blocks=st.integers(0, NUM_BLOCKS + 1))
    def allocate(self, num_blocks: int) -> None:
        free = self.free_blocks()
        if num_blocks > len(free):
            with pytest.raises(OutOfBlocks):
                self.pool.allocate(num_blocks)
            return
        block_ids = self.pool.allocate(num_blocks)
        assert len(block_ids) == num_blocks
        assert set(block_ids) <= free
        assert block_ids == sorted(set(block_ids))
        runs = [start for start in free if set(range(start, start + num_blocks)) <= free]
        if runs and block_ids:
            assert block_ids == list(range(block_ids[0], block_ids[0] + num_blocks)), "a run would have held them"
        self.held.append(block_ids)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        blocks = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        unheld = [block for block in blocks if block not in self.held_blocks() | self.kept]
        released: list[int] = []
        self.releasing.append(unheld)

        def on_released() -> None:
            assert not released, "released twice"
            released.extend(unheld)
            self.releasing = [blocks for blocks in self.releasing if blocks is not unheld]

        self.pool.free(blocks, on_released=on_released)
        is_released = all(blocks is not unheld for blocks in self.releasing)
        assert is_released != bool(set(unheld) & self.pinned())

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        """Another table begins with the blocks of one, or of a part of it."""
        blocks = data.draw(st.sampled_from(self.held))
        shared = blocks[: data.draw(st.integers(0, len(blocks)))]
        self.pool.share(shared)
        self.held.append(shared)

    @precondition(lambda self: self.kept)
    @rule(data=st.data())
    def share_kept(self, data: st.DataObject) -> None:
        blocks = data.draw(st.lists(st.sampled_from(sorted(self.kept)), unique=True))
        self.pool.share(blocks)
        self.held.append(blocks)

    @precondition(lambda self: self.held_blocks() - self.kept)
    @rule(data=st.data())
    def keep(self, data: st.DataObject) -> None:
        blocks = data.draw(st.lists(st.sampled_from(sorted(self.held_blocks() - self.kept)), unique=True))
        self.pool.keep(blocks)
        self.kept |= set(blocks)

    @precondition(lambda self: self.kept)
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        blocks = data.draw(st.lists(st.sampled_from(sorted(self.kept)), unique=True))
        self.pool.drop(blocks)
        self.kept -= set(blocks)
        self.dropped |= set(blocks) - self.held_blocks()

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def pin(self, data: st.DataObject) -> None:
        blocks = data.draw(st.sampled_from(self.held))
        some = data.draw(st.lists(st.sampled_from(blocks), unique=True)) if blocks else []
        stack = ExitStack()
        stack.enter_context(self.pool.pinned(some))
        self.pins.append((some, stack))

    @precondition(lambda self: self.pins)
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        _, stack = self.pins.pop(data.draw(st.integers(0, len(self.pins) - 1)))
        stack.close()

    @invariant()
    def balance(self) -> None:
        self.pool.check_integrity()
        assert self.pool.references == Counter(block for blocks in self.held for block in blocks)
        assert self.pool.num_held == len(self.held_blocks())
        assert self.pool.num_free == len(self.free_blocks())
        assert self.pool.num_cached == len(self.kept - self.held_blocks())
        num_used = self.pool.num_held + self.pool.num_cached + self.pool.num_quarantined
        assert self.pool.num_free + num_used == NUM_BLOCKS
        for blocks in self.releasing:
            assert set(blocks) & self.pinned(), "released late"

    def teardown(self) -> None:
        for _, stack in self.pins:
            stack.close()
        for blocks in self.held:
            self.pool.free(blocks)
        self.pool.drop(sorted(self.kept))
        assert self.pool.num_free == NUM_BLOCKS
        assert self.pool.allocate(NUM_BLOCKS) == list(range(NUM_BLOCKS))


BlockPoolMachine.TestCase.settings = settings(deadline=None, max_examples=examples(100))
test_block_pool = BlockPoolMachine.TestCase


def test_a_block_cannot_be_freed_twice() -> None:
    pool = BlockPool(4)
    block_ids = pool.allocate(2)
    pool.free(block_ids)
    with pytest.raises(AssertionError, match="not held"):
        pool.free(block_ids)
    with pytest.raises(AssertionError, match="named twice"):
        pool.free([0, 0])
    with pytest.raises(AssertionError, match="not held"):
        pool.share(block_ids)
    pool.check_integrity()
