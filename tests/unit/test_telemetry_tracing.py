"""Spans and their context, as they travel between services."""

from __future__ import annotations

import subprocess
import sys

import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from pdmesh.config import TelemetryConfig
from pdmesh.telemetry.tracing import NoTracing, configure_tracing, exporting


def test_off_without_an_endpoint_and_without_an_import() -> None:
    program = (
        "import sys\nfrom pdmesh.config import TelemetryConfig\n"
        "from pdmesh.telemetry.tracing import configure_tracing\n"
        "tracing = configure_tracing('x', TelemetryConfig())\n"
        "with tracing.span('a', size=1): assert tracing.traceparent() is None\n"
        "tracing.close(); assert not any(name.startswith('opentelemetry') for name in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
    assert isinstance(configure_tracing("x", TelemetryConfig()), NoTracing)


def test_a_trace_follows_a_request_through_services() -> None:
    at_gateway, at_worker = InMemorySpanExporter(), InMemorySpanExporter()
    gateway, worker = exporting("gateway", at_gateway), exporting("prefill", at_worker)
    with gateway.span("request", prompt_tokens=16):
        traceparent = gateway.traceparent()
    assert traceparent is not None
    with worker.span("prefill", traceparent, chunk=0):
        inner = worker.traceparent()
    worker.record("queued", inner, 10.0, 12.5, position=3)
    gateway.close()
    worker.close()

    spans = (*at_gateway.get_finished_spans(), *at_worker.get_finished_spans())
    by_name = {span.name: span for span in spans}
    ids = {name: span.context.span_id for name, span in by_name.items() if span.context}
    parents = {name: span.parent.span_id for name, span in by_name.items() if span.parent}
    assert len({span.context.trace_id for span in spans if span.context}) == 1
    assert parents == {"prefill": ids["request"], "queued": ids["prefill"]}
    queued = by_name["queued"]
    assert (queued.start_time, queued.end_time) == (10_000_000_000, 12_500_000_000)
    assert dict(by_name["prefill"].attributes or {}) == {"chunk": 0}
    assert by_name["request"].resource.attributes["service.name"] == "pdmesh-gateway"


def test_an_exception_marks_the_span_and_goes_on() -> None:
    spans = InMemorySpanExporter()
    tracing = exporting("x", spans)
    with pytest.raises(ValueError, match="bad"), tracing.span("a"):
        raise ValueError("bad")
    tracing.close()
    (span,) = spans.get_finished_spans()
    assert not span.status.is_ok


@pytest.mark.parametrize("traceparent", ["", "garbage", "00-" + "0" * 32 + "-" + "0" * 16 + "-01"])
def test_a_malformed_context_counts_as_none(traceparent: str) -> None:
    spans = InMemorySpanExporter()
    tracing = exporting("x", spans)
    with tracing.span("a", traceparent):
        pass
    tracing.close()
    (span,) = spans.get_finished_spans()
    assert span.parent is None


def test_opentelemetrys_service_name_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_SERVICE_NAME", "mine")
    spans = InMemorySpanExporter()
    tracing = exporting("x", spans)
    with tracing.span("a"):
        pass
    tracing.close()
    (span,) = spans.get_finished_spans()
    assert span.resource.attributes["service.name"] == "mine"
