"""Reading and decoding request bodies within limits."""

from __future__ import annotations

import json
import re
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import anyio
import anyio.lowlevel
import anyio.to_thread
import msgspec

from pdmesh.errors import RequestRejected
from pdmesh_gateway.http.encodings import inflater_of
from pdmesh_gateway.http.unknown import ignored_in_objects, known_fields
from pdmesh_gateway.limits import Upload

T = TypeVar("T")

#: Larger bodies are decoded on a thread in pieces of at most this size, because decoding one piece holds the
#: interpreter.
INLINE_BYTES = 64 * 1024

#: Depth to which larger values are cut into pieces: each level is read once more.
PIECE_DEPTH = 6

#: Limit of the blanks before a text's first character.
_MAX_BLANKS = 64

#: Bytes counted at a time, before other threads get their turn.
_COUNT_BYTES = 1024 * 1024

#: A surrogate pair of escapes, half of one, or another escape.
_ESCAPE = re.compile(
    rb"\\(?:u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|(?P<half>u[dD][89a-fA-F][0-9a-fA-F]{2})|.)",
    re.DOTALL,
)
#: First bytes of compressed data.
_MAGIC = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd"}

_PATH = re.compile(r" - at `\$\.?(?P<field>[^`.\[]*)(?P<rest>[^`]*)`$")


_decode_value = msgspec.json.Decoder().decode
_decode_array = msgspec.json.Decoder(list[msgspec.Raw]).decode
_decode_object = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode


class ClientGone(Exception):
    """Error raised when the client has closed its connection."""


async def receive_body(
    receive: Callable[[], Awaitable[Any]],
    upload: Upload,
    *,
    content_length: int | None,
    max_bytes: int,
    timeout_s: float,
    content_encoding: str | None = None,
) -> bytes:
    """Return the whole body, decompressed. Raises RequestRejected (400, 408, 413, 415, 429) and ClientGone."""
    inflater = inflater_of(content_encoding)
    if content_length is not None and content_length > max_bytes:
        raise _too_big(max_bytes)
    parts: list[bytes] = []
    upload.scope.deadline = anyio.current_time() + timeout_s
    with upload.scope:
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ClientGone
            received = message.get("body", b"")
            for part in (received,) if inflater is None else inflater.pieces(received):
                if upload.num_bytes + len(part) > max_bytes:
                    raise _too_big(max_bytes)
                upload.add(len(part))
                parts.append(part)
                if inflater is not None:
                    # A small compressed part may hold much.
                    await anyio.lowlevel.checkpoint()
            if not message.get("more_body", False):
                if inflater is not None:
                    inflater.check_end()
                return b"".join(parts)
    parts.clear()
    why = "before the server needed its memory for other requests" if upload.was_given_up else f"within {timeout_s:g} s"
    raise RequestRejected(f"The request body did not arrive {why}.", status=408, code="body_timeout")


def _too_big(max_bytes: int) -> RequestRejected:
    return RequestRejected(f"The request body is larger than {max_bytes} bytes.", status=413, code="body_too_large")


async def decode_body(kind: type[T], body: bytes, *, max_values: int) -> tuple[T, tuple[str, ...]]:
    """Decode a body to a struct; return the struct and the names of ignored fields.

    Half a surrogate pair, such as a text that was cut within an emoji, is read as U+FFFD. Raises RequestRejected naming
    the wrong field, or with status 413 if a body over `INLINE_BYTES` may hold more than ``max_values`` values.
    """
    if len(body) <= INLINE_BYTES:
        return _decode(kind, body)

    def decode() -> tuple[T, tuple[str, ...]]:
        if may_hold_more_values(body, max_values):
            raise RequestRejected(
                f"The request body contains more than {max_values} values.", status=413, code="too_many_values"
            )
        return _decode(kind, body)

    return await anyio.to_thread.run_sync(decode)


def _mended(decode: Callable[[bytes], Any], body: bytes) -> Any:
    """Decode a JSON text. If this fails, decode it again with U+FFFD in place of each half of a surrogate pair."""
    try:
        return decode(body)
    except msgspec.ValidationError:
        raise
    except msgspec.DecodeError:
        mended = _mend(body)
        if mended == body:
            raise
        return decode(mended)


def _mend(body: bytes) -> bytes:
    return _ESCAPE.sub(lambda escape: b"\\ufffd" if escape["half"] else escape[0], body)


def read_in_pieces(text: bytes | msgspec.Raw, *, most_bytes: int = INLINE_BYTES, depth: int = PIECE_DEPTH) -> Any:
    """Return the value of a JSON text, read in pieces of at most ``most_bytes``, or of values nested ``depth`` deep.

    Between two pieces other threads get their turn. Raises msgspec's errors for text that is not JSON.
    """
    if len(text) <= most_bytes or not depth:
        return _decode_value(text)
    match _first(text):
        case b"[":
            return [read_in_pieces(raw, most_bytes=most_bytes, depth=depth - 1) for raw in _decode_array(text)]
        case b"{":
            fields = _decode_object(text).items()
            return {key: read_in_pieces(raw, most_bytes=most_bytes, depth=depth - 1) for key, raw in fields}
        case _:
            return _decode_value(text)


def _first(text: bytes | msgspec.Raw) -> bytes:
    """Return the first byte of a JSON text that is no blank; empty if the text begins with `_MAX_BLANKS` blanks."""
    return bytes(memoryview(text)[:_MAX_BLANKS]).lstrip()[:1]


def may_hold_more_values(body: bytes, most: int) -> bool:
    """Return whether a JSON text may hold more than ``most`` values and keys.

    Each value but the first follows one of four characters. The count is too high if strings contain these.
    """
    num_marks = 0
    for start in range(0, len(body), _COUNT_BYTES):
        num_marks += sum(body.count(mark, start, start + _COUNT_BYTES) for mark in (b",", b":", b"[", b"{"))
        if num_marks >= most:
            return True
    return False


def _decode(kind: type[T], body: bytes) -> tuple[T, tuple[str, ...]]:
    ignored: tuple[str, ...] = ()
    try:
        try:
            fields = _fields(body)
        except msgspec.ValidationError:
            # A number is out of range. Decoding by the types names its field.
            fields = msgspec.json.decode(body, type=kind)
        try:
            request = msgspec.convert(fields, kind)
        except msgspec.ValidationError:
            if not isinstance(fields, dict):
                raise
            known, ignored = known_fields(fields, kind)
            request = msgspec.convert(known, kind)
        return request, ignored + ignored_in_objects(request)
    except msgspec.ValidationError as error:
        raise invalid_body(error) from None
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise _not_json(error, body) from None


def _fields(body: bytes) -> Any:
    """Return the value of a JSON text, with U+FFFD for half surrogates.

    NaN and Infinity are read in short texts. Raise DecodeError, ValueError or RecursionError if it is malformed, and
    ValidationError for a number out of range or a text beyond `INLINE_BYTES` that is no object.
    """
    if len(body) > INLINE_BYTES:
        # Only an object can be right. For any other value msgspec names its kind without reading the parts.
        return _mended(read_in_pieces, body) if body.lstrip()[:1] == b"{" else msgspec.json.decode(body, type=_Object)
    try:
        return _mended(_decode_value, body)
    except (msgspec.DecodeError, UnicodeDecodeError):
        if b"NaN" not in body and b"Infinity" not in body:
            raise
        # Python's own encoder writes NaN and Infinity, which are not JSON. They are read so that the field can be
        # named.
        value = json.loads(_mend(body))
        # Refuses halves of a surrogate pair, which Python's decoder accepts.
        msgspec.json.encode(value)
        return value


class _Object(msgspec.Struct):
    """An object with any fields."""


def _not_json(error: Exception, body: bytes) -> RequestRejected:
    compressed = next((name for magic, name in _MAGIC.items() if body.startswith(magic)), None)
    if not body.strip():
        why = "it is empty"
    elif compressed is not None:
        why = f"it is compressed with {compressed}, but has no `Content-Encoding` header"
    elif isinstance(error, UnicodeDecodeError):
        why = "it is not UTF-8"
    else:
        why = str(error)
    return RequestRejected(f"We could not parse the JSON body of your request: {why}", code="invalid_json")


def invalid_body(error: msgspec.ValidationError) -> RequestRejected:
    """Return msgspec's error in OpenAI's words, naming the field."""
    message = str(error)
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
