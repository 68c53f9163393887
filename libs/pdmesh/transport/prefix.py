"""Messages of one piece, or of several small ones, each behind a prefix: UCX does not tell how long a message is.

prefix | header | payload | prefix | header | payload | …
"""

from __future__ import annotations

import struct
from typing import NamedTuple

from pdmesh.transport.buffers import HEADER_BYTES, PieceBuffer

_PREFIX = struct.Struct("<4sIIQ")  # magic, payload bytes, bytes of the message that follow, number
_MAGIC = b"pdP3"

PREFIX_BYTES = _PREFIX.size
#: Bytes of a piece before its payload.
HEAD_BYTES = PREFIX_BYTES + HEADER_BYTES


class FoundPiece(NamedTuple):
    """A piece in a message."""

    start: int
    payload_bytes: int
    rest_bytes: int  # of the message, behind it
    number: int  # of the message

    @property
    def end(self) -> int:
        return self.start + HEAD_BYTES + self.payload_bytes


def number_message(buffer: PieceBuffer, payload_bytes: int, number: int) -> int:
    """Write the prefixes of the pieces in a buffer, the last of which has a payload of so many bytes.

    Return the bytes of the message.
    """
    pieces = buffer.pieces(payload_bytes)
    end = pieces[-1][0] + HEAD_BYTES + payload_bytes
    for start, size in pieces:
        number_piece(buffer.memory, FoundPiece(start, size, end - start - HEAD_BYTES - size, number))
    return end


def number_piece(memory: memoryview, piece: FoundPiece) -> None:
    """Write the prefix of a piece."""
    start, *fields = piece
    _PREFIX.pack_into(memory, start, _MAGIC, *fields)


def find_piece(memory: memoryview, start: int = 0) -> FoundPiece | None:
    """Return the piece that begins there; None if there is none, or it does not fit."""
    if start + HEAD_BYTES > len(memory):
        return None
    magic, payload_bytes, rest_bytes, number = _PREFIX.unpack_from(memory, start)
    found = FoundPiece(start, payload_bytes, rest_bytes, number)
    return found if magic == _MAGIC and found.end + rest_bytes <= len(memory) else None
