"""Errors in Anthropic's shape, with Anthropic's types and statuses."""

from __future__ import annotations

import msgspec

from pdmesh.errors import RequestRejected
from pdmesh_gateway.http.openai_errors import ErrorShape

#: The server has no room: not the client's own limit, which is a 429.
OVERLOADED = 529

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    504: "timeout_error",
    OVERLOADED: "overloaded_error",
}


class MessagesError(msgspec.Struct, kw_only=True):
    """An error; ``type`` is Anthropic's word for it."""

    type: str
    message: str


class MessagesErrorResponse(msgspec.Struct, kw_only=True):
    """Body of every response with status 400 or more, and last event of a stream that failed."""

    type: str = "error"
    error: MessagesError
    request_id: str


def status_of(error: RequestRejected) -> int:
    """Return the status for Anthropic's clients: 529, after which they retry, for lack of room or of instances."""
    return OVERLOADED if error.status == 503 or error.code == "overloaded" else error.status


def error_body(error: RequestRejected, request_id: str) -> bytes:
    """Return the body of an error response, which is also the data of an error event."""
    kind = _TYPES.get(status_of(error), "invalid_request_error" if error.status < 500 else "api_error")
    shape = MessagesErrorResponse(error=MessagesError(type=kind, message=error.message), request_id=request_id)
    return msgspec.json.encode(shape)


ANTHROPIC_ERRORS = ErrorShape(status=status_of, body=error_body, id_headers=(b"x-request-id", b"request-id"))
