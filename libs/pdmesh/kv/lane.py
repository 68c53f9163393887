"""Messages to one peer about one request's KV, for hand-overs, moves and prefill groups.

Pages wait in an outbox and are sent as pieces or offered as peer reads; a few are in progress at once. Each side of a
transfer has a lane: a source for its pages, a receiver for requests to send pages again, a member of a group for both.

**An unusable piece** is requested again, by a message that names its pages: AGAIN if it was damaged, NO_PEER_READS if
the pages cannot be read from the sender's cache. The sender keeps the pages until the receiver has everything, and
sends them before anything else. Both sides limit the number of repeats (`pdmesh.kv.repair`).
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from math import ceil
from typing import Any

import anyio
import anyio.abc

from pdmesh.errors import KvTransferError
from pdmesh.kv.ledger import PageLedger
from pdmesh.kv.outbox import NO_BLOCKS, Outbox, Outgoing
from pdmesh.kv.outgoing import PieceWriter
from pdmesh.kv.pages import Blocks
from pdmesh.kv.piece import PieceHeader, PieceKind
from pdmesh.kv.repair import DamageLimit, RefusalLimit
from pdmesh.kv_layout import IndexRange, KvLayout, KvPart

#: Maximum number of pieces under way to one peer: one is copied and checked while others travel. Between hosts each
#: needs a round trip before its bytes are sent: a busy machine's TCP carried 1.1 to 1.2 GB/s with 4, and 1.35 with 8.
PIECES_IN_FLIGHT = 8

#: Fault of a peer read: the sender's cache cannot be read here, so the sender is asked for bytes.
UNREADABLE = "unreadable"

#: Minimum number of steps that a chunk is sent in, as far as a piece holds more than one of its layers.
STEPS_A_CHUNK = 4

#: Minimum bytes of a step near a context's end. Decode waits for the end, so the steps become smaller and smaller.
TAIL_BYTES = 4 << 20

#: The last layers are cut into as many pieces as are under way at once, so that these are copied and checked in
#: parallel, unless a piece would be smaller than this.
NUM_LAST_LAYERS, LAST_PIECE_BYTES = 2, 2 << 20

#: Runs a task as long as the instance does.
StartTask = Callable[[Callable[[], Coroutine[Any, Any, None]]], object]


class Lane:
    """The lane to one peer. Every header is made from ``about``. Event loop only.

    ``on_taken`` is called each time that the peer took pieces, and ``on_failed``, once, when it takes none. ``sent_s``
    sums the time in which pieces were under way.
    """

    def __init__(
        self,
        address: bytes,
        about: PieceHeader,
        writer: PieceWriter,
        *,
        layout: KvLayout,
        num_pages: int = 0,
        max_in_flight: int = PIECES_IN_FLIGHT,
        start: StartTask | None = None,
        on_taken: Callable[[], object] = lambda: None,
        on_failed: Callable[[str], object] = lambda reason: None,
    ) -> None:
        """``num_pages`` is the number of pages that the peer may offer as peer reads.

        ``start`` runs the lane once there is a header to send. Without ``start``, the owner calls `run`.
        """
        self.address = address
        self.num_under_way = 0
        self.sent_s = 0.0
        self._since_s = 0.0
        self._num_left = 0
        self._max_in_flight = max_in_flight
        self._about = about
        self._layout = layout
        self._writer = writer
        self._outbox = Outbox(
            num_layers=layout.num_layers,
            max_pages=lambda: writer.pages_a_piece(address),
            pages_a_message=lambda: writer.pages_a_message(address),
        )
        self._start = start
        self._on_taken = on_taken
        self._on_failed = on_failed
        self._scope: anyio.CancelScope | None = None
        self._sent = DamageLimit(sends=True)
        self._received = DamageLimit(sends=False)
        self._refusals = RefusalLimit(num_pages)
        self.flush, self.pause, self.resume = self._outbox.flush, self._outbox.pause, self._outbox.resume

    @property
    def is_done(self) -> bool:
        """Whether the peer took all pages, apart from repeats that it asked for."""
        return not self._num_left

    def put(self, item: Outgoing, layers_a_piece: int = 1) -> None:
        """Send pages, once ``layers_a_piece`` of their layers are together (`pdmesh.kv.outbox`)."""
        self._num_left += item.blocks.num_pages
        self._outbox.put(item, layers_a_piece)

    def put_in_steps(self, blocks: Blocks, layers_a_piece: int, *, is_tail: bool) -> None:
        """Send pages. The last layers of a context's tail go in several pieces in parallel."""
        size = blocks.num_pages
        is_last = is_tail and blocks.layer >= self._layout.num_layers - NUM_LAST_LAYERS
        if is_last and not self._writer.may_read(self.address):
            size = max(ceil(size / PIECES_IN_FLIGHT), LAST_PIECE_BYTES // self._layout.page_bytes(blocks.layer), 1)
        for some in blocks.cut(size):
            self.put(Outgoing(some), layers_a_piece)

    async def run(self) -> None:
        """Send the contents of the outbox, until the lane is closed or cut off, or a send fails."""
        with anyio.CancelScope() as self._scope:
            async with anyio.create_task_group() as senders:
                for _ in range(self._max_in_flight):
                    senders.start_soon(self._send)

    def close(self) -> None:
        """Begin no further send: `run` returns when the sends in progress have ended."""
        self._outbox.close()

    def cut_off(self) -> None:
        """End the lane, and the sends in progress too."""
        self.close()
        if self._scope is not None:
            self._scope.cancel()

    def say(self, kind: PieceKind) -> None:
        """Send a header alone. A failure is ignored, because the peer may not know the request yet."""
        self._say(Outgoing(NO_BLOCKS, kind=kind))

    # --- unusable pieces ----------------------------------------------------------------------------------------------

    def add_sound(self) -> None:
        """Count a piece that arrived undamaged."""
        self._received.add_sound()

    def ask_again(self, header: PieceHeader, fault: str) -> str | None:
        """Ask the peer for an unusable piece again. Return the reason if a limit forbids this, else None."""
        kind = PieceKind.NO_PEER_READS if fault == UNREADABLE else PieceKind.AGAIN
        if kind is PieceKind.NO_PEER_READS:
            if not self._refusals.add(header.part.num_pages):
                return "the sender keeps offering KV that cannot be read here"
        elif not self._received.add_damaged():
            num_damaged, layer = self._received.num_damaged + 1, header.part.layers.start
            return f"{num_damaged} pieces arrived damaged, the last one of layer {layer}"
        self._say(Outgoing(Blocks.of(header), header.num_members, kind))
        return None

    def send_again(self, header: PieceHeader, ledger: PageLedger, theirs: KvPart) -> str | None:
        """Send pages again that the peer asks for, before all others. ``theirs`` is the peer's part.

        Return the reason to drop the request, else None: the pages are not the peer's, were never sent, or are too
        many.
        """
        blocks = Blocks.of(header)
        if (
            not 0 < blocks.num_pages <= self._writer.max_pages
            or not theirs.blocks.holds(header.part.blocks)
            or not theirs.layers.holds(header.part.layers)
            or header.part.heads != IndexRange(0, self._layout.num_kv_heads)
            or not ledger.has(blocks)
        ):
            return "range"
        if header.kind is PieceKind.NO_PEER_READS:
            is_allowed = self._writer.refused(self.address, blocks.num_pages)
        else:
            is_allowed = self._sent.add_damaged()
        if not is_allowed:
            return "limit"
        self._outbox.put_first(Outgoing(blocks, header.num_members, is_again=True))
        return None

    # --- inside -------------------------------------------------------------------------------------------------------

    def _say(self, item: Outgoing) -> None:
        self._outbox.say(item)
        if self._start is not None:
            self._start(self.run)
            self._start = None

    async def _send(self) -> None:
        while items := await self._outbox.take():
            if not self.num_under_way:
                self._since_s = anyio.current_time()
            self.num_under_way += 1
            first = items[0]
            try:
                if first.kind is PieceKind.KV:
                    self._sent.add_sound(len(items))  # counted before the peer can ask for repeats
                    await self._writer.send(self.address, [(item.blocks, self._about_item(item)) for item in items])
                    self._num_left -= sum(0 if item.is_again else item.blocks.num_pages for item in items)
                else:
                    await self._writer.ask(self.address, first.blocks, self._about_item(first))
            except KvTransferError as error:
                # A refused greeting is ignored, and so is a lane that is cut off.
                if first.blocks.num_pages and not self._outbox.is_closed:
                    self.cut_off()
                    self._on_failed(str(error))
            self.num_under_way -= 1
            if not self.num_under_way:
                self.sent_s += anyio.current_time() - self._since_s
            self._on_taken()

    def _about_item(self, item: Outgoing) -> PieceHeader:
        """Return the header of an item, without its blocks."""
        about = self._about
        if (item.kind, item.num_members) == (about.kind, about.num_members):
            return about
        return about._replace(kind=item.kind, num_members=item.num_members)


def layers_a_step(layout: KvLayout, blocks: Blocks, *, is_tail: bool) -> int:
    """Return how many layers of a chunk's blocks go together: fewer and fewer near the end of a context's tail."""
    num_wanted = ceil(layout.num_layers / STEPS_A_CHUNK)
    if is_tail:
        num_tail_layers = ceil(TAIL_BYTES / (blocks.num_blocks * layout.page_bytes(blocks.layer)))
        num_wanted = min(num_wanted, max(layout.num_layers - blocks.end_layer, num_tail_layers))
    return num_wanted
