"""An HTTP request and its response, as a thin layer over ASGI for streaming."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import anyio
import msgspec
from starlette.types import Receive, Scope, Send

from pdmesh.errors import RequestRejected
from pdmesh_gateway.auth import Client, header_text
from pdmesh_gateway.dialects import NO_DIALECT, Dialect
from pdmesh_gateway.http.body import ClientGone
from pdmesh_gateway.http.openai_errors import error_event, error_headers

JSON = b"application/json"

#: Headers that keep proxies from collecting events.
_SSE_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


#: Limit of the headers with warnings of one answer.
MAX_WARNINGS = 16

#: Replacement of control characters: a line break would end a header.
_PRINTABLE = bytes(byte if 0x20 <= byte != 0x7F else 0x3F for byte in range(256))


@dataclass(slots=True)
class Exchange:
    """An HTTP request, and the methods that answer it.

    ``request_id`` is the gateway's own; ``label`` is the client's id and is echoed. ``thread`` is the id of the first
    stored response of the conversation that the request continues. ``client`` is None until a key has
    been checked, and if none is required. ``started``: the response's head was sent. ``ended``: all of the response was
    sent. ``received_at`` is Unix time in seconds.
    """

    scope: Scope
    receive: Receive
    send: Send
    request_id: str
    headers: dict[bytes, bytes]
    dialect: Dialect = NO_DIALECT
    label: str = ""
    thread: str = ""
    client: Client | None = None
    started: bool = False
    ended: bool = False
    # Makes the last events of a stream that fails; None before a stream begins.
    _failure: Callable[[RequestRejected], bytes] | None = None
    status: int = 0
    received_at: float = field(default_factory=time.time)
    extra_headers: list[tuple[bytes, bytes]] = field(default_factory=list[tuple[bytes, bytes]])
    # Warnings of the response, without repetitions.
    _warnings: dict[str, None] = field(default_factory=dict[str, None])

    def header(self, name: str) -> str | None:
        value = self.headers.get(name.encode())
        return None if value is None else value.decode("latin-1")

    def text(self, name: str) -> str | None:
        """Return a header that may contain characters beyond ASCII; None if it is absent."""
        value = self.headers.get(name.encode())
        return None if value is None else header_text(value)

    @property
    def known_client(self) -> Client:
        """The client of a request whose key was checked."""
        assert self.client is not None
        return self.client

    @property
    def content_length(self) -> int | None:
        value = self.headers.get(b"content-length", b"")
        return int(value) if value.isdigit() else None

    def warn(self, *warnings: str) -> None:
        """Add a header for each warning, other than earlier ones, to the response that is not begun.

        Beyond `MAX_WARNINGS`, one header counts the rest, because proxies limit headers.
        """
        self._warnings |= dict.fromkeys(warnings)

    async def respond(
        self,
        body: bytes,
        *,
        status: int = 200,
        content_type: bytes = JSON,
        headers: list[tuple[bytes, bytes]] | None = None,
    ) -> None:
        """Send a whole response."""
        await self._start(
            status,
            [(b"content-type", content_type), (b"content-length", str(len(body)).encode()), *(headers or [])],
        )
        self.ended = True
        await self.send({"type": "http.response.body", "body": body})

    async def respond_json(self, value: Any, *, status: int = 200) -> None:
        await self.respond(msgspec.json.encode(value), status=status)

    async def respond_error(self, error: RequestRejected) -> None:
        """Send an error as a response or, in a stream that has begun and not ended, as the last event.

        After any other begun response nothing is sent; if it is incomplete, the server closes the connection.
        """
        if self.started:
            if self._failure is not None and not self.ended:
                await self.send_events(self._failure(error), more=False)
            return
        headers = error_headers(error)
        # The rest of the body is not read.
        if error.status in (408, 413):
            headers.append((b"connection", b"close"))
        body = self.dialect.errors.body(error, self.label or self.request_id)
        await self.respond(body, status=self.dialect.errors.status(error), headers=headers)

    async def start_events(self, failure: Callable[[RequestRejected], bytes] = error_event) -> None:
        """Begin a stream of server-sent events. ``failure`` makes the last events if the stream fails."""
        self._failure = failure
        await self._start(200, _SSE_HEADERS)

    async def send_events(self, data: bytes, *, more: bool = True) -> None:
        self.ended = not more
        await self.send({"type": "http.response.body", "body": data, "more_body": more})

    async def run_until_gone(self, work: Callable[[], Awaitable[None]]) -> None:
        """Run ``work``, and cancel it when the client closes its connection. Call this after the body was read.

        Raises the exception of ``work``, or ClientGone.
        """
        failure: Exception | None = ClientGone()

        async def watch() -> None:
            while (await self.receive())["type"] != "http.disconnect":
                pass
            tasks.cancel_scope.cancel()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(watch)
            try:
                await work()
                failure = None
            except Exception as error:
                failure = error
            tasks.cancel_scope.cancel()
        if failure is not None:
            raise failure

    async def _start(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        self.started = True
        self.status = status
        all_headers = [
            *headers,
            *self.extra_headers,
            *_warning_headers(list(self._warnings)),
            *((name, (self.label or self.request_id).encode("latin-1")) for name in self.dialect.errors.id_headers),
        ]
        await self.send({"type": "http.response.start", "status": status, "headers": all_headers})


def _warning_headers(warnings: list[str]) -> list[tuple[bytes, bytes]]:
    if len(warnings) > MAX_WARNINGS:
        warnings = [*warnings[:MAX_WARNINGS], f"{len(warnings) - MAX_WARNINGS} more"]
    return [(b"x-pdmesh-warning", warning.encode("latin-1", "replace").translate(_PRINTABLE)) for warning in warnings]
