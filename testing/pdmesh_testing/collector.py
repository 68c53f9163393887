"""An OTLP collector that keeps the received spans, for tests."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator
from concurrent import futures
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)

SERVICE = "opentelemetry.proto.collector.trace.v1.TraceService"


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectedSpan:
    service: str
    name: str
    trace_id: str
    span_id: str
    #: Empty for a root span.
    parent_id: str
    start_ns: int
    end_ns: int
    is_error: bool
    attributes: dict[str, Any]
    events: tuple[str, ...]


@dataclass(slots=True)
class Collector:
    """Made by `collecting`."""

    endpoint: str = ""
    _spans: list[CollectedSpan] = field(default_factory=list[CollectedSpan])
    _arrived: threading.Condition = field(default_factory=threading.Condition)

    def wait_for(self, enough: Callable[[list[CollectedSpan]], bool], limit_s: float = 30.0) -> list[CollectedSpan]:
        """Wait for enough spans, and return all of them. Raises TimeoutError."""
        with self._arrived:
            if not self._arrived.wait_for(lambda: enough(self._spans), limit_s):
                raise TimeoutError(f"only these spans came: {[(span.service, span.name) for span in self._spans]}")
            return list(self._spans)

    def _export(self, request: ExportTraceServiceRequest, _context: object) -> ExportTraceServiceResponse:
        with self._arrived:
            self._spans += _spans(request)
            self._arrived.notify_all()
        return ExportTraceServiceResponse()


@contextmanager
def collecting() -> Generator[Collector]:
    """Run a collector that listens within the block."""
    collector = Collector()
    handler = grpc.unary_unary_rpc_method_handler(
        collector._export,
        request_deserializer=ExportTraceServiceRequest.FromString,
        response_serializer=ExportTraceServiceResponse.SerializeToString,
    )
    server = grpc.server(futures.ThreadPoolExecutor(max_workers=1))
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, {"Export": handler}),))
    collector.endpoint = f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        yield collector
    finally:
        server.stop(grace=None).wait()


def _spans(request: ExportTraceServiceRequest) -> list[CollectedSpan]:
    return [
        CollectedSpan(
            service=next(item.value.string_value for item in of.resource.attributes if item.key == "service.name"),
            name=span.name,
            trace_id=span.trace_id.hex(),
            span_id=span.span_id.hex(),
            parent_id=span.parent_span_id.hex(),
            start_ns=span.start_time_unix_nano,
            end_ns=span.end_time_unix_nano,
            is_error=span.status.code == span.status.STATUS_CODE_ERROR,
            attributes={item.key: _value(item.value) for item in span.attributes},
            events=tuple(event.name for event in span.events),
        )
        for of in request.resource_spans
        for scope in of.scope_spans
        for span in scope.spans
    ]


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    return [_value(item) for item in value.array_value.values] if kind == "array_value" else getattr(value, kind)
