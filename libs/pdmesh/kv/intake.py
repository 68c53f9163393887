"""Pages received from peers, for copies and for exchange in a prefill group.

A piece's pages are claimed, its payload is loaded and checked, then copied into its blocks, on the event loop or on a
thread. The payload of a peer read names the pages in the sender's cache, from where they are copied.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

import structlog

from pdmesh.errors import KvTransferError
from pdmesh.kv.blocks import BlockGuard, BlockPool
from pdmesh.kv.context import KvContext
from pdmesh.kv.lane import UNREADABLE, Lane
from pdmesh.kv.ledger import PageLedger, PageState
from pdmesh.kv.pages import Blocks
from pdmesh.kv.peer_reads import CacheOwner, ReadNote, note_bytes
from pdmesh.kv.piece import PieceHeader, PieceKind
from pdmesh.transport.kv_transport import ReceivedPiece

log = structlog.get_logger()

#: Fault of a peer read whose sender has closed the window meanwhile.
WINDOW_CLOSED = "window closed"

#: In larger caches the first write to a page may take long (`PageIntake`).
_LARGE_CACHE_BYTES = 64 << 20


class Inlet(Protocol):
    """Receiving side of a copy or group, for one request. If ``is_over``, the blocks may belong to another request."""

    is_over: bool

    @property
    def block_ids(self) -> Sequence[int]: ...

    @property
    def ledger(self) -> PageLedger: ...

    def lane_from(self, source: int) -> Lane | None:
        """Return the lane to a source; None if there is no such source, or it was lost."""
        ...

    def expects(self, header: PieceHeader) -> bool:
        """Whether a piece names pages that one of the sources may send."""
        ...

    def place(self, header: PieceHeader, blocks: Blocks) -> None:
        """Note that the pages of a piece are in their blocks."""
        ...

    def give_up(self, reason: str) -> None:
        """Fail, because a source's pages were unusable too often."""
        ...


class PageIntake:
    """Receives pieces of KV and peer reads: claims their pages, has them copied, and asks again for unusable ones.

    Blocks that are freed while a thread copies into them stay quarantined. The system commits a large cache's memory
    when it is first written, which took up to 0.9 s for a piece of 16 layers on a busy virtual machine (2026-11-22):
    long enough for a helper to seem silent. So a thread copies the first piece of each page. Event loop only.
    """

    def __init__(self, context: KvContext, pool: BlockPool, beside: PageIntake | None = None) -> None:
        """``beside`` is another intake for the same cache."""
        self.num_pieces = self.num_bytes = 0
        self.num_bytes_peer_read = 0
        self._context = context
        self._peer_reads = context.peer_reads
        self._store = store = context.store
        self._pool = pool
        #: Calls of `take` for pieces whose pages a peer read is copying.
        self._waiting: dict[Inlet, list[Callable[[], object]]] = {}
        layout = store.layout
        is_large = store.num_blocks * layout.bytes_per_block > _LARGE_CACHE_BYTES
        #: By layer, 1 for each page of a piece that the event loop could copy (`_is_first`). Empty for a small cache.
        self._has_come = [bytearray(store.num_blocks) for _ in range(layout.num_layers)] if is_large else []
        if beside is not None:
            self._has_come = beside._has_come

    def take(self, inlet: Inlet, header: PieceHeader, piece: ReceivedPiece) -> None:
        """Receive a piece of KV or a peer read, and copy its pages. Unusable pieces are dropped.

        A peer read copies only pages that are neither here nor on their way: its copy may end too late and be void, and
        must not overwrite good pages. Pieces for the same pages wait meanwhile. The number of receive buffers bounds
        these pieces.
        """
        is_read, blocks = header.kind is PieceKind.PEER_READ, Blocks.of(header)
        layout = self._store.layout
        num_bytes = note_bytes(blocks.num_blocks, layout) if is_read else blocks.num_bytes(layout)
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
            lane.resume()
            self._read(inlet, header, piece, lane.address, missing if is_read else [blocks])

    # --- copying ------------------------------------------------------------------------------------------------------

    def _read(
        self, inlet: Inlet, header: PieceHeader, piece: ReceivedPiece, address: bytes, parts: Sequence[Blocks]
    ) -> None:
        """Copy a piece from the peer at ``address``, or only ``parts`` of a peer read. Then release the piece."""
        block_ids = inlet.block_ids[slice(*header.part.blocks)]
        is_inline = Blocks.of(header).num_bytes(self._store.layout) <= self._store.inline_copy_bytes
        is_there = True
        if header.kind is PieceKind.PEER_READ:
            owner = None if self._peer_reads is None else self._peer_reads.owner(address)
            is_there = owner is not None
            is_inline = is_inline and self._peer_reads is not None and self._peer_reads.copies_inline
            fetch: Callable[[], str | None] = partial(self._read_peer, header, piece, block_ids, parts, owner)
        else:
            fetch = partial(self._scatter, header, piece, block_ids)
        guards = self._pool.guards_of(block_ids)
        copy = partial(self._copy, header, piece, partial(_after, guards, fetch) if guards else fetch)
        if not is_there or (is_inline and not guards and not self._is_first(header, block_ids)):
            fault = copy()
            piece.release()
            self._copied(inlet, header, parts, fault)
        else:
            # The number of receive buffers bounds these tasks.
            self._context.tasks.start_soon(self._read_on_thread, inlet, header, piece, parts, block_ids, copy)

    def _is_first(self, header: PieceHeader, block_ids: Sequence[int]) -> bool:
        """Whether a piece is the first for one of its pages. Mark these pages as written."""
        is_first = False
        for has_come in self._has_come[slice(*header.part.layers)]:
            if not all(map(has_come.__getitem__, block_ids)):
                is_first = True
                for block_id in block_ids:
                    has_come[block_id] = 1
        return is_first

    async def _read_on_thread(
        self,
        inlet: Inlet,
        header: PieceHeader,
        piece: ReceivedPiece,
        parts: Sequence[Blocks],
        block_ids: Sequence[int],
        copy: Callable[[], str | None],
    ) -> None:
        fault: str | None = "unknown"  # freed since: the blocks may belong to another request
        try:
            if not inlet.is_over:
                with self._pool.pinned(block_ids):
                    fault = await self._context.copies.run(copy)
        finally:
            piece.release()
        self._copied(inlet, header, parts, fault)

    def _copy(self, header: PieceHeader, piece: ReceivedPiece, fetch: Callable[[], str | None]) -> str | None:
        """Load the payload and check it, then copy with ``fetch``. Return the fault, or None if the copy counts."""
        if not piece.load():
            return "not loaded"
        if not self._context.key.opens_payload(piece.payload, header.check):
            return "checksum"
        return fetch()

    def _scatter(self, header: PieceHeader, piece: ReceivedPiece, block_ids: Sequence[int]) -> None:
        start = 0
        for layer in range(*header.part.layers):
            end = start + len(block_ids) * self._store.layout.page_bytes(layer)
            self._store.scatter(layer, block_ids, piece.payload[start:end])
            start = end

    def _read_peer(
        self,
        header: PieceHeader,
        piece: ReceivedPiece,
        block_ids: Sequence[int],
        parts: Sequence[Blocks],
        owner: CacheOwner | None,
    ) -> str | None:
        """Copy ``parts`` from the peer's cache. Return None, `UNREADABLE`, or `WINDOW_CLOSED`."""
        if self._peer_reads is None or owner is None:
            return UNREADABLE
        note, first_block = ReadNote.unpack(piece.payload), header.part.blocks.start
        copies = [copy for part in parts for copy in note.copies(part, first_block, block_ids, self._store)]
        try:
            is_good = self._peer_reads.read(owner, note, copies)
        except KvTransferError as error:
            log.warning("cannot read a peer's KV in its memory; asking it to send the bytes", reason=str(error))
            return UNREADABLE
        return None if is_good else WINDOW_CLOSED

    # --- what became of it --------------------------------------------------------------------------------------------

    def _copied(self, inlet: Inlet, header: PieceHeader, parts: Sequence[Blocks], fault: str | None) -> None:
        """Place the claimed pages of a piece, or release them because of a fault, and ask for the piece again.

        After a peer read, take the pieces that waited for it.
        """
        is_read, lane = header.kind is PieceKind.PEER_READ, inlet.lane_from(header.source)
        if fault is None:
            num_bytes = sum(blocks.num_bytes(self._store.layout) for blocks in parts)
            self.num_pieces += 1
            self.num_bytes += num_bytes
            self.num_bytes_peer_read += num_bytes if is_read else 0
            if lane is not None:
                lane.add_sound()
            for blocks in parts:
                if not inlet.is_over:
                    inlet.place(header, blocks)
        else:
            self._context.dropped[fault] += 1
            inlet.ledger.release(Blocks.of(header), header.source)
            # A sender that has closed its window sends the pages again on its own, if they are wanted.
            if not inlet.is_over and lane is not None and fault != WINDOW_CLOSED:
                if reason := lane.ask_again(header, fault):
                    inlet.give_up(f"source {header.source}: {reason}")
                else:
                    self._context.num_asked_again += 1
        if is_read:
            for take in self._waiting.pop(inlet, ()):
                take()


def _after(guards: Sequence[BlockGuard], fetch: Callable[[], str | None]) -> str | None:
    """Wait until no other copy touches the blocks. Then return the result of ``fetch``."""
    for guard in guards:
        guard.wait()
    return fetch()
