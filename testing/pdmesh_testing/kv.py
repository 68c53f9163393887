"""A KV store of plain bytes, and transports to test with."""

from __future__ import annotations

import contextlib
import ctypes
import random
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from itertools import accumulate

from pdmesh.config import TransferConfig
from pdmesh.kv.sharing import HostCache
from pdmesh.kv.store import HostKvStore
from pdmesh.kv_layout import IndexRange, KvLayout, KvPart, PageShape
from pdmesh.transport.buffers import HEADER_BYTES
from pdmesh.transport.kv_transport import KvTransport
from pdmesh.transport.ucx import UcxTransport
from pdmesh_testing.memory_transport import MemoryFabric, MemoryTransport

SMALL_LAYOUT = KvLayout(num_layers=3, num_kv_heads=2, head_dim=4, block_size=4, dtype="float32")
#: Layers whose pages differ in heads, width and bytes.
UNEQUAL_LAYOUT = replace(
    SMALL_LAYOUT, num_layers=4, pages=(PageShape(2, 4), PageShape(1, 24), PageShape(2, 4), PageShape(3, 2))
)
SMALL_TRANSFER = TransferConfig(
    max_payload_bytes=4096,
    num_send_buffers=4,
    num_receive_buffers=4,
    no_progress_s=5.0,
    deadline_s=120.0,
    network_no_progress_s=2.0,
    group_no_progress_s=30.0,
)


#: More of a request's KV than any has here.
EVERYTHING = KvPart(IndexRange(0, 1 << 30), IndexRange(0, 1 << 14), IndexRange(0, 1 << 14))


class ByteStore(HostKvStore):
    """`pdmesh.kv.store.KvStore` in one bytearray."""

    def __init__(self, layout: KvLayout, num_blocks: int, *, seed: int | None = None) -> None:
        """Zeros, or with a ``seed`` random bytes."""
        layer_bytes = (num_blocks * layout.page_bytes(layer) for layer in range(layout.num_layers))
        *self._offsets, size = accumulate(layer_bytes, initial=0)
        self.data = bytearray(size) if seed is None else bytearray(random.Random(seed).randbytes(size))
        self._layout = layout
        self._num_blocks = num_blocks

    @property
    def layout(self) -> KvLayout:
        return self._layout

    @property
    def num_blocks(self) -> int:
        return self._num_blocks

    @property
    def inline_copy_bytes(self) -> int:
        # Small, so that tests cover inline and threaded copies.
        return 64 * 1024

    @property
    def shared(self) -> HostCache:
        start = ctypes.addressof(ctypes.c_char.from_buffer(self.data))
        return HostCache(self._layout, self._num_blocks, [start + offset for offset in self._offsets])

    def block(self, layer: int, block_id: int) -> memoryview:
        size = self._layout.page_bytes(layer)
        start = self._offsets[layer] + block_id * size
        return memoryview(self.data)[start : start + size]

    def gather(self, layer: int, block_ids: Sequence[int], out: memoryview) -> None:
        size = self._layout.page_bytes(layer)
        for i, block_id in enumerate(block_ids):
            out[i * size : (i + 1) * size] = self.block(layer, block_id)

    def scatter(self, layer: int, block_ids: Sequence[int], data: memoryview) -> None:
        size = self._layout.page_bytes(layer)
        for i, block_id in enumerate(block_ids):
            self.block(layer, block_id)[:] = data[i * size : (i + 1) * size]


def introduce(one: KvTransport, other: KvTransport) -> None:
    """Let two transports admit each other, as a scheduler does."""
    one.admit(other.address)
    other.admit(one.address)


async def send_together(transport: KvTransport, address: bytes, payloads: Sequence[bytes]) -> None:
    """Send pieces in one message, whose headers are their numbers."""
    async with transport.lend() as buffer:
        for number, payload in enumerate(payloads):
            if number:
                buffer.end_piece(len(payloads[number - 1]))
            buffer.header[:] = (b"%d" % number).ljust(HEADER_BYTES, b"\0")
            buffer.payload[: len(payload)] = payload
        await transport.send(address, buffer, len(payloads[-1]))


class TransportMaker:
    """Opens transports of one kind that can reach each other.

    With ``peer_reads``, instances on them read each other's caches: see `config`.
    """

    def __init__(self, kind: str, *, peer_reads: bool = False) -> None:
        self.kind = kind
        self.peer_reads = peer_reads
        self.fabric = MemoryFabric()
        self._opened: list[KvTransport] = []

    def config(self, config: TransferConfig = SMALL_TRANSFER) -> TransferConfig:
        """Return an instance's transfer settings."""
        return replace(config, peer_reads=self.peer_reads)

    def make(self, config: TransferConfig) -> MemoryTransport | UcxTransport:
        if self.kind == "memory":
            return MemoryTransport(config, self.fabric)
        return UcxTransport(config)

    @contextlib.asynccontextmanager
    async def open(self, config: TransferConfig = SMALL_TRANSFER) -> AsyncIterator[KvTransport]:
        async with self.make(config) as transport:
            for other in self._opened:
                introduce(transport, other)
            self._opened.append(transport)
            yield transport
            transport.check_integrity()
            self._opened.remove(transport)
