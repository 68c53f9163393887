"""The receiving half of the UCX transport: a fixed number of buffers, some posted to UCX, some held by the consumer."""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import Any, NamedTuple, Protocol

import anyio
import structlog

from pdmesh.transport.buffers import HEADER_BYTES, PieceBuffer
from pdmesh.transport.reading import FORBIDDEN, read_memory
from pdmesh.transport.ucx_api import OFFER, OFFER_MAGIC, PIECE_MAGIC, PREFIX, Offer, UcxApi

log = structlog.get_logger()

#: Receives posted at once.
MAX_POSTED = 4

#: A sender on another host that stops in the middle of its piece holds the receive it matched. When messages wait and
#: nothing has arrived for so long, the receives posted until then no longer count, and others are posted beside them.
#: A piece takes far less; one that is only slow arrives all the same, later.
STALL_S = 0.02


#: Calls a function after so many seconds.
CallLater = Callable[[float, Callable[[], None]], object]


class AnswerOffer(Protocol):
    """Tells the peer at an address what became of the piece it offered under a number."""

    def __call__(self, address: bytes, number: int, *, taken: bool) -> None: ...


class UcxPiece:
    """A received piece; see `pdmesh.transport.base.ReceivedPiece`."""

    __slots__ = ("_ring", "_slot", "_was_read", "header", "payload")

    def __init__(self, ring: UcxRing, slot: int, buffer: PieceBuffer, payload_bytes: int, *, was_read: bool) -> None:
        self._ring = ring
        self._slot: int | None = slot
        self._was_read = was_read
        self.header = buffer.header
        self.payload = buffer.payload[:payload_bytes]

    def release(self) -> None:
        if self._slot is not None:
            slot, self._slot = self._slot, None
            self._ring.release(slot, was_read=self._was_read)


class _Offered(NamedTuple):
    """An offer that has arrived, in a buffer that it holds."""

    slot: int
    offer: Offer
    return_address: bytes


class UcxRing:
    """Receive buffers: free, posted, or held by the consumer (or queued for it).

    A piece on offer is read when the consumer asks for it, into the buffer that was used last: so a consumer that is
    done with each piece before it takes the next finds it in the processor's cache.
    """

    def __init__(
        self,
        api: UcxApi,
        buffers: list[PieceBuffer],
        num_posted: int,
        *,
        answer: AnswerOffer,
        wake: Callable[[], None],
        call_later: CallLater,
    ) -> None:
        self._api = api
        self._buffers = buffers
        self._max_posted = num_posted
        self._answer = answer
        self._wake = wake
        self._call_later = call_later
        self._arrays = [api.array(buffer.memory) for buffer in buffers]
        self._free = deque(
            range(len(buffers))
        )  # at the left end those that messages used last, at the right the others
        self._posted: dict[int, Any] = {}  # requests by slot, in the order of posting, which is that of arrival
        self._num_held = 0
        self._arrived: deque[UcxPiece | _Offered] = deque()  # at most as many as there are buffers
        self._arrival = anyio.Event()
        self._closed = False
        self._stalled: set[int] = set()  # posted slots that count no more
        self._num_arrived = 0
        self._watched: int | None = None  # _num_arrived when messages were first seen waiting
        self.num_malformed = 0

    def post(self) -> None:
        """Offer free buffers to UCX."""
        while self._free and len(self._posted) - len(self._stalled) < self._max_posted:
            slot = self._free.popleft()
            # A message shorter than what is read of it must not find the one before.
            self._buffers[slot].memory[: OFFER.size] = bytes(OFFER.size)
            self._posted[slot] = self._api.worker.tag_recv(self._arrays[slot], self._api.tag, self._api.any_tag)

    def reap(self) -> bool:
        """Hand on the pieces that have arrived. True if there were any."""
        arrived = [slot for slot, request in self._posted.items() if request.completed]
        for slot in arrived:
            self._stalled.discard(slot)
            self._take(slot, self._posted.pop(slot))
        self._num_arrived += len(arrived)
        if not arrived and self._watched is None and self._messages_wait():
            self._watched = self._num_arrived
            self._call_later(STALL_S, self._look_for_stall)
        return bool(arrived)

    def release(self, slot: int, *, was_read: bool) -> None:
        self._num_held -= 1
        if was_read:
            self._free.append(slot)
        else:
            self._free.appendleft(slot)
        if not self._closed:
            self._wake()

    async def receive(self) -> AsyncIterator[UcxPiece]:
        while not self._closed:
            while self._arrived and not self._closed:
                arrived = self._arrived.popleft()
                piece = self._read(arrived) if isinstance(arrived, _Offered) else arrived
                if piece is not None:
                    yield piece
            self._arrival = anyio.Event()
            await self._arrival.wait()

    def close(self) -> None:
        """Take the buffers and the messages that found none away from UCX."""
        self._closed = True
        self._arrival.set()
        worker = self._api.worker
        worker.cancel_inflight_requests()
        worker.progress()
        # ucxx receives what is left when it destroys the worker, and waits, for ever if the sender is stopped or dead.
        while worker.tag_probe(self._api.tag, self._api.any_tag, remove=True).matched:
            pass
        self._posted.clear()
        self._arrays.clear()

    def _messages_wait(self) -> bool:
        """Whether messages have come that match no posted receive: all of these are being filled, or never will be."""
        posted = len(self._posted) > len(self._stalled)
        return posted and bool(self._api.worker.tag_probe(self._api.tag, self._api.any_tag, remove=False).matched)

    def _look_for_stall(self) -> None:
        watched, self._watched = self._watched, None
        if self._closed or watched != self._num_arrived or not self._messages_wait():
            return
        log.warning("receives are stalled", num_stalled=len(self._posted), num_free=len(self._free))
        self._stalled.update(self._posted)
        self._wake()

    def check_integrity(self) -> None:
        num_free, num_posted, total = len(self._free), len(self._posted), len(self._buffers)
        assert num_free + num_posted + self._num_held == total, (
            f"receive buffers: {num_free} free + {num_posted} posted + {self._num_held} held != {total}"
        )

    def _take(self, slot: int, request: Any) -> None:
        """A message has arrived."""
        self._num_held += 1
        error = self._api.error_of(request)  # larger than the buffer, or its sender broke off
        memory = self._buffers[slot].memory
        if error is not None:
            self._drop(slot, error)
        elif memory[:4] == OFFER_MAGIC:
            offer = Offer._make(OFFER.unpack_from(memory))
            return_address = bytes(memory[OFFER.size : OFFER.size + offer.return_bytes])
            self._hand_on(_Offered(slot, offer, return_address))
        else:
            piece = self._piece(slot, None)
            if piece is not None:
                self._hand_on(piece)

    def _hand_on(self, arrived: UcxPiece | _Offered) -> None:
        self._arrived.append(arrived)
        self._arrival.set()

    def _read(self, offered: _Offered) -> UcxPiece | None:
        """Fetch the piece on offer; nothing if that fails, which as a rule means that its sender has died."""
        self._free.appendleft(offered.slot)
        slot = self._free.pop()
        self._wake()
        offer, buffer = offered.offer, self._buffers[slot]
        taken = True
        piece = None
        if PREFIX.size + HEADER_BYTES <= offer.num_bytes <= len(buffer.memory):
            try:
                read_memory(offer.pid, offer.address, offer.num_bytes, buffer.address)
                piece = self._piece(slot, offer.number)
            except OSError as error:
                log.warning("a sender's memory could not be read", reason=str(error))
                taken = error.errno not in FORBIDDEN
                self.release(slot, was_read=True)
        else:
            self._drop(slot, f"{offer.num_bytes} bytes are offered")
        self._answer(offered.return_address, offer.number, taken=taken)
        return piece

    def _piece(self, slot: int, read_number: int | None) -> UcxPiece | None:
        """The piece in a buffer, if there is one: a message, or what was read of one on offer under a number."""
        buffer = self._buffers[slot]
        magic, payload_bytes, number = PREFIX.unpack_from(buffer.memory)
        if magic != PIECE_MAGIC or payload_bytes > len(buffer.payload):
            self._drop(slot, "not a piece")
        elif read_number not in {None, number}:
            self._drop(slot, "the piece was taken back")
        else:
            return UcxPiece(self, slot, buffer, payload_bytes, was_read=read_number is not None)
        return None

    def _drop(self, slot: int, reason: str) -> None:
        log.warning("dropped a message", reason=reason)
        self.num_malformed += 1
        self.release(slot, was_read=False)
