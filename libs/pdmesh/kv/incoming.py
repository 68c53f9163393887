"""Pieces on their way into blocks: the payload is loaded, checked, then copied, on the event loop or on a thread.

The payload of a peer read says where the pages lie in the sender's cache, and they are copied from there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import structlog

from pdmesh.errors import KvTransferError
from pdmesh.kv.blocks import BlockGuard, BlockPool
from pdmesh.kv.context import KvContext
from pdmesh.kv.pages import Blocks
from pdmesh.kv.peer_reads import CacheOwner, ReadNote
from pdmesh.kv.piece import PieceHeader, PieceKind
from pdmesh.transport.kv_transport import ReceivedPiece

log = structlog.get_logger()

#: Why a peer read was dropped: the sender's cache cannot be read here, so it is asked for bytes; or it ended meanwhile.
UNREADABLE, WINDOW_CLOSED = "unreadable", "window closed"

#: Smaller caches are committed in no time.
_LARGE_CACHE_BYTES = 64 << 20


class PieceReader:
    """Copies accepted pieces into their blocks, which stay quarantined while a thread does, should they be freed.

    The system commits a large cache's memory when it is first written, which took up to 0.9 s for a piece of 16 layers
    on a busy virtual machine (2026-11-22): long enough for a helper to pass for silent. So a thread copies the first
    piece of each page.
    """

    def __init__(self, context: KvContext, pool: BlockPool) -> None:
        self._context = context
        self._peer_reads = context.peer_reads
        self._store = store = context.store
        self._pool = pool
        layout = store.layout
        is_large = store.num_blocks * layout.block_bytes * layout.num_layers > _LARGE_CACHE_BYTES
        #: By layer, 1 for each page that pieces have come for. Nothing of a small cache.
        self._has_come = [bytearray(store.num_blocks) for _ in range(layout.num_layers)] if is_large else []

    def read(
        self,
        header: PieceHeader,
        piece: ReceivedPiece,
        block_ids: Sequence[int],
        *,
        address: bytes,
        is_wanted: Callable[[], bool],
        on_read: Callable[[str | None], None],
        parts: Sequence[Blocks] = (),
    ) -> None:
        """Copy a piece of KV or a peer read, and release it; ``on_read`` hears why it was dropped, or None. Event loop.

        ``is_wanted`` says whether the blocks are still the request's. ``address`` is the sender's. Of a peer read only
        ``parts`` are copied, if there are any.
        """
        is_inline = header.part.num_pages * self._store.layout.block_bytes <= self._store.inline_copy_bytes
        is_there = True
        if header.kind is PieceKind.PEER_READ:
            owner = None if self._peer_reads is None else self._peer_reads.owner(address)
            is_there = owner is not None
            is_inline = is_inline and self._peer_reads is not None and self._peer_reads.copies_inline
            fetch: Callable[[], str | None] = partial(
                self._read_peer, header, piece, block_ids, parts or (Blocks.of(header),), owner
            )
        else:
            fetch = partial(self._scatter, header, piece, block_ids)
        guards = self._pool.guards_of(block_ids)
        copy = partial(self._copy, header, piece, partial(_after, guards, fetch) if guards else fetch)
        if not is_there or (is_inline and not guards and not self._is_first(header, block_ids)):
            fault = copy()
            piece.release()
            on_read(fault)
        else:
            # As many of these at once as there are receive buffers.
            self._context.tasks.start_soon(self._read_on_thread, piece, block_ids, copy, is_wanted, on_read)

    def _is_first(self, header: PieceHeader, block_ids: Sequence[int]) -> bool:
        """Whether a piece is the first for one of its pages; it counts as having come."""
        is_first = False
        for has_come in self._has_come[slice(*header.part.layers)]:
            if not all(map(has_come.__getitem__, block_ids)):
                is_first = True
                for block_id in block_ids:
                    has_come[block_id] = 1
        return is_first

    async def _read_on_thread(
        self,
        piece: ReceivedPiece,
        block_ids: Sequence[int],
        copy: Callable[[], str | None],
        is_wanted: Callable[[], bool],
        on_read: Callable[[str | None], None],
    ) -> None:
        fault: str | None = "unknown"  # freed since: the blocks may be another request's by now
        try:
            if is_wanted():
                with self._pool.pinned(block_ids):
                    fault = await self._context.copies.run(copy)
        finally:
            piece.release()
        on_read(fault)

    def _copy(self, header: PieceHeader, piece: ReceivedPiece, fetch: Callable[[], str | None]) -> str | None:
        """Load the payload and check it, then copy with ``fetch``; return the fault, or None if the copy counts."""
        if not piece.load():
            return "not loaded"
        if not self._context.key.opens_payload(piece.payload, header.check):
            return "checksum"
        return fetch()

    def _scatter(self, header: PieceHeader, piece: ReceivedPiece, block_ids: Sequence[int]) -> None:
        layers = header.part.layers
        layer_bytes = header.payload_bytes // layers.size
        for index in range(layers.size):
            start = index * layer_bytes
            self._store.scatter(layers.start + index, block_ids, piece.payload[start : start + layer_bytes])

    def _read_peer(
        self,
        header: PieceHeader,
        piece: ReceivedPiece,
        block_ids: Sequence[int],
        parts: Sequence[Blocks],
        owner: CacheOwner | None,
    ) -> str | None:
        """Copy the ``parts`` from where they lie. If the window was closed meanwhile that means nothing."""
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


def _after(guards: Sequence[BlockGuard], fetch: Callable[[], str | None]) -> str | None:
    """Return what ``fetch`` does, once nothing else copies from or to its blocks."""
    for guard in guards:
        guard.wait()
    return fetch()
