"""Errors in OpenAI's shape, and the definition of an API's shape of errors."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from pdmesh.errors import RequestRejected
from pdmesh_gateway.http.encodings import ACCEPTED


class ErrorBody(msgspec.Struct, kw_only=True):
    """An error: ``message`` is a sentence, ``param`` names the field, and ``code`` names the case for programs."""

    message: str
    type: str
    param: str | None = None
    code: str | int | None = None


class ErrorResponse(msgspec.Struct):
    """Body of every response with status 400 or more, and last event of a stream that failed."""

    error: ErrorBody


def error_json(error: RequestRejected) -> bytes:
    """Return the body of an error response, which is also the data of an error event."""
    body = ErrorBody(message=error.message, type=error.type, param=error.param, code=error.code)
    return msgspec.json.encode(ErrorResponse(body))


def error_event(error: RequestRejected) -> bytes:
    """Return the last event of a stream that failed; no ``[DONE]`` follows."""
    return b"data: " + error_json(error) + b"\n\n"


def error_headers(error: RequestRejected) -> list[tuple[bytes, bytes]]:
    """Return the headers of an error.

    * ``Retry-After`` in whole seconds, at least 1, if the error names a time.
    * ``Accept-Encoding`` for an unsupported encoding.
    * ``WWW-Authenticate`` for status 401.
    """
    headers: list[tuple[bytes, bytes]] = []
    if error.retry_after_s is not None:
        headers.append((b"retry-after", str(max(1, math.ceil(error.retry_after_s))).encode()))
    if error.code == "unsupported_content_encoding":
        headers.append((b"accept-encoding", ACCEPTED))
    if error.status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    return headers


@dataclass(frozen=True, slots=True)
class ErrorShape:
    """Form of an API's errors: the status, the body of an error with the request's id, and the headers that hold the
    id.
    """

    status: Callable[[RequestRejected], int]
    body: Callable[[RequestRejected, str], bytes]
    id_headers: tuple[bytes, ...]


OPENAI_ERRORS = ErrorShape(
    status=lambda error: error.status,
    body=lambda error, _request_id: error_json(error),
    id_headers=(b"x-request-id",),
)
