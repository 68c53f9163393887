"""The HTTP server: uvicorn inside the gateway's task group."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import socket
from collections.abc import Generator
from typing import Any

import anyio
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from pdmesh.config import GatewayConfig, SecurityConfig
from pdmesh.errors import ConfigError, RequestRejected
from pdmesh.wire.certificates import keep_renewed
from pdmesh.wire.endpoint import bind_socket, cannot_listen
from pdmesh_gateway.http.half_closed import HalfClosedClient
from pdmesh_gateway.http.openai_errors import error_json

#: Longer than the idle time of common load balancers (60 s), so that the load balancer closes first.
KEEP_ALIVE_S = 65

#: Time for a request's head to arrive, from the start of the connection or the head's first byte. uvicorn has no such
#: limit.
HEAD_LIMIT_S = 10.0

#: Time for a request that is arriving on an idle connection when the server stops.
IDLE_LINGER_S = 1.0

#: Limit of a request's line and headers together. One read may add as many bytes before the check.
MAX_HEAD_BYTES = 64 * 1024

BACKLOG = 2048


def open_listener(config: GatewayConfig) -> socket.socket:
    """Return the HTTP port: our own, or one shared with other gateways. Raises ConfigError if it is unavailable."""
    if config.listen_fd is None:
        listener = bind_socket(config.host, config.port, setting="gateway.port")
    else:
        try:
            listener = socket.socket(fileno=config.listen_fd)
        except OSError as error:
            raise ConfigError(f"gateway.listen_fd is {config.listen_fd}: {error.strerror}") from error
    try:
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise cannot_listen(config.host, config.port, error, setting="gateway.port") from error
    listener.setblocking(False)
    return listener


class _Drain:
    """State of the shutdown: whether connections should end, and whether all have."""

    def __init__(self) -> None:
        self.begun = False
        self.emptied = anyio.Event()


_HEAD_TOO_LARGE = (
    b"HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-type: application/json\r\nconnection: close\r\n"
)


class _LimitedProtocol(HttpToolsProtocol):
    """HTTP protocol that closes a connection whose request head is late or too long.

    Bodies and answers have no such limit here. A client may close its sending half after a request.
    """

    _head_is_due: asyncio.TimerHandle | None = None
    #: Bytes since the application was last notified: of a head, a trailer or a chunk's extension.
    _num_head_bytes = 0
    _half_closed: HalfClosedClient | None = None

    def __init__(self, *, drain: _Drain, **settings: Any) -> None:
        super().__init__(**settings)
        self._drain = drain

    @property
    def is_busy(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

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
        if self.scope["http_version"] == "1.0":
            self.cycle.waiting_for_100_continue = False
            self.cycle.send = _unchunked(self.cycle)  # type: ignore[method-assign]
        if self._drain.begun and self.is_busy:
            # The response then announces the close.
            self.cycle.keep_alive = False

    def on_body(self, body: bytes) -> None:
        self._num_head_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._num_head_bytes = 0
        super().on_message_complete()

    def _refuse_head(self) -> None:
        if self._head_is_due is not None:
            # Otherwise the request was answered, or is being answered.
            message = f"The request headers are longer than {MAX_HEAD_BYTES} bytes."
            body = error_json(RequestRejected(message, status=431, code="headers_too_large"))
            self.transport.write(b"%scontent-length: %d\r\n\r\n%s" % (_HEAD_TOO_LARGE, len(body), body))
        self.transport.close()

    def eof_received(self) -> bool:  # type: ignore[override]
        """Return whether the connection stays open for the answer to a complete request.

        False otherwise, and always for TLS, which has no half-closed connections.
        """
        if not self.is_busy or self.cycle.more_body or self.pipeline or self.scheme == "https":
            return False
        self.cycle.keep_alive = False
        is_http10 = self.scope["http_version"] == "1.0"
        self._half_closed = HalfClosedClient(self.loop, self.transport, self.cycle, is_http10=is_http10)
        return True

    def connection_lost(self, exc: Exception | None) -> None:
        self._forget_head()
        if self._half_closed is not None:
            self._half_closed.close()
        super().connection_lost(exc)
        if self._drain.begun and not self.connections:
            self._drain.emptied.set()

    def _await_head(self) -> None:
        if self._head_is_due is None:
            self._head_is_due = self.loop.call_later(HEAD_LIMIT_S, self.transport.close)

    def _forget_head(self) -> None:
        self._num_head_bytes = 0
        if self._head_is_due is not None:
            self._head_is_due.cancel()
            self._head_is_due = None


def _unchunked(cycle: RequestResponseCycle) -> Any:
    """Return a `send` for an HTTP/1.0 client: a body of unknown length ends with the connection, without chunks."""
    send = cycle.send

    async def send_unchunked(message: Any) -> None:
        if message["type"] == "http.response.start":
            if not any(name == b"content-length" for name, _ in message["headers"]):
                cycle.chunked_encoding = False
        elif cycle.chunked_encoding is False and not cycle.expected_content_length:
            cycle.expected_content_length = len(message.get("body", b""))
        await send(message)

    return send_unchunked


class _Server(uvicorn.Server):
    """uvicorn's server without its signal handlers: `pdmesh.service` handles signals."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None]:
        yield


async def serve_http(
    app: ASGIApp,
    listener: socket.socket,
    security: SecurityConfig,
    stopping: anyio.Event,
    *,
    probes: socket.socket | None = None,
    linger_s: float = 0.0,
) -> None:
    """Serve until ``stopping`` is set, let running requests end, and return.

    ``probes`` is a second port, for requests to this gateway where others share the first port. With it, the first port
    closes at once when the server stops; without it, new connections are accepted for ``linger_s``. In either case idle
    connections may carry one more request within `IDLE_LINGER_S`, because it may be on its way.
    """
    drain = _Drain()
    config = uvicorn.Config(
        app,
        http=functools.partial(_LimitedProtocol, drain=drain),  # type: ignore[arg-type]
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
    config.load()
    if config.ssl is not None:
        keep_renewed(config.ssl, security)
    server = _Server(config)

    async def stop() -> None:
        await stopping.wait()
        drain.begun = True
        connections = server.server_state.connections
        for connection in list(connections):
            if isinstance(connection, _LimitedProtocol) and connection.is_busy:
                # Closes once it has answered.
                connection.shutdown()
        if probes is None:
            await anyio.sleep(linger_s)
        else:
            server.servers[0].close()
        with anyio.move_on_after(IDLE_LINGER_S):
            if connections:
                await drain.emptied.wait()
        server.should_exit = True

    sockets = [listener] if probes is None else [listener, probes]
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(stop)
        try:
            await server.serve(sockets=sockets)
        finally:
            for each in sockets:
                each.close()
        tasks.cancel_scope.cancel()
