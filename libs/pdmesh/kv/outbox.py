"""Queue of blocks and headers for one peer. Layers of the same blocks that wait together are sent as one piece."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import anyio

from pdmesh.kv.pages import Blocks
from pdmesh.kv.piece import PieceKind
from pdmesh.transport.buffers import MAX_PIECES

NO_BLOCKS = Blocks(0, 0, 0, 0, 0)


class Outgoing(NamedTuple):
    """Blocks to send, or a header about them.

    The member of a group that computed the blocks sends them to ``num_members`` members. A ``kind`` other than KV makes
    a header alone. ``is_again`` marks blocks that the peer asked for again.
    """

    blocks: Blocks
    num_members: int = 0
    kind: PieceKind = PieceKind.KV
    is_again: bool = False


class Outbox:
    """Queue to one peer, first in, first out, except for layers held back until more of the same blocks join them.

    Layers are held until as many are together as the latest `put` asks for, or until no layer can join them: they reach
    the model's last layer, fill a piece, or other layers of these blocks were added. A message without pages overtakes
    pages, and is sent even while pages are paused. The outbox has no bound; its user adds each page only once. Event
    loop only.
    """

    def __init__(
        self, *, num_layers: int, max_pages: Callable[[], int], pages_a_message: Callable[[], int] = lambda: 0
    ) -> None:
        """``max_pages`` returns the current limit of a piece. Pieces of ``pages_a_message`` pages together are sent as
        one message.
        """
        self._num_layers = num_layers
        self._max_pages = max_pages
        self._pages_a_message = pages_a_message
        self._said: deque[Outgoing] = deque()
        self._due: deque[Outgoing] = deque()
        self._held: dict[int, Outgoing] = {}
        self._is_paused = self.is_closed = False
        self._news = anyio.Event()

    def put(self, item: Outgoing, layers_a_piece: int = 1) -> None:
        """Add blocks, and hold them back until ``layers_a_piece`` of their layers are together."""
        blocks = item.blocks
        held = self._held.pop(blocks.first_block, None)
        if held is not None and self._follows(held, item):
            blocks = held.blocks._replace(num_layers=held.blocks.num_layers + blocks.num_layers)
            item = item._replace(blocks=blocks)
        elif held is not None:
            self._due.append(held)
        if (
            blocks.num_layers < layers_a_piece
            and blocks.end_layer < self._num_layers
            and blocks.num_pages + blocks.num_blocks <= self._max_pages()
        ):
            self._held[blocks.first_block] = item
        else:
            self._due.append(item)
        self._wake()

    def put_first(self, item: Outgoing) -> None:
        """Add pages before all others, because the peer has waited for them the longest."""
        self._due.appendleft(item)
        self._wake()

    def say(self, item: Outgoing) -> None:
        """Add a header that overtakes all pages."""
        self._said.append(item)
        self._wake()

    def flush(self) -> None:
        """Release all layers that are held back."""
        self._due.extend(self._held.values())
        self._held.clear()
        self._wake()

    def pause(self) -> None:
        """Hold all pages until `resume`."""
        self._is_paused = True

    def resume(self) -> None:
        """Release the pages that `pause` holds."""
        if self._is_paused:
            self._is_paused = False
            self._wake()

    def close(self) -> None:
        """Hand out nothing more: `take` returns an empty list."""
        self.is_closed = True
        self._wake()

    async def take(self) -> list[Outgoing]:
        """Wait, and return the next items: one header, or blocks cut to pieces. Return an empty list once closed.

        Due blocks are returned together, as far as their pages fit into a message. The longer the last send took, the
        more blocks are due; `take` never waits for more. Several tasks may wait.
        """
        while not self.is_closed:
            if self._said:
                return [self._said.popleft()]
            if self._due and not self._is_paused:
                return self._take_due()
            await self._news.wait()
        return []

    def _take_due(self) -> list[Outgoing]:
        taken, max_pages, num_left = list[Outgoing](), self._max_pages(), self._pages_a_message()
        while self._due and len(taken) < MAX_PIECES:
            item = self._due.popleft()
            piece, left = item.blocks.split(max_pages)
            num_left -= piece.num_pages
            if taken and num_left < 0:
                self._due.appendleft(item)
                break
            if left:
                self._due.extendleft(item._replace(blocks=blocks) for blocks in reversed(left))
                item = item._replace(blocks=piece)
            taken.append(item)
        return taken

    def _follows(self, held: Outgoing, item: Outgoing) -> bool:
        last, blocks = held.blocks, item.blocks
        return (
            held.num_members == item.num_members
            and (last.chunk, last.num_blocks, last.end_layer) == (blocks.chunk, blocks.num_blocks, blocks.layer)
            and last.num_pages + blocks.num_pages <= self._max_pages()
        )

    def _wake(self) -> None:
        self._news.set()
        self._news = anyio.Event()
