"""Outgoing blocks of one request, as pieces: gather, seal, send."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import anyio.lowlevel

from pdmesh.errors import KvTransferError
from pdmesh.kv.pages import Blocks
from pdmesh.kv.piece import PieceHeader, pack_header
from pdmesh.kv.store import KvStore
from pdmesh.kv_layout import IndexRange, KvPart
from pdmesh.threads import CallThreads
from pdmesh.transport.buffers import PieceBuffer
from pdmesh.transport.kv_transport import KvTransport
from pdmesh.transport.seal import MeshKey

#: Blocks to send, and the remaining fields of their headers.
BlocksAbout = tuple[Blocks, PieceHeader]


@dataclass(slots=True, kw_only=True)
class Means:
    """The shared objects that a writer of pieces uses. Threads of ``copies`` copy and check pieces.

    ``weights`` is `PieceHeader.weights` of all pieces.
    """

    store: KvStore
    transport: KvTransport
    key: MeshKey
    copies: CallThreads
    weights: int = 0


class PieceWriter:
    """Sends blocks of one request's table; several tasks may call it at the same time.

    ``num_pushed_bytes`` counts KV sent in pieces; ``num_bytes`` also counts KV offered as peer reads, and transcripts.
    """

    def __init__(self, block_ids: Sequence[int], means: Means) -> None:
        self.num_bytes = 0
        self.num_pushed_bytes = 0
        self.num_pieces = 0
        self._block_ids = block_ids
        self._store = means.store
        self._transport = means.transport
        self._key = means.key
        self._copies = means.copies
        self._weights = means.weights

    @property
    def max_pages(self) -> int:
        """Maximum number of pages in a piece to any destination."""
        return self._transport.max_payload_bytes // self._store.layout.max_page_bytes

    def may_read(self, address: bytes) -> bool:
        """Whether the peer at an address copies pages from this cache, so that none are pushed."""
        return False

    def pages_a_piece(self, address: bytes) -> int:
        """Return the maximum number of pages in a piece to this address. `send` reports an unreachable address."""
        try:
            return self._pages_taken(address)
        except KvTransferError:
            return self.max_pages

    def carrier_to(self, address: bytes) -> str:
        """Return the name of the transport that carries pieces to this address; empty if the peer is unreachable."""
        try:
            return self._transport.carrier_to(address)
        except KvTransferError:
            return ""

    def pages_a_message(self, address: bytes) -> int:
        """Return the number of pages up to which pieces to this address are sent together."""
        try:
            return self._transport.message_limit(address) // self._store.layout.max_page_bytes
        except KvTransferError:
            return 1

    def refused(self, address: bytes, num_pages: int) -> bool:
        """Send KV to this address as bytes from now on, because its peer cannot read pages.

        Return False if fewer than ``num_pages`` were offered.
        """
        return False

    def close(self) -> None:
        """End the peers' permission to read: copies that they finish from now on do not count. Idempotent."""

    async def send(self, address: bytes, blocks: Sequence[BlocksAbout]) -> None:
        """Send blocks that fit into one message, each as a piece. Raise KvTransferError if one cannot be sent.

        If a range of blocks exceeds a piece, all pieces are sent one after the other.
        """
        limit = self._pages_taken(address)
        pieces = [(piece, about) for some, about in blocks for piece in some.cut(limit)]
        for message in [pieces] if len(pieces) == len(blocks) else [[piece] for piece in pieces]:
            async with self._transport.lend() as buffer:
                await self._send_message(address, message, buffer)

    async def send_bytes(self, address: bytes, start: int, data: bytes, about: PieceHeader) -> None:
        """Send bytes that are not KV, numbered from ``start``, one piece after the other. Raise KvTransferError."""
        for taken, header in self.cut_bytes(address, start, data, about):
            await self.send_payload(address, taken, header)
            self.num_bytes += len(taken)

    def divided(self, address: bytes, data: bytes, about: PieceHeader) -> Iterator[tuple[bytes, PieceHeader]]:
        """Yield bytes in pieces whose headers carry the total number of bytes. Raises KvTransferError."""
        return self.cut_bytes(address, 0, data, about._replace(num_context_tokens=len(data)))

    def cut_bytes(
        self, address: bytes, start: int, data: bytes, about: PieceHeader
    ) -> Iterator[tuple[bytes, PieceHeader]]:
        """Yield bytes in pieces that an address accepts, numbered from ``start``. Raises KvTransferError."""
        size = min(self._transport.max_payload_bytes, self._transport.payload_limit(address))
        for offset in range(0, len(data), size):
            taken = data[offset : offset + size]
            blocks = IndexRange(start + offset, start + offset + len(taken))
            yield taken, about._replace(part=about.part._replace(blocks=blocks))

    async def tell(
        self,
        address: bytes,
        header: PieceHeader,
        *,
        begins: Callable[[], object] = lambda: None,
        is_notice: bool = False,
    ) -> None:
        """Send a header alone, possibly as a notice. Raise KvTransferError if it cannot be sent.

        ``begins`` is called once there is a buffer for the header.
        """
        async with self._transport.lend() as buffer:
            begins()
            pack_header(header._replace(weights=self._weights), buffer.header, self._key)
            await self._transport.send(address, buffer, 0, is_notice=is_notice)

    async def ask(self, address: bytes, blocks: Blocks, about: PieceHeader) -> None:
        """Send a header alone that names these blocks. Raise KvTransferError if it cannot be sent."""
        await self.tell(address, about._replace(chunk=blocks.chunk, part=self._part(blocks)))

    async def send_payload(self, address: bytes, payload: bytes, about: PieceHeader) -> None:
        """Send one piece that is not KV. Raises KvTransferError, also if ``payload`` is too long for the receiver."""
        limit = min(self._transport.max_payload_bytes, self._transport.payload_limit(address))
        if len(payload) > limit:
            raise KvTransferError(f"{len(payload)} bytes exceed the receiver's limit of {limit} for a piece")
        async with self._transport.lend() as buffer:
            room = buffer.payload[: len(payload)]
            room[:] = payload
            check = self._key.close_payload(room)
            header = about._replace(payload_bytes=len(payload), check=check, weights=self._weights)
            pack_header(header, buffer.header, self._key)
            await self._transport.send(address, buffer, len(payload))
        self.num_pieces += 1

    def _part(self, blocks: Blocks) -> KvPart:
        return KvPart(
            IndexRange(blocks.first_block, blocks.end),
            IndexRange(blocks.layer, blocks.end_layer),
            IndexRange(0, self._store.layout.num_kv_heads),
        )

    def _pages_taken(self, address: bytes) -> int:
        """Return the pages of a piece that a destination accepts. Raises KvTransferError if not one fits."""
        limit = self._transport.payload_limit(address)
        page_bytes = self._store.layout.max_page_bytes
        if limit < page_bytes:
            raise KvTransferError(f"the receiver takes pieces of {limit} bytes, less than one KV block")
        return limit // page_bytes

    async def _send_message(self, address: bytes, pieces: Sequence[BlocksAbout], buffer: PieceBuffer) -> None:
        num_bytes = sum(blocks.num_bytes(self._store.layout) for blocks, _ in pieces)
        if num_bytes <= self._store.inline_copy_bytes:
            payload_bytes = self._fill(pieces, buffer)
        else:
            payload_bytes = await self._copies.run(partial(self._fill, pieces, buffer))
            # The request may have been freed, and its blocks used again, while the thread copied them.
            await anyio.lowlevel.checkpoint_if_cancelled()
        await self._transport.send(address, buffer, payload_bytes)
        self.num_pieces += len(pieces)
        self.num_bytes += num_bytes
        self.num_pushed_bytes += num_bytes

    def _fill(self, pieces: Sequence[BlocksAbout], buffer: PieceBuffer) -> int:
        """Write pieces into a buffer. Return the payload bytes of the last one."""
        payload_bytes = 0
        for number, (blocks, about) in enumerate(pieces):
            if number:
                buffer.end_piece(payload_bytes)
            payload_bytes = blocks.num_bytes(self._store.layout)
            self._fill_piece(blocks, about, buffer, payload_bytes)
        return payload_bytes

    def _fill_piece(self, blocks: Blocks, about: PieceHeader, buffer: PieceBuffer, payload_bytes: int) -> None:
        payload = buffer.payload[:payload_bytes]
        block_ids, start = self._block_ids[blocks.first_block : blocks.end], 0
        for layer in range(blocks.layer, blocks.end_layer):
            end = start + blocks.num_blocks * self._store.layout.page_bytes(layer)
            self._store.gather(layer, block_ids, payload[start:end])
            start = end
        header = about._replace(
            chunk=blocks.chunk,
            part=self._part(blocks),
            payload_bytes=payload_bytes,
            check=self._key.close_payload(payload),
            weights=self._weights,
        )
        pack_header(header, buffer.header, self._key)
