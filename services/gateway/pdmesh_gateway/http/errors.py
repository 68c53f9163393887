"""Errors in OpenAI's shape."""

from __future__ import annotations

import math

import msgspec

from pdmesh.errors import RequestRejected
from pdmesh_gateway.protocol import ErrorBody, ErrorResponse


def error_json(error: RequestRejected) -> bytes:
    """The body of an error response, and the data of an error event."""
    body = ErrorBody(message=error.message, type=error.type, param=error.param, code=error.code)
    return msgspec.json.encode(ErrorResponse(body))


def error_headers(error: RequestRejected) -> list[tuple[bytes, bytes]]:
    """What goes beside the body: ``Retry-After`` in whole seconds, at least 1, and how to authenticate with a 401."""
    headers: list[tuple[bytes, bytes]] = []
    if error.retry_after_s is not None:
        headers.append((b"retry-after", str(max(1, math.ceil(error.retry_after_s))).encode()))
    if error.status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    return headers
