"""KV pieces within one process, for tests: the same contract as over a network, and faults on demand."""

from __future__ import annotations

import itertools
import os
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import anyio
import anyio.lowlevel

from pdmesh.config import TransferConfig
from pdmesh.errors import KvTransferError
from pdmesh.transport.buffers import HEADER_BYTES, MESSAGE_BYTES, PieceBuffer, SendPool, allocate_buffers
from pdmesh.transport.kv_transport import MEMORY

#: Chooses pieces by their header.
Chooser = Callable[[bytes], bool]


def _none(_header: bytes) -> bool:
    return False


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryFaults:
    """Faults of pieces on a fabric."""

    #: Pieces that are sent, but never arrive.
    drop: Chooser = _none
    #: Pieces with one changed payload byte.
    corrupt: Chooser = _none
    #: No peer can be reached.
    refuse: bool = False
    #: Pieces wait for this event, within the sender's no-progress limit.
    gate: anyio.Event | None = None


class MemoryFabric:
    """Joins the memory transports of one process; assign ``faults`` to change what happens to later pieces."""

    def __init__(self, faults: MemoryFaults | None = None) -> None:
        self.faults = faults or MemoryFaults()
        self._transports: dict[bytes, MemoryTransport] = {}
        self._numbers = itertools.count()

    def join(self, transport: MemoryTransport) -> bytes:
        address = b"memory:%d" % next(self._numbers)
        self._transports[address] = transport
        return address

    def leave(self, address: bytes) -> None:
        del self._transports[address]

    def find(self, address: bytes) -> MemoryTransport:
        peer = self._transports.get(address)
        if peer is None or self.faults.refuse:
            raise KvTransferError("the peer cannot be reached")
        return peer


class MemoryPiece:
    """A received piece; see `pdmesh.transport.kv_transport.ReceivedPiece`."""

    __slots__ = ("_slot", "_transport", "header", "payload")

    def __init__(self, transport: MemoryTransport, slot: PieceBuffer, payload_bytes: int) -> None:
        self._transport = transport
        self._slot: PieceBuffer | None = slot
        self.header = slot.header
        self.payload = slot.payload[:payload_bytes]

    def load(self) -> bool:
        return True

    def release(self) -> None:
        if self._slot is not None:
            slot, self._slot = self._slot, None
            self._transport._release(slot)


class MemoryTransport:
    """`pdmesh.transport.kv_transport.KvTransport` within one process."""

    def __init__(self, config: TransferConfig, fabric: MemoryFabric) -> None:
        self._config = config
        self._fabric = fabric

    async def __aenter__(self) -> Self:
        config = self._config
        send_buffers = allocate_buffers(config.num_send_buffers, config.max_payload_bytes)
        self._pool = SendPool(send_buffers)
        self._free = allocate_buffers(config.num_receive_buffers, config.max_payload_bytes)
        self._memory = [buffer.memory for buffer in (*send_buffers, *self._free)]
        self._num_free = anyio.Semaphore(len(self._free))
        # Buffers held by the queue and the consumer.
        self._num_held = 0
        # Scopes of the sends to each destination.
        self._sending: defaultdict[bytes, set[anyio.CancelScope]] = defaultdict(set)
        self._arrived_in, self._arrived_out = anyio.create_memory_object_stream[MemoryPiece](len(self._free))
        self._address = self._fabric.join(self)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._fabric.leave(self._address)
        self._arrived_in.close()
        self._arrived_out.close()

    @property
    def address(self) -> bytes:
        return self._address

    @property
    def max_payload_bytes(self) -> int:
        return self._config.max_payload_bytes

    def payload_limit(self, address: bytes) -> int:
        return min(self._config.max_payload_bytes, self._fabric.find(address).max_payload_bytes)

    def message_limit(self, address: bytes) -> int:
        return MESSAGE_BYTES

    def process_of(self, address: bytes) -> int | None:
        return os.getpid()

    def carrier_to(self, address: bytes) -> str:
        return MEMORY

    @property
    def num_refused(self) -> int:
        return 0

    @property
    def memory(self) -> Sequence[memoryview]:
        return self._memory

    def lend(self) -> AbstractAsyncContextManager[PieceBuffer]:
        return self._pool.lend()

    def admit(self, address: bytes) -> None:
        """Do nothing: within one process every peer may send."""

    async def send(self, address: bytes, buffer: PieceBuffer, payload_bytes: int, *, is_notice: bool = False) -> None:
        assert payload_bytes <= self._config.max_payload_bytes
        for start, size in buffer.pieces(payload_bytes):
            await self._send_piece(address, buffer.memory[start : start + HEADER_BYTES + size])

    async def _send_piece(self, address: bytes, sent: memoryview) -> None:
        """Send a header and the payload behind it."""
        peer = self._fabric.find(address)
        faults = self._fabric.faults
        limit_s = self._config.no_progress_s
        with anyio.move_on_after(limit_s) as scope:
            self._sending[address].add(scope)
            try:
                if faults.gate is not None:
                    await faults.gate.wait()
                await peer._num_free.acquire()
            finally:
                self._sending[address].discard(scope)
        if scope.cancelled_caught:
            forgotten = anyio.current_time() < scope.deadline
            raise KvTransferError("the peer is gone" if forgotten else f"the peer received nothing for {limit_s:g} s")
        header, payload = bytes(sent[:HEADER_BYTES]), sent[HEADER_BYTES:]
        if faults.drop(header):
            peer._num_free.release()
            return
        slot = peer._free.pop()
        slot.header[:] = header
        slot.payload[: len(payload)] = payload
        if payload and faults.corrupt(header):
            slot.payload[0] ^= 0xFF
        peer._num_held += 1
        try:
            peer._arrived_in.send_nowait(MemoryPiece(peer, slot, len(payload)))
        except (anyio.ClosedResourceError, anyio.BrokenResourceError):
            peer._release(slot)
            raise KvTransferError("the peer is gone") from None

    async def receive(self) -> AsyncIterator[MemoryPiece]:
        async for piece in self._arrived_out:
            yield piece

    async def forget(self, address: bytes) -> None:
        for scope in self._sending.pop(address, ()):
            scope.cancel()
        await anyio.lowlevel.checkpoint()

    def check_integrity(self) -> None:
        self._pool.check_integrity()
        num_free = len(self._free)
        total = self._config.num_receive_buffers
        assert num_free + self._num_held == total, (
            f"receive buffers: {num_free} free + {self._num_held} held != {total}"
        )

    def _release(self, slot: PieceBuffer) -> None:
        self._num_held -= 1
        self._free.append(slot)
        self._num_free.release()
