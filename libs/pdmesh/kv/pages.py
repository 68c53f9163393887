"""Neighbouring pages of a request: their name here, their division into pieces, and searches in a table."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from itertools import groupby
from typing import NamedTuple

from pdmesh.kv.piece import PieceHeader
from pdmesh.kv_layout import IndexRange, KvLayout, KvPart

#: Entry of a block table for a block of the context that is held elsewhere.
NO_BLOCK = -1


class Blocks(NamedTuple):
    """Neighbouring complete blocks of a request's block table, in ``num_layers`` layers from ``layer`` on."""

    chunk: int
    layer: int
    first_block: int
    num_blocks: int
    num_layers: int = 1

    @classmethod
    def of(cls, header: PieceHeader) -> Blocks:
        """Return the blocks that a piece contains or asks for."""
        blocks, layers, _ = header.part
        return cls(header.chunk, layers.start, blocks.start, blocks.size, layers.size)

    @property
    def end(self) -> int:
        return self.first_block + self.num_blocks

    @property
    def end_layer(self) -> int:
        return self.layer + self.num_layers

    @property
    def num_pages(self) -> int:
        return self.num_layers * self.num_blocks

    def num_bytes(self, layout: KvLayout) -> int:
        """Return the bytes of all these pages."""
        return self.num_blocks * layout.bytes_of(IndexRange(self.layer, self.end_layer))

    def within(self, part: KvPart) -> Blocks:
        """Return the blocks of this range that are in ``part``."""
        blocks = IndexRange(self.first_block, self.end).common(part.blocks)
        layers = IndexRange(self.layer, self.end_layer).common(part.layers)
        return Blocks(self.chunk, layers.start, blocks.start, blocks.size, layers.size)

    def held(self, layout: KvLayout, first_block: int) -> Iterator[Blocks]:
        """Yield this range without the blocks before ``first_block`` in layers with a window.

        The yielded ranges have the same blocks in all their layers. Nothing is yielded if no page is left.
        """
        if self.first_block >= first_block or not layout.windowed_layers:
            if self.num_pages:
                yield self
            return
        for is_windowed, numbers in groupby(range(self.layer, self.end_layer), layout.windowed_layers.__contains__):
            layers = list(numbers)
            first = min(first_block, self.end) if is_windowed else self.first_block
            part = Blocks(self.chunk, layers[0], first, self.end - first, len(layers))
            if part.num_pages:
                yield part

    def split(self, size: int, max_blocks: int | None = None) -> tuple[Blocks, list[Blocks]]:
        """Return a first piece, and the remaining ranges in order.

        The piece has at most ``size`` pages, and at most ``max_blocks`` blocks of each layer. It has whole layers if
        one fits.
        """
        if self.num_pages <= size and self.num_blocks <= (max_blocks or self.num_blocks):
            return self, []
        num_blocks = min(size, self.num_blocks, max_blocks or self.num_blocks)
        num_layers = min(size // num_blocks, self.num_layers)
        piece = self._replace(num_blocks=num_blocks, num_layers=num_layers)
        beside = piece._replace(first_block=piece.end, num_blocks=self.num_blocks - num_blocks)
        below = self._replace(layer=piece.end_layer, num_layers=self.num_layers - num_layers)
        return piece, [left for left in (beside, below) if left.num_pages]

    def cut(self, size: int, max_blocks: int | None = None) -> Iterator[Blocks]:
        """Yield pieces of at most ``size`` pages, and ``max_blocks`` blocks of a layer; nothing without pages."""
        left: list[Blocks] = [self] if self.num_pages else []
        while left:
            piece, rest = left.pop().split(size, max_blocks)
            left += reversed(rest)
            yield piece


@functools.cache
def marked(*values: int) -> bytes:
    """Return a table for `bytes.translate` that maps these values to 1 and all others to 0."""
    return bytes(value in values for value in range(256))


def runs(marks: bytes | bytearray) -> Iterator[tuple[int, int]]:
    """Yield each run of ones among zeros as (first, count).

    A context may have a million pages, and the event loop calls this function, so the cost is per run, not per page.
    """
    end = 0
    while (first := marks.find(1, end)) >= 0:
        end = marks.find(0, first)
        if end < 0:
            end = len(marks)
        yield first, end - first
