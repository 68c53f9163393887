"""Completion of JSON that was cut."""

from __future__ import annotations

import msgspec


def whole_object(text: str) -> bytes:
    """Return the JSON object that ``text`` is or begins, without incomplete parts.

    The result is an empty object if ``text`` begins no object.
    """
    given = text.encode("utf-8", "replace")
    for candidate in (given, *_closed(given)):
        try:
            if isinstance(msgspec.json.decode(candidate), dict):
                return candidate.strip()
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            pass
    return b"{}"


def _closed(text: bytes) -> tuple[bytes, bytes]:
    """Return two candidates for the completed text.

    The first is the whole text with its brackets closed, which is right if the text ends with a whole word or number.
    The second is only the part that is surely complete, closed.
    """
    closers = bytearray()
    # Length of the complete part, and the brackets that close it.
    end, closed = 0, b""
    is_key = in_string = escaped = False
    for i, byte in enumerate(text):
        if in_string:
            if escaped:
                escaped = False
            elif byte == 0x5C:  # backslash
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
        elif byte == 0x2C:
            # Before a comma the value is complete, also a number or a word.
            end, closed = i, bytes(reversed(closers))
            is_key = closers.endswith(b"}")
        elif byte == 0x3A:
            is_key = False
    return text + bytes(reversed(closers)), text[:end] + closed
