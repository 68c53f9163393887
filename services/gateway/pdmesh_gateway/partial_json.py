"""JSON that was cut: what there is of it, as a whole value."""

from __future__ import annotations

import msgspec


def whole_object(text: str) -> bytes:
    """The JSON object that ``text`` is or begins, without what is not whole in it; an empty one if it is no object."""
    given = text.encode("utf-8", "replace")
    for candidate in (given, *_closed(given)):
        try:
            if isinstance(msgspec.json.decode(candidate), dict):
                return candidate.strip()
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            pass
    return b"{}"


def _closed(text: bytes) -> tuple[bytes, bytes]:
    """The text with its brackets closed: all of it, should it end with a whole word or number, and what is surely whole
    of it.
    """
    closers = bytearray()
    end, closed = 0, b""  # what is whole: so much of the text, and what closes it
    is_key = in_string = escaped = False
    for i, byte in enumerate(text):
        if in_string:
            if escaped:
                escaped = False
            elif byte == 0x5C:  # a backslash
                escaped = True
            elif byte == 0x22:
                in_string = False
                if not is_key:
                    end, closed = i + 1, bytes(reversed(closers))
        elif byte == 0x22:
            in_string = True
        elif byte in b"{[":
            closers += b"}" if byte == 0x7B else b"]"
            is_key = byte == 0x7B
            end, closed = i + 1, bytes(reversed(closers))
        elif byte in b"}]":
            if not closers:
                return text[:i], b""
            del closers[-1]
            is_key = False
            end, closed = i + 1, bytes(reversed(closers))
        elif byte == 0x2C:  # a comma: what came before it is whole, also a number or a word
            end, closed = i, bytes(reversed(closers))
            is_key = closers.endswith(b"}")
        elif byte == 0x3A:
            is_key = False
    return text + bytes(reversed(closers)), text[:end] + closed
