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
from pdmesh.errors import ConfigError

#: Longer than the idle time of usual load balancers (60 s), so that it is them who close.
KEEP_ALIVE_S = 65

#: For a request's head to come, from the connection's beginning or its own first byte. uvicorn has no limit for it.
HEAD_LIMIT_S = 10.0

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


class _PunctualProtocol(HttpToolsProtocol):
    """Closes a connection that keeps a request's head waiting. Bodies and answers take what time they need."""

    _head_is_due: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._await_head()

    def data_received(self, data: bytes) -> None:
        if self.cycle is None or self.cycle.response_complete:
            self._await_head()
        super().data_received(data)

    def on_headers_complete(self) -> None:
        self._forget_head()
        super().on_headers_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        self._forget_head()
        super().connection_lost(exc)

    def _await_head(self) -> None:
        if self._head_is_due is None:
            self._head_is_due = self.loop.call_later(HEAD_LIMIT_S, self.transport.close)

    def _forget_head(self) -> None:
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
        http=_PunctualProtocol,
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
