"""uvicorn inside our own task group."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Generator

import anyio
import uvicorn
from starlette.types import ASGIApp

from pdmesh.config import SecurityConfig
from pdmesh.errors import ConfigError

#: Longer than the idle time of usual load balancers (60 s), so that it is them who close.
KEEP_ALIVE_S = 65

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


class _Server(uvicorn.Server):
    """Leaves signals to `pdmesh.service`."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None]:
        yield


async def serve_http(app: ASGIApp, listener: socket.socket, security: SecurityConfig, stopping: anyio.Event) -> None:
    """Serve until ``stopping``, then take no new connection, let what runs end, and return."""
    config = uvicorn.Config(
        app,
        http="httptools",
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
