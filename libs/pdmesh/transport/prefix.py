"""The prefix of each piece in its buffer: neither UCX nor memory tells how long a received message is."""

from __future__ import annotations

import struct

from pdmesh.transport.buffers import HEADER_BYTES

_PREFIX = struct.Struct("<4sIQ")  # magic, payload bytes, number
_MAGIC = b"pdP2"

PREFIX_BYTES = _PREFIX.size
#: Bytes of a piece before its payload.
HEAD_BYTES = PREFIX_BYTES + HEADER_BYTES


def number_piece(memory: memoryview, payload_bytes: int, number: int) -> None:
    """Write the prefix of the piece in a buffer."""
    _PREFIX.pack_into(memory, 0, _MAGIC, payload_bytes, number)


def numbered(memory: memoryview) -> tuple[int, int] | None:
    """Return (payload bytes, number) of the piece in a buffer; None if there is none."""
    magic, payload_bytes, number = _PREFIX.unpack_from(memory)
    return (payload_bytes, number) if magic == _MAGIC else None
