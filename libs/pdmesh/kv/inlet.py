"""Pages that come from peers, the same way for hand-over, for moves and for exchange in a prefill group."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

from pdmesh.kv.context import KvContext
from pdmesh.kv.incoming import WINDOW_CLOSED, PieceReader
from pdmesh.kv.lane import Lane
from pdmesh.kv.ledger import PageLedger, PageState
from pdmesh.kv.pages import Blocks
from pdmesh.kv.peer_reads import note_bytes
from pdmesh.kv.piece import PieceHeader, PieceKind
from pdmesh.transport.kv_transport import ReceivedPiece


class Inlet(Protocol):
    """One request's receiving side of a transfer or group."""

    is_over: bool  # its blocks may be another request's by now

    @property
    def block_ids(self) -> Sequence[int]: ...

    @property
    def ledger(self) -> PageLedger: ...

    def lane_from(self, source: int) -> Lane | None:
        """Return the lane to a source; None if that source was lost."""
        ...

    def expects(self, header: PieceHeader) -> bool:
        """Whether a piece is about pages that one of its sources may send."""
        ...

    def place(self, header: PieceHeader, blocks: Blocks) -> None:
        """Note that the pages of a piece are in their blocks."""
        ...

    def give_up(self, reason: str) -> None:
        """Fail, because a source's pages proved unusable too often."""
        ...


class PageIntake:
    """Takes pieces of KV and peer reads: claims their pages, has them copied, and asks again for what came to nothing.

    Event loop only.
    """

    def __init__(self, context: KvContext, reader: PieceReader) -> None:
        self._context = context
        self._reader = reader
        self.num_pieces = self.num_bytes = 0  # that came
        self.num_bytes_peer_read = 0  # of these
        self._waiting: dict[Inlet, list[Callable[[], object]]] = {}  # until a peer's cache is no more copied

    def take(self, inlet: Inlet, header: PieceHeader, piece: ReceivedPiece) -> None:
        """Take a piece of KV or a peer read.

        Of a peer read, only pages that are neither here nor on their way are copied: what is copied too late means
        nothing, and must not overwrite good pages. Pieces for the same pages wait meanwhile; there are no more of them
        than buffers.
        """
        is_read, blocks = header.kind is PieceKind.PEER_READ, Blocks.of(header)
        layout = self._context.store.layout
        num_bytes = note_bytes(blocks.num_blocks, layout) if is_read else blocks.num_pages * layout.block_bytes
        lane = inlet.lane_from(header.source)
        if inlet.is_over:
            self._context.drop(piece, "unknown")
        elif lane is None or not inlet.expects(header) or not num_bytes == header.payload_bytes == len(piece.payload):
            self._context.drop(piece, "range")
        elif inlet.ledger.is_read(blocks):
            self._waiting.setdefault(inlet, []).append(partial(self.take, inlet, header, piece))
        elif not (missing := inlet.ledger.claim(blocks, header.source, PageState.of(is_read=is_read))):
            self._context.drop(piece, "duplicate")
        else:
            lane.resume()  # it has heard of us
            parts = missing if is_read else [blocks]
            self._reader.read(
                header,
                piece,
                inlet.block_ids[blocks.first_block : blocks.end],
                address=lane.address,
                is_wanted=lambda: not inlet.is_over,
                on_read=partial(self._read, inlet, header, parts),
                parts=parts,
            )

    def _read(self, inlet: Inlet, header: PieceHeader, parts: Sequence[Blocks], fault: str | None) -> None:
        """What was claimed of a piece has been copied, or could not be."""
        is_read = header.kind is PieceKind.PEER_READ
        if fault is None:
            num_bytes = sum(blocks.num_pages for blocks in parts) * self._context.store.layout.block_bytes
            self.num_pieces += 1
            self.num_bytes += num_bytes
            self.num_bytes_peer_read += num_bytes if is_read else 0
            if (lane := inlet.lane_from(header.source)) is not None:
                lane.add_sound()
            for blocks in parts:
                if not inlet.is_over:
                    inlet.place(header, blocks)
        else:
            self._context.dropped[fault] += 1
            inlet.ledger.release(Blocks.of(header), header.source)
            if not inlet.is_over:
                self._ask_again(inlet, header, fault)
        if is_read:
            for take in self._waiting.pop(inlet, ()):
                take()

    def _ask_again(self, inlet: Inlet, header: PieceHeader, fault: str) -> None:
        """Ask for a piece again, unless it was read too late (its sender decides then) or its source is lost."""
        lane = inlet.lane_from(header.source)
        if fault == WINDOW_CLOSED or lane is None:
            return
        if reason := lane.ask_again(header, fault):
            inlet.give_up(f"source {header.source}: {reason}")
        else:
            self._context.num_asked_again += 1
