"""Reading and decoding request bodies within limits."""

from __future__ import annotations

import json
import re
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import anyio
import anyio.to_thread
import msgspec

from pdmesh.errors import RequestRejected

T = TypeVar("T")

#: Larger bodies are decoded on a thread.
INLINE_BYTES = 64 * 1024

_UNKNOWN_FIELD = re.compile(r"Object contains unknown field `(?P<name>[^`]*)`(?: - at `\$\.?(?P<path>.*)`)?$")
_PATH = re.compile(r" - at `\$\.?(?P<field>[^`.\[]*)(?P<rest>[^`]*)`$")


class ClientGone(Exception):
    """The client closed its connection."""


async def read_body(
    receive: Callable[[], Awaitable[Any]], *, content_length: int | None, max_bytes: int, timeout_s: float
) -> bytes:
    """The whole body. Raises RequestRejected (413, 408) and ClientGone."""
    if content_length is not None and content_length > max_bytes:
        raise _too_big(max_bytes)
    parts: list[bytes] = []
    num_bytes = 0
    try:
        with anyio.fail_after(timeout_s):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ClientGone
                part = message.get("body", b"")
                num_bytes += len(part)
                if num_bytes > max_bytes:
                    raise _too_big(max_bytes)
                parts.append(part)
                if not message.get("more_body", False):
                    return b"".join(parts)
    except TimeoutError:
        raise RequestRejected(
            f"The request body did not arrive within {timeout_s:g} s.", status=408, code="body_timeout"
        ) from None


def _too_big(max_bytes: int) -> RequestRejected:
    return RequestRejected(f"The request body is larger than {max_bytes} bytes.", status=413, code="body_too_large")


async def decode_body(decoder: msgspec.json.Decoder[T], body: bytes) -> T:
    """A body as its struct. Raises RequestRejected naming the field and what is wrong with it."""
    if len(body) <= INLINE_BYTES:
        return _decode(decoder, body)
    return await anyio.to_thread.run_sync(_decode, decoder, body)


def _decode(decoder: msgspec.json.Decoder[T], body: bytes) -> T:
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        raise invalid_body(error) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        if b"NaN" not in body and b"Infinity" not in body:
            raise _not_json(error) from None
    # Python's own encoder writes NaN and Infinity, which are not JSON: read them, so that the field can be named.
    try:
        return msgspec.convert(json.loads(body), decoder.type)
    except msgspec.ValidationError as error:
        raise invalid_body(error) from None
    except (ValueError, RecursionError) as error:
        raise _not_json(error) from None


def _not_json(error: Exception) -> RequestRejected:
    return RequestRejected(f"We could not parse the JSON body of your request: {error}", code="invalid_json")


def invalid_body(error: msgspec.ValidationError) -> RequestRejected:
    """msgspec's complaint as OpenAI words it."""
    message = str(error)
    unknown = _UNKNOWN_FIELD.search(message)
    if unknown is not None:
        name = ".".join(filter(None, (unknown["path"], unknown["name"])))
        return RequestRejected(f"Unrecognized request argument supplied: {name}", param=name, code="unknown_parameter")
    path = _PATH.search(message)
    if path is None:
        missing = re.search(r"missing required field `([^`]*)`", message)
        return RequestRejected(
            f"Invalid request: {message}",
            param=missing[1] if missing else None,
            code="missing_required_parameter" if missing else "invalid_type",
        )
    field = path["field"] + path["rest"]
    return RequestRejected(
        f"Invalid value for `{field}`: {message[: path.start()]}", param=path["field"] or None, code="invalid_type"
    )
