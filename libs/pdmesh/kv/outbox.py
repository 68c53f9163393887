"""What waits to be sent to one member of a prefill group: layers of a chunk that wait together go as one piece."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

import anyio

from pdmesh.kv.outgoing import Blocks
from pdmesh.kv.piece import PieceKind


class Outgoing(NamedTuple):
    """Blocks, and how many members are sent them by who computed them."""

    blocks: Blocks
    num_members: int
    kind: PieceKind = PieceKind.KV  # or AGAIN: they are to be sent here


class Outbox:
    """First in, first out; what follows the last of them, in its layers, joins it while it is held back.

    It is held back until it has as many layers as were wanted when it was last added to, or nothing more can join it:
    because it goes up to the model's last layer, fills a piece of ``max_pages``, or something else came after it.
    Bounded by its user, who adds each page once. Event loop only.
    """

    def __init__(self, *, num_layers: int, max_pages: int) -> None:
        self._num_layers = num_layers
        self._max_pages = max_pages
        self._waiting: deque[Outgoing] = deque()
        self._holds_last = False
        self._due = anyio.Event()

    def put(self, item: Outgoing, layers_a_piece: int = 1) -> None:
        """Add blocks, and hold them back until so many of their layers are together."""
        blocks = item.blocks
        if self._holds_last and self._follows(item):
            last = self._waiting.pop().blocks
            blocks = last._replace(num_layers=last.num_layers + blocks.num_layers)
        self._waiting.append(item._replace(blocks=blocks))
        self._holds_last = (
            blocks.num_layers < layers_a_piece
            and blocks.end_layer < self._num_layers
            and blocks.num_pages + blocks.num_blocks <= self._max_pages
        )
        if not self._holds_last or len(self._waiting) > 1:
            self._due.set()

    def put_first(self, item: Outgoing) -> None:
        """Add what somebody has been waiting for longer than for all that waits here."""
        self._waiting.appendleft(item)
        self._due.set()

    def flush(self) -> None:
        """Hold nothing back of what is here."""
        self._holds_last = False
        self._due.set()

    async def take(self) -> Outgoing:
        """The next that is due, or as much of it as fits into a piece. Several tasks may wait for it."""
        while len(self._waiting) <= self._holds_last:
            if self._due.is_set():  # else somebody waits for this one
                self._due = anyio.Event()
            await self._due.wait()
        item = self._waiting.popleft()
        piece, left = item.blocks.split(self._max_pages)
        if left:
            self._waiting.extendleft(item._replace(blocks=blocks) for blocks in reversed(left))
            self._due.set()
        return item._replace(blocks=piece)

    def _follows(self, item: Outgoing) -> bool:
        last, blocks = self._waiting[-1].blocks, item.blocks
        return (
            self._waiting[-1].num_members == item.num_members
            and (last.chunk, last.first_block, last.num_blocks) == (blocks.chunk, blocks.first_block, blocks.num_blocks)
            and last.end_layer == blocks.layer
            and last.num_pages + blocks.num_pages <= self._max_pages
        )
