"""Pages of layers with a state: the page that holds the state behind each token.

A layer's page of a block holds two states, each with its *position*: the number of tokens that the state covers. A step
reads the state that covers the tokens before its first. The step writes the state behind its last token, and behind
each block that has a page. The state that was read stays, so a step may be computed again. A state of another position
is never read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from pdmesh.engine.base import SequenceSlice
from pdmesh.kv.frames import FrameMap
from pdmesh.kv_layout import num_blocks_for

#: Position of a place without a state. Zeros are no state, and no state is read before the first token.
NO_POSITION = 0

#: Page of a block without a frame: the state behind the block is not written.
NO_PAGE = -1

#: Positions of the states in a layer's pages, (pages, 2).
Positions = npt.NDArray[np.integer[Any]]


class StateSlice(NamedTuple):
    """Rows of a step of one sequence: ``num_tokens`` tokens from ``start`` on, in rows from ``row`` on.

    ``pages`` are the layer's pages of the sequence's blocks, from the block of the token before ``start`` on, or from
    the first block, `NO_PAGE` for blocks without a page. With ``is_timing``, the state before may be missing.
    """

    row: int
    start: int
    num_tokens: int
    pages: Sequence[int]
    is_timing: bool = False


class StatePlace(NamedTuple):
    """Slot of a page: each page has two states."""

    page: int
    slot: int


class StateStop(NamedTuple):
    """A state to write: behind the first ``num_tokens`` tokens of a slice."""

    num_tokens: int
    place: StatePlace


@dataclass(frozen=True, slots=True)
class StatePath:
    """Places of a slice's states. ``source`` is None if the sequence begins with the slice: its state is zeros."""

    source: StatePlace | None
    stops: tuple[StateStop, ...]

    @classmethod
    def begun(cls, part: StateSlice, block_size: int, positions: Positions) -> StatePath:
        """Return the places for a slice, and forget all other states of the pages that the slice writes.

        Raise RuntimeError if no page has the state before the slice, or can take the state behind the slice.
        """
        source = None if part.start == 0 or part.is_timing else _found(part, positions)
        first_block = max(0, part.start - 1) // block_size
        end = part.start + part.num_tokens
        stops: list[StateStop] = []
        for block in range(part.start // block_size, num_blocks_for(end, block_size)):
            page = part.pages[block - first_block]
            if page == NO_PAGE:
                continue
            slot = 1 if source == (page, 0) else 0
            position = min(end, (block + 1) * block_size)
            stops.append(StateStop(position - part.start, StatePlace(page, slot)))
            for each in (0, 1):
                if source != (page, each):
                    positions[page, each] = NO_POSITION
        if not stops or stops[-1].num_tokens != part.num_tokens:
            raise RuntimeError(f"the state behind token {end} has no page")
        return cls(source, tuple(stops))

    def end(self, start: int, positions: Positions) -> None:
        """Mark the states of a slice that begins at token ``start`` as written."""
        for stop in self.stops:
            positions[stop.place] = start + stop.num_tokens


def _found(part: StateSlice, positions: Positions) -> StatePlace:
    page = part.pages[0]
    for slot in (0, 1):
        if positions[page, slot] == part.start:
            return StatePlace(page, slot)
    raise RuntimeError(f"a layer's state behind token {part.start} is not here")


def state_slices(batch: Sequence[SequenceSlice], block_size: int, frames: FrameMap | None) -> tuple[StateSlice, ...]:
    """Return each slice's rows, and its pages in layers with states: blocks, or with ``frames`` the blocks' frames.

    Raises ValueError if a slice has a draft.
    """
    slices: list[StateSlice] = []
    row = 0
    for part in batch:
        if part.draft:
            raise ValueError("drafts are not verified by a model with states: a rejected token cannot be taken back")
        blocks = slice(max(0, part.start - 1) // block_size, num_blocks_for(part.start + part.num_tokens, block_size))
        pages = part.sequence.block_table[blocks]
        if frames is not None:
            found = frames.of_block[pages]
            found[found == frames.zeros] = NO_PAGE
            pages = found.tolist()
        slices.append(StateSlice(row, part.start, part.num_tokens, pages, part.sequence.is_timing))
        row += part.num_tokens
    return tuple(slices)
