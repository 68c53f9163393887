"""Messages of one piece or several small ones. Each piece has a prefix, because UCX does not report a message's length.

prefix | header | payload | prefix | header | payload | …
"""

from __future__ import annotations

import struct
from typing import NamedTuple

from pdmesh.transport.buffers import HEADER_BYTES, PieceBuffer

# Magic, payload bytes, following bytes of the message, number.
_PREFIX = struct.Struct("<4sIIQ")
_MAGIC = b"pdP3"

PREFIX_BYTES = _PREFIX.size
#: Bytes of a piece before its payload: prefix and header.
HEAD_BYTES = PREFIX_BYTES + HEADER_BYTES


class FoundPiece(NamedTuple):
    """A piece in message ``number``. ``rest_bytes`` of the message follow the piece."""

    start: int
    payload_bytes: int
    rest_bytes: int
    number: int

    @property
    def end(self) -> int:
        return self.start + HEAD_BYTES + self.payload_bytes


def number_message(buffer: PieceBuffer, payload_bytes: int, number: int) -> int:
    """Write the prefixes of a buffer's pieces, the last with ``payload_bytes``. Return the length of the message."""
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
    """Return the piece that begins at ``start``; None if there is none, or its message exceeds ``memory``."""
    if start + HEAD_BYTES > len(memory):
        return None
    magic, payload_bytes, rest_bytes, number = _PREFIX.unpack_from(memory, start)
    found = FoundPiece(start, payload_bytes, rest_bytes, number)
    return found if magic == _MAGIC and found.end + rest_bytes <= len(memory) else None
