"""Failures that nobody foresaw: bugs of ours and of libraries, whatever they raise.

At either edge one becomes an error in the shape of all others, with the request's id, is logged once with its
traceback, and counted. It is the failure of one request: other requests, and the gateway, go on.
"""

from __future__ import annotations

import asyncio

import structlog

from pdmesh.errors import RequestRejected, leaves
from pdmesh_gateway.gateway_metrics import GatewayMetrics

log = structlog.get_logger()

#: What an edge catches. A library may raise a bare CancelledError where nobody was cancelled (grpc.aio does).
UNFORESEEN = (Exception, BaseExceptionGroup, asyncio.CancelledError)


def failure_of(
    error: BaseException, metrics: GatewayMetrics, *, where: str, request_id: str, label: str = ""
) -> RequestRejected:
    """What the client hears of an error. Raises it again if it is the cancellation of our own task."""
    task = asyncio.current_task()
    if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
        raise error
    for leaf in leaves(error):
        if isinstance(leaf, RequestRejected):
            return leaf
    log.error("request failed", where=where, request_id=request_id, label=label, exc_info=error)
    metrics.failed(where, type(error).__name__)
    return internal_error(request_id)


def internal_error(request_id: str) -> RequestRejected:
    """The log has the details, the client does not."""
    return RequestRejected(
        f"Internal server error. See the server's log for request {request_id}.",
        status=500,
        code="internal_error",
    )
