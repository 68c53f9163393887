"""Pieces on their way into blocks: the payload is checked, then copied, on the event loop or on a thread."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import anyio
import anyio.abc
import anyio.to_thread

from pdmesh.kv.blocks import BlockPool
from pdmesh.kv.piece import PieceHeader
from pdmesh.kv.store import KvStore
from pdmesh.transport.base import ReceivedPiece
from pdmesh.transport.seal import MeshKey

#: Smaller caches are committed in no time.
_LARGE_CACHE_BYTES = 64 << 20


class PieceReader:
    """Copies accepted pieces into their blocks, which stay quarantined while a thread does, should they be freed.

    The system commits a large cache's memory when it is first written, which took up to 0.9 s for a piece of 16 layers
    on a busy virtual machine (2026-11-22): long enough for a helper to pass for silent. So a thread copies the first
    piece of each page.
    """

    def __init__(
        self,
        *,
        store: KvStore,
        pool: BlockPool,
        key: MeshKey,
        copies: anyio.CapacityLimiter,
        tasks: anyio.abc.TaskGroup,
    ) -> None:
        self._store = store
        self._pool = pool
        self._key = key
        self._copies = copies
        self._tasks = tasks
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
        is_wanted: Callable[[], bool],
        on_read: Callable[[str | None], None],
        copy: Callable[[], str | None] | None = None,
    ) -> None:
        """Copy a KV piece and release it; ``on_read`` is then told why it was dropped, or None. Event loop.

        ``is_wanted`` says whether the blocks are still the request's. ``copy`` fetches its pages, and says why it
        could not, if they are not its payload.
        """
        copy = copy or partial(self._copy, header, piece, block_ids)
        num_bytes = header.part.num_pages * self._store.layout.block_bytes
        if num_bytes <= self._store.inline_copy_bytes and not self._is_first(header, block_ids):
            fault = copy()
            piece.release()
            on_read(fault)
        else:
            # As many of these at once as there are receive buffers.
            self._tasks.start_soon(self._read_on_thread, piece, block_ids, copy, is_wanted, on_read)

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
                    fault = await anyio.to_thread.run_sync(copy, limiter=self._copies)
        finally:
            piece.release()
        on_read(fault)

    def _copy(self, header: PieceHeader, piece: ReceivedPiece, block_ids: Sequence[int]) -> str | None:
        """Nothing is copied of what was damaged on the way."""
        if self._key.checksum(piece.payload) != header.checksum:
            return "checksum"
        layers = header.part.layers
        layer_bytes = header.payload_bytes // layers.size
        for index in range(layers.size):
            start = index * layer_bytes
            self._store.scatter(layers.start + index, block_ids, piece.payload[start : start + layer_bytes])
        return None
