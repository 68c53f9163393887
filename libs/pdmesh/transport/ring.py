"""The receiving half of the transport: a fixed number of buffers, some posted to UCX, some held by the consumer."""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import Any, NamedTuple

import anyio
import structlog

from pdmesh.transport.address import WorkerAddress
from pdmesh.transport.buffers import MAX_PIECES, PieceBuffer
from pdmesh.transport.local import Caller, Verdict
from pdmesh.transport.prefix import HEAD_BYTES, PREFIX_BYTES, FoundPiece, find_piece
from pdmesh.transport.reading import FORBIDDEN, read_memory
from pdmesh.transport.ucx_api import UcxApi

log = structlog.get_logger()

#: Maximum number of posted receives: while pieces are checked and copied, others arrive.
MAX_POSTED = 8

#: Time without an arrival, while messages wait, after which posted receives count as stalled: others are posted beside
#: them. A sender on another host that stops in the middle of its piece holds the receive it matched. The time that a
#: slow link takes for all buffers is added. A piece that is only slow still arrives.
STALL_S = 0.02
SLOW_BYTES_PER_S = 100e6


#: Maximum size of an offered piece that is read at once: a hop to a thread takes as long as reading half of it.
EAGER_BYTES = (1 << 20) + HEAD_BYTES

#: Calls a function after a delay in seconds.
CallLater = Callable[[float, Callable[[], None]], object]


class _Offered(NamedTuple):
    """A piece in a buffer of a sender on this host."""

    number: int
    num_bytes: int


class _Reading:
    """An offered piece that is being read into a buffer. ``num_read`` of its bytes have been read."""

    def __init__(self, caller: Caller, facts: WorkerAddress, buffer: int, offered: _Offered, into: PieceBuffer) -> None:
        self.offered = offered
        self.num_read = 0
        self._caller = caller
        self._pid = facts.pid
        self._address = facts.memory_address + buffer * facts.buffer_stride
        self._into = into.address
        self._verdict = Verdict.TAKEN

    def read(self, end: int) -> bool:
        """Read up to byte ``end``. Any thread. Return False if that fails: usually, the sender has died."""
        start = self.num_read
        if start == end:
            return True
        try:
            read_memory(self._pid, self._address + start, end - start, self._into + start)
        except OSError as error:
            log.warning("cannot read a sender's memory", reason=str(error))
            if error.errno in FORBIDDEN:
                self._verdict = Verdict.UNREADABLE
            return False
        self.num_read = end
        return True

    def answer(self) -> None:
        """Tell the sender that its buffer is free again, or that it cannot be read. Event loop only."""
        self._caller.answer(self.offered.number, self._verdict)


class Piece:
    """A received piece; see `pdmesh.transport.kv_transport.ReceivedPiece`."""

    __slots__ = ("_reading", "_ring", "_slot", "header", "payload")

    def __init__(
        self, ring: ReceiveRing, slot: int, memory: memoryview, found: FoundPiece, reading: _Reading | None
    ) -> None:
        """``reading`` is given for an offered piece whose payload is not read completely."""
        payload = found.start + HEAD_BYTES
        self._ring = ring
        self._slot: int | None = slot
        self._reading = reading
        self.header = memory[found.start + PREFIX_BYTES : payload]
        self.payload = memory[payload : found.end]

    def load(self) -> bool:
        return self._reading is None or self._reading.read(self._reading.offered.num_bytes)

    def release(self) -> None:
        if self._slot is not None:
            slot, self._slot = self._slot, None
            if self._reading is not None:
                self._reading.answer()
            self._ring.let_go(slot)


class ReceiveRing:
    """Receive buffers: free, posted, or held by the consumer (or queued for it).

    An offered piece is read when the consumer asks for it, into the buffer that was used last. So if the consumer
    finishes each piece before it takes the next, that buffer is still in the processor's cache. For a large piece only
    the header is read then; `Piece.load` reads the payload, possibly on a thread. The consumer holds at most
    ``max_held`` buffers. There are as many more buffers as are posted to UCX, so an offer always finds one.

    The last entry of the free slots is the one used last. Posted requests are in the order of posting, in which
    messages arrive.
    """

    def __init__(
        self,
        buffers: list[PieceBuffer],
        max_held: int,
        *,
        api: UcxApi | None,
        wake: Callable[[], None],
        call_later: CallLater,
    ) -> None:
        self._api = api
        self._buffers = buffers
        self._max_held = max_held
        self._max_posted = len(buffers) - max_held
        self._wake = wake
        self._call_later = call_later
        self._arrays = [api.array(buffer.memory) for buffer in buffers] if api is not None else []
        self._free = list(range(len(buffers)))
        self._posted: dict[int, Any] = {}
        self._num_held = 0
        self._num_pieces = [0] * len(buffers)  # unreleased pieces in each buffer
        self._arrived: deque[Piece] = deque()
        self._offers: dict[tuple[Caller, int], _Offered] = {}
        self._arrival = anyio.Event()
        self._closed = False
        self._stall_s = STALL_S + self._max_posted * len(buffers[0].memory) / SLOW_BYTES_PER_S
        self._stalled: set[int] = set()  # posted slots that no longer count
        self._num_arrived = 0
        self._watched: int | None = None
        self.num_malformed = 0

    def offer(self, caller: Caller, number: int, buffer: int, num_bytes: int) -> None:
        """Record a piece in a buffer of a peer, in place of an earlier offer of the same buffer."""
        self._offers[caller, buffer] = _Offered(number, num_bytes)
        self._arrival.set()

    def withdraw(self, caller: Caller) -> None:
        """Forget the offers of a peer that is gone, so that none is read."""
        for offered in [key for key in self._offers if key[0] is caller]:
            del self._offers[offered]

    def post(self) -> None:
        """Post free buffers to UCX, within the limits. No-op before UCX has started."""
        if self._api is None:
            return
        while (
            len(self._free) > 1
            and len(self._posted) - len(self._stalled) < self._max_posted
            and self._num_held + len(self._posted) - len(self._stalled) < self._max_held
        ):
            slot = self._free.pop()
            # A message shorter than a prefix must not leave an earlier prefix in place.
            self._buffers[slot].memory[:PREFIX_BYTES] = bytes(PREFIX_BYTES)
            self._posted[slot] = self._api.worker.tag_recv(self._arrays[slot], self._api.tag, self._api.any_tag)

    def reap(self) -> bool:
        """Queue the pieces that have arrived for the consumer. Return whether a message, even a malformed one, came."""
        arrived = [slot for slot, request in self._posted.items() if request.completed]
        for slot in arrived:
            self._stalled.discard(slot)
            self._take(slot, self._posted.pop(slot))
        self._num_arrived += len(arrived)
        if not arrived and self._watched is None and self._messages_wait():
            self._watched = self._num_arrived
            self._call_later(self._stall_s, self._look_for_stall)
        return bool(arrived)

    def let_go(self, slot: int) -> None:
        """Release one of the pieces in a buffer. The buffer is released with its last piece."""
        self._num_pieces[slot] -= 1
        if not self._num_pieces[slot]:
            self.release(slot)

    def release(self, slot: int) -> None:
        self._num_held -= 1
        self._free.append(slot)
        if not self._closed:
            self._arrival.set()
            self._wake()

    async def receive(self) -> AsyncIterator[Piece]:
        while not self._closed:
            piece = self._next()
            if piece is not None:
                yield piece
            elif not self._closed:
                self._arrival = anyio.Event()
                await self._arrival.wait()

    def _next(self) -> Piece | None:
        if self._arrived:
            return self._arrived.popleft()
        while self._offers and self._num_held < self._max_held and self._free:
            caller, buffer = next(iter(self._offers))
            self._arrived += self._read(caller, buffer, self._offers.pop((caller, buffer)))
            if self._arrived:
                return self._arrived.popleft()
        return None

    def close(self) -> None:
        """Cancel UCX's receives into the buffers, and drop messages that found no buffer."""
        self._closed = True
        self._arrival.set()
        self._offers.clear()
        if self._api is None:
            return
        worker = self._api.worker
        worker.cancel_inflight_requests()
        worker.progress()
        # When ucxx destroys the worker it receives the remaining messages, and waits for ever if a sender is stopped.
        while worker.tag_probe(self._api.tag, self._api.any_tag, remove=True).matched:
            pass
        self._posted.clear()
        self._arrays.clear()

    def _messages_wait(self) -> bool:
        """Whether a message has arrived that matches no posted receive. False if all posted receives are stalled."""
        assert self._api is not None
        posted = len(self._posted) > len(self._stalled)
        return posted and bool(self._api.worker.tag_probe(self._api.tag, self._api.any_tag, remove=False).matched)

    def _look_for_stall(self) -> None:
        watched, self._watched = self._watched, None
        if self._closed or watched != self._num_arrived or not self._messages_wait():
            return
        log.warning(
            "no receive buffer is free; receiving is stalled", num_stalled=len(self._posted), num_free=len(self._free)
        )
        self._stalled.update(self._posted)
        self._wake()

    def check_integrity(self) -> None:
        num_free, num_posted, total = len(self._free), len(self._posted), len(self._buffers)
        assert num_free + num_posted + self._num_held == total, (
            f"receive buffers: {num_free} free + {num_posted} posted + {self._num_held} held != {total}"
        )

    def _take(self, slot: int, request: Any) -> None:
        """Queue the pieces of a message that has arrived, or drop the message."""
        assert self._api is not None
        self._num_held += 1
        error = self._api.error_of(request)  # too large, or cut off
        if error is not None:
            self._drop(slot, error)
        elif pieces := self._pieces(slot, None):
            self._arrived += pieces
            self._arrival.set()

    def _read(self, caller: Caller, buffer: int, offered: _Offered) -> list[Piece]:
        """Return the pieces on offer, after reading them, or only the header of a large one; none if that fails."""
        assert caller.peer is not None
        slot = self._free.pop()
        self._num_held += 1
        reading = _Reading(caller, caller.peer.facts, buffer, offered, self._buffers[slot])
        pieces: list[Piece] = []
        if offered.num_bytes > len(self._buffers[slot].memory):
            self._drop(slot, f"{offered.num_bytes} bytes are offered")
        elif reading.read(offered.num_bytes if offered.num_bytes <= EAGER_BYTES else HEAD_BYTES):
            pieces = self._pieces(slot, reading)
        else:
            self.release(slot)
        if not pieces or reading.num_read == offered.num_bytes:
            reading.answer()
        return pieces

    def _pieces(self, slot: int, reading: _Reading | None) -> list[Piece]:
        """Return the pieces in a buffer: of a message, or of an offer that has been read. Drop malformed ones."""
        memory = self._buffers[slot].memory
        found = find_piece(memory)
        if found is None:
            self._drop(slot, "not a piece")
            return []
        if reading is not None:
            if reading.offered != (found.number, found.end + found.rest_bytes):
                self._drop(slot, "the sender withdrew the piece")
                return []
            if found.rest_bytes and not reading.read(reading.offered.num_bytes):
                self.release(slot)
                return []
            if reading.num_read == reading.offered.num_bytes:
                reading = None
        pieces = [Piece(self, slot, memory, found, reading)]
        end = found.end + found.rest_bytes
        while found.end < end:
            found = find_piece(memory[:end], found.end)
            if found is None or found.end + found.rest_bytes != end or len(pieces) == MAX_PIECES:
                self._note_malformed("a piece in a sequence is malformed")
                break
            pieces.append(Piece(self, slot, memory, found, None))
        self._num_pieces[slot] = len(pieces)
        return pieces

    def _drop(self, slot: int, reason: str) -> None:
        self._note_malformed(reason)
        self.release(slot)

    def _note_malformed(self, reason: str) -> None:
        self.num_malformed += 1
        if self.num_malformed.bit_count() == 1:  # 1st, 2nd, 4th, ...: bounds the log
            log.warning("dropped a message", reason=reason, num_dropped=self.num_malformed)
