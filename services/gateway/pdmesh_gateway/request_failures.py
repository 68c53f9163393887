"""Unexpected failures of requests: bugs of pdmesh and of libraries.

Both edges turn such a failure into an error in the usual shape, with the request's id. The failure is logged once with
its traceback, and counted. Only its request fails: other requests, and the gateway, continue.
"""

from __future__ import annotations

import asyncio

import structlog

from pdmesh.errors import RequestRejected, leaves
from pdmesh_gateway.gateway_metrics import GatewayMetrics

log = structlog.get_logger()

#: Exceptions that an edge catches. grpc.aio raises a bare CancelledError where no task was cancelled.
UNFORESEEN = (Exception, BaseExceptionGroup, asyncio.CancelledError)


def failure_of(
    error: BaseException, metrics: GatewayMetrics, *, where: str, request_id: str, label: str = ""
) -> RequestRejected:
    """Return the error for the client, and log an unexpected one. Reraises the cancellation of the current task.

    A RequestRejected within an exception group is returned itself.
    """
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
    """Return the client's error for an unexpected failure. Only the log has the details."""
    return RequestRejected(
        f"Internal server error. See the server's log for request {request_id}.",
        status=500,
        code="internal_error",
    )
