"""Responses that are answered in the background, and the log of their events for clients that connect again."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import anyio

from pdmesh.errors import RequestRejected
from pdmesh_gateway.http.responses.responses_protocol import ResponseObject

#: Limit of one response's logged events; the oldest are dropped.
MAX_EVENT_BYTES = 1024 * 1024

#: Limit of one read, so that a client that reads slowly takes little memory.
PIECE_BYTES = 64 * 1024


class EventLog:
    """Server-sent events of one response, while they are added. Events are numbered from 0, as in OpenAI's API."""

    def __init__(self) -> None:
        self.has_ended = False
        self.num_bytes = 0
        self._events: list[bytes] = []
        self._num_dropped = 0
        self._news = anyio.Event()

    def add(self, events: bytes) -> None:
        """Add events, and drop the oldest beyond `MAX_EVENT_BYTES`."""
        for event in events.split(b"\n\n")[:-1]:
            self._events.append(event + b"\n\n")
            self.num_bytes += len(self._events[-1])
        num_old = 0
        while self.num_bytes > MAX_EVENT_BYTES:
            self.num_bytes -= len(self._events[num_old])
            num_old += 1
        del self._events[:num_old]
        self._num_dropped += num_old
        self._tell()

    def end(self) -> None:
        """Mark the log as complete."""
        self.has_ended = True
        self._tell()

    async def ended(self) -> None:
        """Wait until the log is complete."""
        while not self.has_ended:
            await self._news.wait()

    async def read(self, number: int, *, idle_s: float = math.inf) -> AsyncIterator[bytes]:
        """Yield the events from ``number`` on, in pieces, until the log is complete.

        An empty piece follows each ``idle_s`` without events. Raises RequestRejected if the next event was dropped.
        """
        while True:
            if number < self._num_dropped:
                raise RequestRejected(
                    f"Events before {self._num_dropped} are no longer kept. Retrieve the response itself.",
                    param="starting_after",
                    code="invalid_value",
                )
            if events := self._piece(number):
                number += len(events)
                yield b"".join(events)
            elif self.has_ended:
                return
            else:
                with anyio.move_on_after(idle_s) as waiting:
                    await self._news.wait()
                if waiting.cancelled_caught:
                    yield b""

    def _piece(self, number: int) -> list[bytes]:
        """Return the logged events from ``number`` on, about `PIECE_BYTES` of them."""
        begin = end = number - self._num_dropped
        num_bytes = 0
        while end < len(self._events) and num_bytes < PIECE_BYTES:
            num_bytes += len(self._events[end])
            end += 1
        return self._events[begin:end]

    def _tell(self) -> None:
        self._news.set()
        self._news = anyio.Event()


@dataclass(slots=True)
class BackgroundResponse:
    """A running response. ``begun`` is the response object before the answer."""

    begun: ResponseObject
    log: EventLog = field(default_factory=EventLog)
    scope: anyio.CancelScope = field(default_factory=anyio.CancelScope)

    async def cancel(self) -> None:
        """Cancel the response, unless it is about to end by itself, and wait until it has ended."""
        self.scope.cancel()
        await self.log.ended()
