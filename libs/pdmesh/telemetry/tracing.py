"""OpenTelemetry spans that follow a request through the services. Without an endpoint nothing is imported or done.

The trace context travels as a W3C ``traceparent`` string: in ``Generation.traceparent`` between our services, in the
header of the same name at the edge.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Protocol

from pdmesh.config import TelemetryConfig

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SpanExporter

Attribute = str | bool | int | float


class Tracing(Protocol):
    """What a service traces with. Spans carry sizes and ids, never a prompt's text."""

    def span(self, name: str, traceparent: str | None = None, **attributes: Attribute) -> AbstractContextManager[None]:
        """A span that is current inside the block; a child of ``traceparent``, else of the current span.

        An exception that leaves the block marks it as failed.
        """
        ...

    def record(self, name: str, traceparent: str | None, start_s: float, end_s: float, **attributes: Attribute) -> None:
        """A span that is over: Unix times in seconds."""
        ...

    def traceparent(self) -> str | None:
        """The current span, to be handed on; None if there is none."""
        ...

    def close(self) -> None:
        """Export what is left. Blocking, for a few seconds at most."""
        ...


class NoTracing:
    """Tracing that is off."""

    def span(self, name: str, traceparent: str | None = None, **attributes: Attribute) -> AbstractContextManager[None]:
        return nullcontext()

    def record(self, name: str, traceparent: str | None, start_s: float, end_s: float, **attributes: Attribute) -> None:
        return

    def traceparent(self) -> str | None:
        return None

    def close(self) -> None:
        return


class OtelTracing:
    """Tracing into a tracer provider of our own; OpenTelemetry's global one is left alone."""

    def __init__(self, provider: TracerProvider) -> None:
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._provider = provider
        self._tracer = provider.get_tracer("pdmesh")
        self._propagator = TraceContextTextMapPropagator()

    @contextmanager
    def span(self, name: str, traceparent: str | None = None, **attributes: Attribute) -> Iterator[None]:
        with self._tracer.start_as_current_span(name, context=self._parent(traceparent), attributes=attributes):
            yield

    def record(self, name: str, traceparent: str | None, start_s: float, end_s: float, **attributes: Attribute) -> None:
        span = self._tracer.start_span(
            name, context=self._parent(traceparent), attributes=attributes, start_time=round(start_s * 1e9)
        )
        span.end(end_time=round(end_s * 1e9))

    def traceparent(self) -> str | None:
        carrier: dict[str, str] = {}
        self._propagator.inject(carrier)
        return carrier.get("traceparent")

    def close(self) -> None:
        self._provider.shutdown()

    def _parent(self, traceparent: str | None) -> Context | None:
        """The context of a remote parent. A malformed one counts as none, as W3C Trace Context asks."""
        return None if traceparent is None else self._propagator.extract({"traceparent": traceparent})


def configure_tracing(service: str, config: TelemetryConfig) -> Tracing:
    """Tracing for a process; off unless an OTLP endpoint is configured."""
    if config.otlp_endpoint is None:
        return NoTracing()
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter

    return exporting(service, OTLPSpanExporter(endpoint=config.otlp_endpoint))


def exporting(service: str, exporter: SpanExporter) -> OtelTracing:
    """Tracing that hands its spans to ``exporter`` in batches, on a thread of its own."""
    from opentelemetry.sdk.resources import SERVICE_NAME, OTELResourceDetector, Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    # OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES, where set, win over our own name.
    resource = Resource.create({SERVICE_NAME: f"pdmesh-{service}"}).merge(OTELResourceDetector().detect())
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(exporter))
    return OtelTracing(provider)
