"""OpenTelemetry spans that follow a request through the services. Without an endpoint nothing is imported or recorded.

The trace context travels as a W3C ``traceparent`` string: in ``Generation.traceparent`` between our services, and in
the header of the same name at the edge. Parents are always named, never taken from a "current" span: requests
interleave on one event loop, and most spans are recorded only when they are over.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pdmesh.config import TelemetryConfig
from pdmesh.errors import ConfigError

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SpanExporter
    from opentelemetry.trace import Span as OtelSpan
    from opentelemetry.trace import SpanKind, Tracer

AttributeValue = str | bool | int | float | Sequence[str]
Attributes = Mapping[str, AttributeValue]

#: Time to export the remaining spans when a process stops.
FLUSH_LIMIT_S = 3.0


@dataclass(frozen=True, slots=True)
class SpanEvent:
    """An event within a span, at a Unix time in seconds."""

    name: str
    at: float
    attributes: Attributes = field(default_factory=dict[str, AttributeValue])


class Span:
    """A span in progress. For a request that is not traced, it only carries the trace context."""

    def __init__(self, traceparent: str | None, span: OtelSpan | None = None) -> None:
        """``traceparent`` is the W3C header for child spans."""
        self.traceparent = traceparent
        self._span = span

    def event(self, name: str) -> None:
        """Add an event that happens now."""
        if self._span is not None:
            self._span.add_event(name)

    def end(self, attributes: Attributes, *, error: str | None = None) -> None:
        """End the span, once. ``error`` names the failure in one word."""
        if self._span is not None:
            _end(self._span, attributes, error, None)


class Tracing:
    """Tracer of a service. Spans hold sizes and ids, never a prompt's text. No method raises, and only `close` blocks.

    Without a ``provider`` tracing is off; a client's trace context is still passed on. OpenTelemetry's global provider
    is not used.
    """

    def __init__(self, provider: TracerProvider | None = None) -> None:
        self._provider = provider
        self._tracer = None if provider is None else provider.get_tracer("pdmesh")

    @property
    def on(self) -> bool:
        """Whether spans are recorded. If not, callers need not collect attributes."""
        return self._tracer is not None

    def start(self, name: str, traceparent: str | None, started_at: float, attributes: Attributes) -> Span:
        """Begin the span of a client's request: a child of ``traceparent`` if given, else the root of a trace."""
        if self._tracer is None:
            return Span(traceparent)
        from opentelemetry.trace import SpanKind

        span = _begin(self._tracer, name, traceparent, started_at, attributes, SpanKind.SERVER)
        context = span.get_span_context()
        # OpenTelemetry's own settings turn tracing off.
        if not context.is_valid:
            return Span(None, span)
        return Span(f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}", span)

    def record(
        self,
        name: str,
        traceparent: str,
        started_at: float,
        ended_at: float,
        attributes: Attributes,
        *,
        events: Sequence[SpanEvent] = (),
        error: str | None = None,
    ) -> None:
        """Record a span that is over, as a child of ``traceparent``; no-op without tracing.

        Times are Unix times in seconds.
        """
        if self._tracer is None:
            return
        from opentelemetry.trace import SpanKind

        span = _begin(self._tracer, name, traceparent, started_at, attributes, SpanKind.INTERNAL)
        for event in events:
            span.add_event(event.name, event.attributes, timestamp=_ns(event.at))
        _end(span, {}, error, max(started_at, ended_at))

    def close(self) -> None:
        """Export the remaining spans. Block for `FLUSH_LIMIT_S` at most."""
        if self._provider is None:
            return
        # An exporter that cannot reach its collector may take long to stop, so the wait is limited.
        closing = threading.Thread(target=self._provider.shutdown, name="tracing-close", daemon=True)
        closing.start()
        closing.join(FLUSH_LIMIT_S)


def _begin(
    tracer: Tracer,
    name: str,
    traceparent: str | None,
    started_at: float,
    attributes: Attributes,
    kind: SpanKind,
) -> OtelSpan:
    """Begin a span. A malformed ``traceparent`` is ignored, as W3C Trace Context requires."""
    from opentelemetry.context import Context
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    carrier = {} if traceparent is None else {"traceparent": traceparent}
    parent = TraceContextTextMapPropagator().extract(carrier, context=Context())
    return tracer.start_span(name, context=parent, kind=kind, attributes=attributes, start_time=_ns(started_at))


def _end(span: OtelSpan, attributes: Attributes, error: str | None, ended_at: float | None) -> None:
    from opentelemetry.trace import StatusCode

    span.set_attributes(attributes)
    if error is not None:
        span.set_attribute("error.type", error)
        span.set_status(StatusCode.ERROR, error)
    span.end(None if ended_at is None else _ns(ended_at))


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)


def configure_tracing(service: str, config: TelemetryConfig) -> Tracing:
    """Return a process's tracing; off unless an OTLP endpoint is configured. Raise ConfigError for an unusable one."""
    if config.otlp_endpoint is None:
        return Tracing()
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter

    # Without a scheme the exporter would ask for TLS.
    endpoint = config.otlp_endpoint if "://" in config.otlp_endpoint else f"http://{config.otlp_endpoint}"
    try:
        exporter = OTLPSpanExporter(endpoint=endpoint)
    except Exception as error:
        # The exporter reads many OTEL_ environment variables and may raise any error.
        raise ConfigError(
            f"telemetry.otlp_endpoint is {config.otlp_endpoint!r}, but spans cannot be exported there: {error}"
        ) from error
    return exporting(service, exporter)


def exporting(service: str, exporter: SpanExporter) -> Tracing:
    """Return tracing that passes its spans to ``exporter`` in batches, on a thread of its own."""
    from opentelemetry.sdk.resources import SERVICE_NAME, OTELResourceDetector, Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    # OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES, if set, override our own name.
    resource = Resource.create({SERVICE_NAME: f"pdmesh-{service}"}).merge(OTELResourceDetector().detect())
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(exporter))
    return Tracing(provider)
