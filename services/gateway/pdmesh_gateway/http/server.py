"""uvicorn inside our own task group."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Generator

import anyio
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from pdmesh.config import SecurityConfig
from pdmesh.errors import ConfigError, RequestRejected
from pdmesh_gateway.http.errors import error_json

#: Longer than the idle time of usual load balancers (60 s), so that it is them who close.
KEEP_ALIVE_S = 65

#: For a request's head to come, from the connection's beginning or its own first byte. uvicorn has no limit for it.
HEAD_LIMIT_S = 10.0

#: Of a request's line and headers together. (What is read at once may be as much again.)
MAX_HEAD_BYTES = 64 * 1024

BACKLOG = 2048


def open_socket(host: str, port: int) -> socket.socket:
    """Bind the HTTP port. Raises ConfigError if it cannot be had."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(BACKLOG)
        listener.setblocking(False)
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"cannot listen on {host}:{port}: {error.strerror}; is another process using the port? (gateway.port)"
        ) from error
    return listener


_HEAD_TOO_LARGE = (
    b"HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-type: application/json\r\nconnection: close\r\n"
)


class _LimitedProtocol(HttpToolsProtocol):
    """Closes a connection that keeps a request's head waiting, or sends too long a one. Bodies and answers take what
    time they need.
    """

    _head_is_due: asyncio.TimerHandle | None = None
    #: Bytes since the last that the application was told of: of a head, a trailer or a chunk's extension.
    _num_head_bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._await_head()

    def data_received(self, data: bytes) -> None:
        if self.cycle is None or self.cycle.response_complete:
            self._await_head()
        self._num_head_bytes += len(data)
        super().data_received(data)
        if self._num_head_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
            self._refuse_head()

    def on_headers_complete(self) -> None:
        self._forget_head()
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._num_head_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._num_head_bytes = 0
        super().on_message_complete()

    def _refuse_head(self) -> None:
        if self._head_is_due is not None:  # else it was answered, or is being answered
            message = f"The head of the request is longer than {MAX_HEAD_BYTES} bytes."
            body = error_json(RequestRejected(message, status=431, code="headers_too_large"))
            self.transport.write(b"%scontent-length: %d\r\n\r\n%s" % (_HEAD_TOO_LARGE, len(body), body))
        self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._forget_head()
        super().connection_lost(exc)

    def _await_head(self) -> None:
        if self._head_is_due is None:
            self._head_is_due = self.loop.call_later(HEAD_LIMIT_S, self.transport.close)

    def _forget_head(self) -> None:
        self._num_head_bytes = 0
        if self._head_is_due is not None:
            self._head_is_due.cancel()
            self._head_is_due = None


class _Server(uvicorn.Server):
    """Leaves signals to `pdmesh.service`."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None]:
        yield


async def serve_http(app: ASGIApp, listener: socket.socket, security: SecurityConfig, stopping: anyio.Event) -> None:
    """Serve until ``stopping``, then take no new connection, let what runs end, and return."""
    config = uvicorn.Config(
        app,
        http=_LimitedProtocol,
        ws="none",
        lifespan="off",
        interface="asgi3",
        log_config=None,
        access_log=False,
        server_header=False,
        date_header=False,
        proxy_headers=False,
        timeout_keep_alive=KEEP_ALIVE_S,
        backlog=BACKLOG,
        ssl_certfile=security.tls_cert,
        ssl_keyfile=security.tls_key,
    )
    server = _Server(config)

    async def stop() -> None:
        await stopping.wait()
        server.should_exit = True

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(stop)
        try:
            await server.serve(sockets=[listener])
        finally:
            listener.close()
        tasks.cancel_scope.cancel()
