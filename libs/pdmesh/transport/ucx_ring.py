"""The receiving half of the UCX transport: a fixed number of buffers, some posted to UCX, some held by the consumer."""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import Any

import anyio
import structlog

from pdmesh.transport.buffers import PieceBuffer
from pdmesh.transport.ucx_api import PREFIX, PREFIX_MAGIC, UcxApi

log = structlog.get_logger()

#: Receives posted at once. Those used last are posted next, so that a few that are in the cache serve most pieces. One
#: would be faster inside a host (1 MiB pieces at 57 to 68 % of ucx_perftest's rate against 43 % with 4, 2-core VM), but
#: a sender that is killed would more often stall the ring for `STALL_S`.
MAX_POSTED = 4

#: A sender that is killed while its piece is read can hold the receive it matched for good. When messages wait and
#: nothing has arrived for so long, the receives posted until then no longer count, and others are posted beside them.
#: A piece takes far less; one that is only slow arrives all the same, later.
STALL_S = 0.02


#: Calls a function after so many seconds.
CallLater = Callable[[float, Callable[[], None]], object]


class UcxPiece:
    """A received piece; see `pdmesh.transport.base.ReceivedPiece`."""

    __slots__ = ("_ring", "_slot", "header", "payload")

    def __init__(self, ring: UcxRing, slot: int, header: memoryview, payload: memoryview) -> None:
        self._ring = ring
        self._slot: int | None = slot
        self.header = header
        self.payload = payload

    def release(self) -> None:
        if self._slot is not None:
            slot, self._slot = self._slot, None
            self._ring.release(slot)


class UcxRing:
    """Receive buffers: free, posted, or held by the consumer (or queued for it)."""

    def __init__(
        self,
        api: UcxApi,
        buffers: list[PieceBuffer],
        num_posted: int,
        *,
        wake: Callable[[], None],
        call_later: CallLater,
    ) -> None:
        self._api = api
        self._buffers = buffers
        self._max_posted = num_posted
        self._wake = wake
        self._call_later = call_later
        self._arrays = [api.array(buffer.memory) for buffer in buffers]
        self._free = list(range(len(buffers)))
        self._posted: dict[int, Any] = {}  # requests by slot, in the order of posting, which is that of arrival
        self._num_held = 0
        self._arrived: deque[UcxPiece] = deque()  # at most as many as there are buffers
        self._arrival = anyio.Event()
        self._closed = False
        self._stalled: set[int] = set()  # posted slots that count no more
        self._num_arrived = 0
        self._watched: int | None = None  # _num_arrived when messages were first seen waiting
        self.num_malformed = 0

    def post(self) -> None:
        """Offer free buffers to UCX."""
        while self._free and len(self._posted) - len(self._stalled) < self._max_posted:
            slot = self._free.pop()
            # A message shorter than the prefix must not find that of the message before.
            self._buffers[slot].memory[: PREFIX.size] = bytes(PREFIX.size)
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

    def release(self, slot: int) -> None:
        self._num_held -= 1
        self._free.append(slot)
        if not self._closed:
            self._wake()

    async def receive(self) -> AsyncIterator[UcxPiece]:
        while not self._closed:
            while self._arrived:
                yield self._arrived.popleft()
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
        buffer = self._buffers[slot]
        error = self._api.error_of(request)  # larger than the buffer, or its sender broke off
        if error is None:
            magic, payload_bytes, _ = PREFIX.unpack_from(buffer.memory)
            if magic == PREFIX_MAGIC and payload_bytes <= len(buffer.payload):
                self._num_held += 1
                self._arrived.append(UcxPiece(self, slot, buffer.header, buffer.payload[:payload_bytes]))
                self._arrival.set()
                return
            error = "not a piece"
        log.warning("dropped a message", reason=error)
        self.num_malformed += 1
        self._free.append(slot)
