"""Piece buffers of all transports: memory that is allocated once, lent, quarantined and returned."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
from types import TracebackType

import anyio

#: Size of a piece's header (`pdmesh.kv.piece`), a multiple of the cache line.
HEADER_BYTES = 320


#: Limits of a message of several pieces: its payload bytes (a transport may have room for more) and its pieces. Pieces
#: share a message because each message costs tens of µs of Python on each side.
MESSAGE_BYTES, MAX_PIECES = 1 << 19, 64


class PieceBuffer:
    """A buffer for one message of one or several pieces, which arrive as if each had been sent alone.

    Each piece is a prefix of the transport, a header and a payload. At most `MAX_PIECES` are sent together, with
    payloads of `KvTransport.message_limit` bytes in all. ``number`` is the buffer's index among the buffers allocated
    together. ``address`` is where its memory begins.
    """

    __slots__ = (
        "_ended",
        "_payload_bytes",
        "_prefix_bytes",
        "_start",
        "address",
        "header",
        "memory",
        "number",
        "payload",
    )

    def __init__(self, number: int, memory: memoryview, payload_bytes: int, prefix_bytes: int) -> None:
        self.number = number
        self.memory = memory
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        self._payload_bytes = payload_bytes
        self._prefix_bytes = prefix_bytes
        self.clear()

    def clear(self) -> None:
        """Begin a new message with its first piece."""
        self._ended: list[tuple[int, int]] = []
        self._begin(0)

    def end_piece(self, payload_bytes: int) -> None:
        """End the current piece, and move ``header`` and ``payload`` to the next one."""
        self._ended.append((self._start, payload_bytes))
        self._begin(self._start + self._prefix_bytes + HEADER_BYTES + payload_bytes)

    def pieces(self, payload_bytes: int) -> list[tuple[int, int]]:
        """Return the start and the payload bytes of each piece. The last one has ``payload_bytes``."""
        return [*self._ended, (self._start, payload_bytes)]

    def _begin(self, start: int) -> None:
        header = start + self._prefix_bytes
        payload = header + HEADER_BYTES
        self._start = start
        self.header = self.memory[header:payload]
        self.payload = self.memory[payload : payload + self._payload_bytes]


def allocate_buffers(
    num_buffers: int, payload_bytes: int, prefix_bytes: int = 0, *, message_bytes: int = MESSAGE_BYTES
) -> list[PieceBuffer]:
    """Allocate buffers of whole pages in one mapping. A page takes memory once it is used.

    Each holds one piece with a payload of ``payload_bytes``, or `MAX_PIECES` pieces with ``message_bytes`` of payloads
    together. Each piece begins with ``prefix_bytes`` for the transport.

    Huge pages, if the system has them, save a sixth of the time of a copy between processes (measured).
    """
    head_bytes = prefix_bytes + HEADER_BYTES
    size = max(head_bytes + payload_bytes, MAX_PIECES * head_bytes + message_bytes)
    stride = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
    arena = mmap.mmap(-1, num_buffers * stride, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):
            arena.madvise(mmap.MADV_HUGEPAGE)
    view = memoryview(arena)
    memories = [view[start : start + stride] for start in range(0, num_buffers * stride, stride)]
    return [PieceBuffer(number, memory, payload_bytes, prefix_bytes) for number, memory in enumerate(memories)]


class SendPool:
    """A fixed number of send buffers: free, lent, or quarantined because hardware or a peer may still read them."""

    def __init__(self, buffers: list[PieceBuffer]) -> None:
        self._num_buffers = len(buffers)
        self._free = list(buffers)
        self._num_free = anyio.Semaphore(len(buffers), fast_acquire=True)
        self._lent: set[PieceBuffer] = set()
        self._quarantined: set[PieceBuffer] = set()

    def lend(self) -> Lease:
        return Lease(self)

    async def take(self) -> PieceBuffer:
        """Return a free buffer, once there is one, and count it as lent."""
        try:
            self._num_free.acquire_nowait()  # takes a tenth of the time of `acquire`
        except anyio.WouldBlock:
            await self._num_free.acquire()
        buffer = self._free.pop()
        buffer.clear()
        self._lent.add(buffer)
        return buffer

    def put_back(self, buffer: PieceBuffer) -> None:
        """Return a buffer whose lease has ended, unless it is quarantined."""
        self._lent.remove(buffer)
        if buffer not in self._quarantined:
            self._give_back(buffer)

    def quarantine(self, buffer: PieceBuffer) -> None:
        """Keep a buffer from being lent again until `unquarantine`."""
        self._quarantined.add(buffer)

    def unquarantine(self, buffer: PieceBuffer) -> None:
        """Release a quarantined buffer that no peer reads any more."""
        self._quarantined.remove(buffer)
        if buffer not in self._lent:
            self._give_back(buffer)

    @property
    def num_quarantined(self) -> int:
        return len(self._quarantined)

    def check_integrity(self) -> None:
        num_free = len(self._free)
        num_lent = len(self._lent - self._quarantined)
        num_quarantined = len(self._quarantined)
        assert num_free + num_lent + num_quarantined == self._num_buffers, (
            f"send buffers: {num_free} free + {num_lent} lent + {num_quarantined} quarantined != {self._num_buffers}"
        )

    def _give_back(self, buffer: PieceBuffer) -> None:
        self._free.append(buffer)
        self._num_free.release()


class Lease:
    """A context that lends a send buffer. A class is faster than a generator, and every piece needs one."""

    __slots__ = ("_buffer", "_pool")

    def __init__(self, pool: SendPool) -> None:
        self._pool = pool

    async def __aenter__(self) -> PieceBuffer:
        self._buffer = await self._pool.take()
        return self._buffer

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pool.put_back(self._buffer)
