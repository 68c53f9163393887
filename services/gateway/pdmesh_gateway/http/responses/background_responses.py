"""Responses that are answered in the background: what is under way, and what of it can be told again."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import anyio

from pdmesh.errors import RequestRejected
from pdmesh_gateway.http.responses.responses_protocol import ResponseObject

#: Of the events of one response that are kept to be told again: the latest.
MAX_EVENT_BYTES = 1024 * 1024

#: Read at once, so that a client that reads slowly takes little memory.
PIECE_BYTES = 64 * 1024


class EventLog:
    """The server-sent events of one response, those that are to come, too. They are numbered from 0, as clients do."""

    def __init__(self) -> None:
        self.has_ended = False
        self.num_bytes = 0
        self._events: list[bytes] = []
        self._num_dropped = 0
        self._news = anyio.Event()

    def add(self, events: bytes) -> None:
        """Add events, and forget the oldest if there are too many."""
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
        """No more events come."""
        self.has_ended = True
        self._tell()

    async def ended(self) -> None:
        """Return when no more events come."""
        while not self.has_ended:
            await self._news.wait()

    async def read(self, number: int, *, idle_s: float = math.inf) -> AsyncIterator[bytes]:
        """The events from a number on, in pieces; an empty one after each ``idle_s`` without any.

        Raises RequestRejected if the next one is not kept any more.
        """
        while True:
            if number < self._num_dropped:
                raise RequestRejected(
                    f"Events before {self._num_dropped} are not kept any more: ask for the response itself.",
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
        """The events from a number on that are there, but not more than are read at once."""
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
    """A response under way. ``begun`` is what there is of it before its answer."""

    begun: ResponseObject
    log: EventLog = field(default_factory=EventLog)
    scope: anyio.CancelScope = field(default_factory=anyio.CancelScope)

    async def cancel(self) -> None:
        """End it, unless it is about to end by itself, and return when it has ended."""
        self.scope.cancel()
        await self.log.ended()
