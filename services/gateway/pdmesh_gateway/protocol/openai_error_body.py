"""What clients get of a request that failed."""

from __future__ import annotations

import msgspec


class ErrorBody(msgspec.Struct, kw_only=True):
    """What went wrong, in a sentence; ``param`` names the field, ``code`` the case for programs."""

    message: str
    type: str
    param: str | None = None
    code: str | int | None = None


class ErrorResponse(msgspec.Struct):
    """The body of every response of 400 and more, and the last event of a stream that failed."""

    error: ErrorBody
