"""Responses that are answered in the background: what is under way, and what of it can be told again."""

from __future__ import annotations

import math
from collections import Counter, OrderedDict, deque
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import anyio

from pdmesh.errors import RequestRejected
from pdmesh_gateway.http.responses.rendering import ResponsesRendering

#: Of the events of one response that are kept to be told again: the latest.
MAX_EVENT_BYTES = 1024 * 1024

#: Of responses that have ended and whose events are kept. Those under way count to what the gateway holds.
MAX_ENDED = 64


@dataclass(slots=True)
class BackgroundResponse:
    """A response under way, or that has ended. Events are numbered from 0, as clients number them."""

    rendering: ResponsesRendering
    scope: anyio.CancelScope = field(default_factory=anyio.CancelScope)
    has_ended: bool = False
    _events: deque[bytes] = field(default_factory=deque[bytes])
    _num_dropped: int = 0
    _num_bytes: int = 0
    _news: anyio.Event = field(default_factory=anyio.Event)

    def add(self, events: bytes) -> None:
        """Add server-sent events."""
        for event in events.split(b"\n\n")[:-1]:
            self._events.append(event + b"\n\n")
            self._num_bytes += len(self._events[-1])
        while self._num_bytes > MAX_EVENT_BYTES:
            self._num_bytes -= len(self._events.popleft())
            self._num_dropped += 1
        self._tell()

    def end(self) -> None:
        """No more events come."""
        self.has_ended = True
        self._tell()

    async def ended(self) -> None:
        """Return when no more events come."""
        while not self.has_ended:
            await self._news.wait()

    async def events(self, number: int, *, idle_s: float = math.inf) -> AsyncIterator[bytes]:
        """The events from a number on, those that are to come, too; none after each ``idle_s`` without any.

        Raises RequestRejected if the next one is not kept any more.
        """
        while True:
            if number < self._num_dropped:
                raise RequestRejected(
                    f"Events before {self._num_dropped} are not kept any more: ask for the response itself.",
                    param="starting_after",
                    code="invalid_value",
                )
            if events := list(self._events)[number - self._num_dropped :]:
                number += len(events)
                yield b"".join(events)
            elif self.has_ended:
                return
            else:
                with anyio.move_on_after(idle_s) as waiting:
                    await self._news.wait()
                if waiting.cancelled_caught:
                    yield b""

    def _tell(self) -> None:
        self._news.set()
        self._news = anyio.Event()


class BackgroundResponses:
    """Responses by tenant and id. Of those that have ended, the tenant that has most gives up its oldest."""

    def __init__(self) -> None:
        self._runs: OrderedDict[tuple[str, str], BackgroundResponse] = OrderedDict()

    def add(self, tenant: str, response_id: str, run: BackgroundResponse) -> None:
        """Add a response, and forget one that has ended if there are too many of them."""
        self._runs[tenant, response_id] = run
        ended = [key for key, each in self._runs.items() if each.has_ended]
        if len(ended) > MAX_ENDED:
            [(most, _)] = Counter(key[0] for key in ended).most_common(1)
            del self._runs[next(key for key in ended if key[0] == most)]

    def get(self, tenant: str, response_id: str) -> BackgroundResponse | None:
        """Return a tenant's own response; None if there is none, or none any more."""
        return self._runs.get((tenant, response_id))

    def remove(self, tenant: str, response_id: str) -> None:
        """Cancel a response if it is under way, and forget it."""
        run = self._runs.pop((tenant, response_id), None)
        if run is not None:
            run.scope.cancel()
