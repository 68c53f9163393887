"""OpenTelemetry spans that follow a request through the services. Without an endpoint nothing is imported or done.

The trace context travels as a W3C ``traceparent`` string: in ``Generation.traceparent`` between our services, and in
the header of the same name at the edge. Parents are always named, never taken from a "current" span: requests
interleave on one event loop, and most spans are recorded only when they are over.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import TYPE_CHECKING, Protocol

from pdmesh.config import TelemetryConfig
from pdmesh.errors import ConfigError

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SpanExporter
    from opentelemetry.trace import Span as OtelSpan

AttributeValue = str | bool | int | float | Sequence[str]
Attributes = Mapping[str, AttributeValue]

#: For what is left to be exported when a process stops.
FLUSH_LIMIT_S = 3.0


class Kind(Enum):
    """A span's kind, in OpenTelemetry's words."""

    SERVER = auto()  # the answer to a client's request
    INTERNAL = auto()


@dataclass(frozen=True, slots=True)
class SpanEvent:
    """Something that happened within a span, at a Unix time in seconds."""

    name: str
    at: float
    attributes: Attributes = field(default_factory=dict[str, AttributeValue])


class Span(Protocol):
    """A span in progress."""

    @property
    def traceparent(self) -> str | None:
        """The W3C header to hand on to child spans."""
        ...

    def event(self, name: str) -> None:
        """Note that something happened now."""
        ...

    def end(self, attributes: Attributes, *, error: str | None = None) -> None:
        """End the span, once. ``error`` names the failure in one word."""
        ...


class Tracing(Protocol):
    """What a service traces with. Spans carry sizes and ids, never a prompt's text. No method blocks or raises."""

    @property
    def on(self) -> bool:
        """Whether spans are recorded at all; if not, there is no need to gather their attributes."""
        ...

    def start(self, name: str, traceparent: str | None, started_at: float, attributes: Attributes) -> Span:
        """Begin the span of a client's request: a child of ``traceparent`` if given, else the root of a trace."""
        ...

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
        """Record a span that is over, as a child of ``traceparent``. Times are Unix times in seconds."""
        ...

    def close(self) -> None:
        """Export what is left. Blocking, for `FLUSH_LIMIT_S` at most."""
        ...


@dataclass(frozen=True, slots=True)
class NoSpan:
    """A span of a request that is not traced; it passes on the trace context that came in."""

    traceparent: str | None

    def event(self, name: str) -> None:
        return

    def end(self, attributes: Attributes, *, error: str | None = None) -> None:
        return


class NoTracing:
    """Tracing that is off. A client's trace context is still passed on."""

    on = False

    def start(self, name: str, traceparent: str | None, started_at: float, attributes: Attributes) -> Span:
        return NoSpan(traceparent)

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
        return

    def close(self) -> None:
        return


class _OpenSpan:
    def __init__(self, span: OtelSpan) -> None:
        self._span = span
        context = span.get_span_context()
        self.traceparent: str | None = None
        if context.is_valid:  # not so if OpenTelemetry's own settings turn it off
            self.traceparent = f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"

    def event(self, name: str) -> None:
        self._span.add_event(name)

    def end(self, attributes: Attributes, *, error: str | None = None) -> None:
        _end(self._span, attributes, error, None)


class OtelTracing:
    """Tracing through a tracer provider of its own; OpenTelemetry's global one is left alone."""

    on = True

    def __init__(self, provider: TracerProvider) -> None:
        from opentelemetry.context import Context
        from opentelemetry.trace import SpanKind
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._provider = provider
        self._tracer = provider.get_tracer("pdmesh")
        self._propagator = TraceContextTextMapPropagator()
        self._no_parent = Context()
        self._kinds = {Kind.SERVER: SpanKind.SERVER, Kind.INTERNAL: SpanKind.INTERNAL}

    def start(self, name: str, traceparent: str | None, started_at: float, attributes: Attributes) -> Span:
        return _OpenSpan(self._begin(name, traceparent, started_at, attributes, Kind.SERVER))

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
        span = self._begin(name, traceparent, started_at, attributes, Kind.INTERNAL)
        for event in events:
            span.add_event(event.name, event.attributes, timestamp=_ns(event.at))
        _end(span, {}, error, max(started_at, ended_at))

    def close(self) -> None:
        # An exporter that cannot reach its collector takes its own time to give up; we do not wait for it.
        closing = threading.Thread(target=self._provider.shutdown, name="tracing-close", daemon=True)
        closing.start()
        closing.join(FLUSH_LIMIT_S)

    def _begin(
        self, name: str, traceparent: str | None, started_at: float, attributes: Attributes, kind: Kind
    ) -> OtelSpan:
        return self._tracer.start_span(
            name,
            context=self._parent(traceparent),
            kind=self._kinds[kind],
            attributes=attributes,
            start_time=_ns(started_at),
        )

    def _parent(self, traceparent: str | None) -> Context:
        """The context of a remote parent. A malformed one counts as none, as W3C Trace Context asks."""
        if traceparent is None:
            return self._no_parent
        return self._propagator.extract({"traceparent": traceparent}, context=self._no_parent)


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
    """Return a process's tracing; off unless an OTLP endpoint is configured. Raises ConfigError."""
    if config.otlp_endpoint is None:
        return NoTracing()
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter

    # Without a scheme the exporter would ask for TLS.
    endpoint = config.otlp_endpoint if "://" in config.otlp_endpoint else f"http://{config.otlp_endpoint}"
    try:
        exporter = OTLPSpanExporter(endpoint=endpoint)
    except Exception as error:  # of many kinds: OpenTelemetry reads a dozen variables of its own here
        raise ConfigError(
            f"telemetry.otlp_endpoint is {config.otlp_endpoint!r}, but spans cannot be exported there: {error}"
        ) from error
    return exporting(service, exporter)


def exporting(service: str, exporter: SpanExporter) -> OtelTracing:
    """Return tracing that passes its spans to ``exporter`` in batches, on a thread of its own."""
    from opentelemetry.sdk.resources import SERVICE_NAME, OTELResourceDetector, Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    # OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES, where set, win over our own name.
    resource = Resource.create({SERVICE_NAME: f"pdmesh-{service}"}).merge(OTELResourceDetector().detect())
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(exporter))
    return OtelTracing(provider)
