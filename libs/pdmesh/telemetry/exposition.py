"""Serves a Prometheus registry over HTTP, on a thread, for as long as a block runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from prometheus_client import CollectorRegistry, start_http_server

from pdmesh.errors import ConfigError


@contextmanager
def serve_metrics(registry: CollectorRegistry, *, host: str, port: int) -> Iterator[int]:
    """Serve ``registry`` at ``/metrics`` and yield the port (``port`` 0 takes a free one). Raises ConfigError."""
    try:
        server, thread = start_http_server(port, addr=host, registry=registry)
    except OSError as error:
        raise ConfigError(
            f"cannot serve metrics on {host}:{port}: is another process using the port? ({error.strerror})"
        ) from error
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
