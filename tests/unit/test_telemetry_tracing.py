"""Spans and their context, as they travel between services."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from pdmesh.config import TelemetryConfig
from pdmesh.errors import ConfigError
from pdmesh.telemetry.tracing import SpanEvent, Tracing, configure_tracing, exporting
from pdmesh_testing.collector import collecting

CLIENT = "00-" + "a" * 32 + "-" + "b" * 16 + "-01"


def test_off_without_an_endpoint_and_without_an_import() -> None:
    """All that the four services import, and one of them run from start to end."""
    program = (
        "import sys, anyio\n"
        "import pdmesh_gateway.main, pdmesh_prefill.main, pdmesh_decode.main\n"
        "import pdmesh_scheduler.main\n"
        "from pdmesh.config import MeshConfig\n"
        "from pdmesh.service import ServiceContext, run_service\n"
        "async def serve(config, context):\n"
        "    assert not context.tracing.on\n"
        "    context.stopping.set()\n"
        "    await pdmesh_scheduler.main.serve(config, context)\n"
        "assert run_service('scheduler', MeshConfig(), serve) == 0\n"
        "assert not [name for name in sys.modules if name.startswith('opentelemetry')]\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
    assert not configure_tracing("x", TelemetryConfig()).on


def test_off_a_clients_context_is_handed_on() -> None:
    assert Tracing().start("request", CLIENT, 1.0, {}).traceparent == CLIENT
    assert Tracing().start("request", None, 1.0, {}).traceparent is None


def test_a_trace_follows_a_request_through_services() -> None:
    at_gateway, at_worker = InMemorySpanExporter(), InMemorySpanExporter()
    gateway, worker = exporting("gateway", at_gateway), exporting("prefill", at_worker)
    request = gateway.start("request", CLIENT, 9.0, {"prompt_tokens": 16})
    assert request.traceparent is not None
    chunk = SpanEvent("chunk", 11.0, {"num_tokens": 16})
    worker.record("prefill", request.traceparent, 10.0, 12.5, {"epoch": 0}, events=[chunk])
    request.event("first token")
    request.end({"reasons": ["stop", "length"]})
    gateway.close()
    worker.close()

    spans = (*at_gateway.get_finished_spans(), *at_worker.get_finished_spans())
    by_name = {span.name: span for span in spans}
    ids = {name: span.context.span_id for name, span in by_name.items() if span.context}
    parents = {name: span.parent.span_id for name, span in by_name.items() if span.parent}
    assert {f"{span.context.trace_id:032x}" for span in spans if span.context} == {"a" * 32}
    assert parents == {"request": int("b" * 16, 16), "prefill": ids["request"]}
    prefill = by_name["prefill"]
    assert (prefill.start_time, prefill.end_time) == (10_000_000_000, 12_500_000_000)
    assert dict(prefill.attributes or {}) == {"epoch": 0}
    assert [(event.name, event.timestamp) for event in prefill.events] == [("chunk", 11_000_000_000)]
    assert dict(by_name["request"].attributes or {}) == {"prompt_tokens": 16, "reasons": ("stop", "length")}
    assert [event.name for event in by_name["request"].events] == ["first token"]
    assert by_name["request"].resource.attributes["service.name"] == "pdmesh-gateway"


def test_an_error_marks_the_span() -> None:
    spans = InMemorySpanExporter()
    tracing = exporting("x", spans)
    tracing.start("a", None, 1.0, {}).end({}, error="bad")
    tracing.record("b", CLIENT, 1.0, 2.0, {}, error="worse")
    tracing.close()
    assert [(span.status.is_ok, (span.attributes or {})["error.type"]) for span in spans.get_finished_spans()] == [
        (False, "bad"),
        (False, "worse"),
    ]


@pytest.mark.parametrize("traceparent", ["", "garbage", "00-" + "0" * 32 + "-" + "0" * 16 + "-01"])
def test_a_malformed_context_counts_as_none(traceparent: str) -> None:
    spans = InMemorySpanExporter()
    tracing = exporting("x", spans)
    tracing.start("a", traceparent, 1.0, {}).end({})
    tracing.close()
    (span,) = spans.get_finished_spans()
    assert span.parent is None


def test_what_a_client_does_not_sample_is_not_recorded_but_handed_on() -> None:
    spans = InMemorySpanExporter()
    tracing = exporting("x", spans)
    request = tracing.start("a", CLIENT[:-2] + "00", 1.0, {})
    assert request.traceparent is not None
    assert request.traceparent.startswith(CLIENT[:36])
    assert request.traceparent.endswith("-00")
    tracing.record("b", request.traceparent, 1.0, 2.0, {})
    request.end({})
    tracing.close()
    assert spans.get_finished_spans() == ()


def test_opentelemetrys_service_name_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_SERVICE_NAME", "mine")
    spans = InMemorySpanExporter()
    tracing = exporting("x", spans)
    tracing.start("a", None, 1.0, {}).end({})
    tracing.close()
    (span,) = spans.get_finished_spans()
    assert span.resource.attributes["service.name"] == "mine"


def test_a_collector_that_is_not_there_disturbs_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pdmesh.telemetry.tracing.FLUSH_LIMIT_S", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as silent:  # takes connections and never answers
        tracing = configure_tracing("x", TelemetryConfig(otlp_endpoint=f"127.0.0.1:{silent.getsockname()[1]}"))
        assert tracing.on
        request = tracing.start("a", None, 1.0, {})
        request.end({})
        tracing.close()  # returns, though the exporter still tries


def test_a_wrong_setting_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "soon")
    with pytest.raises(ConfigError, match=r"telemetry\.otlp_endpoint is 'http://localhost:4317', but"):
        configure_tracing("x", TelemetryConfig(otlp_endpoint="http://localhost:4317"))


def test_a_service_that_stops_sends_what_is_left() -> None:
    program = (
        "from pdmesh.config_sources import load_config\n"
        "from pdmesh.service import run_service\n"
        "import os\n"
        "async def serve(config, context):\n"
        "    context.tracing.start('last words', None, 1.0, {}).end({})\n"
        "assert run_service('gateway', load_config(None, os.environ, {}), serve) == 0\n"
    )
    with collecting() as collector:
        environ = {
            **os.environ,
            "OTEL_EXPORTER_OTLP_ENDPOINT": collector.endpoint,
            "OTEL_BSP_SCHEDULE_DELAY": "3600000",
        }
        subprocess.run([sys.executable, "-c", program], check=True, env=environ)
        spans = collector.wait_for(lambda spans: bool(spans), limit_s=0)
    assert [(span.service, span.name) for span in spans] == [("pdmesh-gateway", "last words")]
