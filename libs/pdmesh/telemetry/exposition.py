"""HTTP server of a Prometheus registry, on a thread, within a block."""

from __future__ import annotations

import asyncio
import socket
import ssl
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar
from wsgiref.simple_server import WSGIRequestHandler, make_server

import structlog
from prometheus_client import CollectorRegistry, Gauge, make_wsgi_app
from prometheus_client.core import Metric
from prometheus_client.exposition import ThreadingWSGIServer
from prometheus_client.registry import Collector

from pdmesh.config import SecurityConfig
from pdmesh.errors import ConfigError
from pdmesh.wire.certificates import keep_renewed
from pdmesh.wire.endpoint import cannot_listen, check_bind

if TYPE_CHECKING:
    from _typeshed.wsgi import StartResponse, WSGIApplication, WSGIEnvironment

T = TypeVar("T")

log = structlog.get_logger()

#: Time for the event loop to answer a scrape. A loop that is busy for longer is a bug that the scraper should see.
COLLECT_LIMIT_S = 5.0


@contextmanager
def serve_metrics(registry: CollectorRegistry, *, host: str, port: int, security: SecurityConfig) -> Iterator[int]:
    """Serve ``registry`` at ``/metrics`` and yield the port (``port`` 0 takes a free one).

    Raise ConfigError if the port is taken or open to any peer.

    Metrics are collected on the caller's event loop, so collectors may read its state. ``/live`` answers 200 if the
    loop responds. With TLS configured the server uses HTTPS. Scrapers need neither key nor certificate, as at the
    gateway's ``/metrics``.
    """
    check_bind(host, security, what="the metrics port (telemetry.metrics_host)", has_key=bool(security.mesh_token))
    tls = _tls(security)
    loop = asyncio.get_running_loop()
    app = _with_liveness(make_wsgi_app(_OnLoop(registry, loop)), loop)
    try:
        server = make_server(host, port, app, _Server6 if ":" in host else _Server, handler_class=_Handler)
    except OSError as error:
        raise cannot_listen(host, port, error, setting="metrics_port") from error
    if tls is not None:
        # Each connection's own thread does the handshake, so that a silent peer cannot block the others.
        server.socket = tls.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
    thread = threading.Thread(target=server.serve_forever, name="metrics", daemon=True)
    thread.start()
    try:
        yield server.server_port
    finally:
        # Wakes the thread, which otherwise checks twice a second whether to stop.
        server.socket.shutdown(socket.SHUT_RDWR)
        server.shutdown()
        server.server_close()
        thread.join()


def watch_event_loop(registry: CollectorRegistry) -> None:
    """Add a gauge of the running event loop's tasks, because a leak shows as a growing number."""
    loop = asyncio.get_running_loop()
    tasks = Gauge("pdmesh:event_loop_tasks", "Live tasks of the event loop.", registry=registry)
    tasks.set_function(lambda: len(asyncio.all_tasks(loop)))


class Aliases(Collector):
    """Collector that repeats the metrics of ``collectors`` under the names that dashboards and routers for
    vLLM read.
    """

    def __init__(self, *collectors: Collector) -> None:
        self._collectors = collectors

    def collect(self) -> Iterator[Metric]:
        for collector in self._collectors:
            for metric in collector.collect():
                alias = Metric(_aliased(metric.name), metric.documentation, metric.type)
                alias.samples = [sample._replace(name=_aliased(sample.name)) for sample in metric.samples]
                yield alias

    def describe(self) -> Iterable[Metric]:
        return []


def _aliased(name: str) -> str:
    return "vllm" + name.removeprefix("pdmesh")


class _OnLoop(CollectorRegistry):
    """Registry whose metrics are collected on an event loop, from any thread."""

    def __init__(self, registry: Collector, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__()
        self._registry = registry
        self._loop = loop

    def collect(self) -> Iterator[Metric]:
        yield from _on_loop(self._loop, lambda: list(self._registry.collect()))

    def restricted_registry(self, names: Iterable[str]) -> CollectorRegistry:  # type: ignore[override]
        assert isinstance(self._registry, CollectorRegistry)
        return _OnLoop(self._registry.restricted_registry(names), self._loop)


def _on_loop(loop: asyncio.AbstractEventLoop, function: Callable[[], T]) -> T:
    """Return the result of ``function`` on ``loop``.

    Call this from another thread. Raises TimeoutError if the loop is busy.
    """
    result: Future[T] = Future()

    def call() -> None:
        try:
            result.set_result(function())
        except Exception as error:
            # The asking thread raises the error.
            result.set_exception(error)

    loop.call_soon_threadsafe(call)
    return result.result(COLLECT_LIMIT_S)


def _with_liveness(metrics: Callable[..., Iterable[bytes]], loop: asyncio.AbstractEventLoop) -> WSGIApplication:
    def app(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        if environ.get("PATH_INFO") != "/live":
            return metrics(environ, start_response)
        try:
            _on_loop(loop, lambda: None)
        except TimeoutError:
            status, body = "503 Service Unavailable", b"the event loop is busy\n"
        else:
            status, body = "200 OK", b"live\n"
        start_response(status, [("Content-Type", "text/plain"), ("Content-Length", str(len(body)))])
        return [body]

    return app


def _tls(security: SecurityConfig) -> ssl.SSLContext | None:
    if security.tls_cert is None:
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(security.tls_cert, security.tls_key)
    except OSError as error:
        raise ConfigError(f"cannot use security.tls_cert {security.tls_cert} with its tls_key: {error}") from error
    keep_renewed(context, security)
    return context


class _Server(ThreadingWSGIServer):
    def handle_error(self, request: Any, client_address: Any) -> None:
        log.warning("a metrics scrape failed", peer=str(client_address), error=str(sys.exception()))


class _Server6(_Server):
    address_family = socket.AF_INET6


class _Handler(WSGIRequestHandler):
    # Seconds for a peer to send its request.
    timeout = 10.0

    def log_message(self, format: str, *args: Any) -> None:
        return
