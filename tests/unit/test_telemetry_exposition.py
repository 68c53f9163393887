"""Metrics over HTTP, for as long as the block runs."""

from __future__ import annotations

import socket
import urllib.error
import urllib.request

import pytest
from prometheus_client import CollectorRegistry, Counter

from pdmesh.errors import ConfigError
from pdmesh.telemetry.exposition import serve_metrics

LOOPBACK = "127.0.0.1"


def test_serves_the_registry_and_leaves_nothing() -> None:
    registry = CollectorRegistry()
    Counter("pdmesh:steps", "Steps.", registry=registry).inc(3)
    with (
        serve_metrics(registry, host=LOOPBACK, port=0) as port,
        urllib.request.urlopen(f"http://{LOOPBACK}:{port}/metrics", timeout=10) as response,
    ):
        assert b"pdmesh:steps_total 3.0" in response.read()
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(f"http://{LOOPBACK}:{port}/metrics", timeout=10)


def test_a_taken_port_is_a_wrong_configuration() -> None:
    with socket.create_server((LOOPBACK, 0)) as taken:
        port = taken.getsockname()[1]
        with (
            pytest.raises(ConfigError, match=f"cannot serve metrics on {LOOPBACK}:{port}"),
            serve_metrics(CollectorRegistry(), host=LOOPBACK, port=port),
        ):
            pass
