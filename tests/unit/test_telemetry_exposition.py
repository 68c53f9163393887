"""Metrics over HTTP, for as long as the block runs."""

from __future__ import annotations

import shutil
import socket
import ssl
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import anyio
import anyio.to_thread
import pytest
from prometheus_client import CollectorRegistry, Counter
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from pdmesh.config import LOOPBACK, SecurityConfig
from pdmesh.errors import ConfigError
from pdmesh.telemetry.exposition import serve_metrics, watch_event_loop

pytestmark = pytest.mark.anyio

NONE = SecurityConfig()


async def scrape(port: int, query: str = "") -> str:
    def get() -> str:
        with urllib.request.urlopen(f"http://{LOOPBACK}:{port}/metrics{query}", timeout=10) as response:
            return str(response.read().decode())

    return await anyio.to_thread.run_sync(get)


async def test_serves_the_registry_and_leaves_nothing() -> None:
    registry = CollectorRegistry()
    Counter("pdmesh:steps", "Steps.", registry=registry).inc(3)
    Counter("pdmesh:others", "Others.", registry=registry).inc(4)
    with serve_metrics(registry, host=LOOPBACK, port=0, security=NONE) as port:
        assert "pdmesh:steps_total 3.0" in await scrape(port)
        one = await scrape(port, "?name[]=pdmesh:steps_total")
        assert "pdmesh:steps_total 3.0" in one
        assert "others" not in one
    with pytest.raises(urllib.error.URLError):
        await scrape(port)


async def test_is_collected_on_the_event_loop() -> None:
    asked: list[int] = []

    class MeshState(Collector):
        def collect(self) -> Iterator[Metric]:
            asked.append(threading.get_ident())
            yield GaugeMetricFamily("pdmesh:books", "Books.", value=len(asked))

        def describe(self) -> list[Metric]:
            return []

    registry = CollectorRegistry()
    registry.register(MeshState())
    with serve_metrics(registry, host=LOOPBACK, port=0, security=NONE) as port:
        assert "pdmesh:books 1.0" in await scrape(port)
    assert asked == [threading.get_ident()]


async def test_tasks_of_the_event_loop_are_counted() -> None:
    registry = CollectorRegistry()
    watch_event_loop(registry)
    before = registry.get_sample_value("pdmesh:event_loop_tasks")
    assert before is not None
    async with anyio.create_task_group() as tasks:
        for _ in range(3):
            tasks.start_soon(anyio.sleep_forever)
        assert registry.get_sample_value("pdmesh:event_loop_tasks") == before + 3
        tasks.cancel_scope.cancel()
    assert registry.get_sample_value("pdmesh:event_loop_tasks") == before


async def test_a_taken_port_is_a_wrong_configuration() -> None:
    with socket.create_server((LOOPBACK, 0)) as taken:
        port = taken.getsockname()[1]
        with (
            pytest.raises(ConfigError, match=f"cannot listen on {LOOPBACK}:{port}.*metrics_port"),
            serve_metrics(CollectorRegistry(), host=LOOPBACK, port=port, security=NONE),
        ):
            pass


async def test_a_wider_bind_needs_tls_and_a_key_or_a_trusted_network() -> None:
    with (
        pytest.raises(ConfigError, match=r"the metrics port \(telemetry.metrics_host\) would listen on 0\.0\.0\.0"),
        serve_metrics(CollectorRegistry(), host="0.0.0.0", port=0, security=NONE),
    ):
        pass
    trusted = SecurityConfig(trusted_network=True)
    with serve_metrics(CollectorRegistry(), host="0.0.0.0", port=0, security=trusted) as port:
        await scrape(port)


async def test_a_silent_peer_does_not_hold_up_the_others() -> None:
    with (
        serve_metrics(CollectorRegistry(), host=LOOPBACK, port=0, security=NONE) as port,
        socket.create_connection((LOOPBACK, port)),
    ):
        await scrape(port)


@pytest.mark.skipif(shutil.which("openssl") is None, reason="no openssl to make a certificate with")
async def test_with_tls_it_is_https_and_garbage_ends_its_own_connection_alone(tmp_path: Path) -> None:
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    subject = ["-subj", "/CN=localhost", "-addext", f"subjectAltName=IP:{LOOPBACK}"]
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    await anyio.run_process([*command, *subject, "-days", "2", "-keyout", str(key), "-out", str(cert)])
    security = SecurityConfig(tls_cert=cert, tls_key=key)
    registry = CollectorRegistry()
    Counter("pdmesh:steps", "Steps.", registry=registry).inc(3)

    def get(url: str) -> str:
        with urllib.request.urlopen(url, context=ssl.create_default_context(cafile=cert), timeout=10) as response:
            return str(response.read().decode())

    with (
        serve_metrics(registry, host=LOOPBACK, port=0, security=security) as port,
        socket.create_connection((LOOPBACK, port)),  # and says nothing
        socket.create_connection((LOOPBACK, port)) as noise,
    ):
        noise.sendall(b"garbage" * 100)
        url = f"https://{LOOPBACK}:{port}/metrics"
        assert "pdmesh:steps_total 3.0" in await anyio.to_thread.run_sync(get, url)


async def test_a_certificate_that_cannot_be_read_is_a_wrong_configuration(tmp_path: Path) -> None:
    security = SecurityConfig(tls_cert=tmp_path / "absent.pem", tls_key=tmp_path / "absent.key")
    with (
        pytest.raises(ConfigError, match=r"cannot use security\.tls_cert .*absent\.pem"),
        serve_metrics(CollectorRegistry(), host=LOOPBACK, port=0, security=security),
    ):
        pass
