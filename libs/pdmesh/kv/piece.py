"""The fixed header of a piece, and the checks that come before anything else is believed of it.

Little-endian, 96 of `HEADER_BYTES` bytes used; the last sixteen are a seal that only services of the mesh can make
(`pdmesh.transport.seal`), so that a damaged or foreign header is told apart from a wrong one. The payload has a
checksum of its own, of the same secret, which the header holds.
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass
from enum import IntEnum

from pdmesh.errors import ProtocolError
from pdmesh.model import Epoch, RequestId
from pdmesh.transport.buffers import HEADER_BYTES
from pdmesh.transport.seal import SEAL_BYTES, MeshKey

_MAGIC = b"pdK2"  # the digit is the version
_FIELDS = struct.Struct("<4sB3xI16sQ5IQ2H3I")
_USED = _FIELDS.size + SEAL_BYTES
assert _USED <= HEADER_BYTES


class PieceKind(IntEnum):
    KV = 1  # blocks of one layer
    COMMIT = 2  # sender to receiver, after the last KV: the first token
    LANDED = 3  # receiver to sender: everything is in place
    ABORT = 4  # either way: the other side gave up


@dataclass(frozen=True, slots=True, kw_only=True)
class PieceHeader:
    """What a piece says of itself. Fields that its kind does not use are 0."""

    kind: PieceKind
    request_key: bytes  # see `request_key`
    epoch: Epoch
    capability: int
    chunk: int = 0
    layer: int = 0
    first_block: int = 0  # index into the request's block table, the same on both sides
    num_blocks: int = 0
    payload_bytes: int = 0
    checksum: int = 0  # of the payload: `MeshKey.checksum`
    head_start: int = 0  # the KV heads in the payload; today all of them
    num_heads: int = 0
    num_context_tokens: int = 0  # COMMIT: tokens whose KV was sent
    token_id: int = 0  # COMMIT: the first token, drawn by prefill
    token_index: int = 0  # COMMIT: its output index


def request_key(request_id: RequestId) -> bytes:
    """16 bytes that stand for a request id of any length."""
    return hashlib.blake2b(request_id.encode(), digest_size=16).digest()


def pack_header(header: PieceHeader, out: memoryview, key: MeshKey) -> None:
    """Write the sealed header into ``out``, which is `HEADER_BYTES` long."""
    _FIELDS.pack_into(
        out,
        0,
        _MAGIC,
        header.kind,
        header.epoch,
        header.request_key,
        header.capability,
        header.chunk,
        header.layer,
        header.first_block,
        header.num_blocks,
        header.payload_bytes,
        header.checksum,
        header.head_start,
        header.num_heads,
        header.num_context_tokens,
        header.token_id,
        header.token_index,
    )
    out[_FIELDS.size : _USED] = key.seal(out[: _FIELDS.size])


def unpack_header(data: memoryview | bytes, key: MeshKey) -> PieceHeader:
    """Inverse of `pack_header`. Raises ProtocolError, and nothing else, for anything else."""
    if len(data) < _USED:
        raise ProtocolError(f"a piece header of {len(data)} bytes")
    magic, kind, epoch, request, capability, *numbers = _FIELDS.unpack_from(data)
    if magic != _MAGIC:
        raise ProtocolError("not a piece of this version")
    if not key.opens(data[: _FIELDS.size], data[_FIELDS.size : _USED]):
        raise ProtocolError("a damaged piece header, or another mesh's")
    if kind not in _KINDS:
        raise ProtocolError(f"a piece of unknown kind {kind}")
    chunk, layer, first_block, num_blocks, payload_bytes, checksum, head_start, num_heads, *commit = numbers
    num_context_tokens, token_id, token_index = commit
    return PieceHeader(
        kind=PieceKind(kind),
        request_key=request,
        epoch=Epoch(epoch),
        capability=capability,
        chunk=chunk,
        layer=layer,
        first_block=first_block,
        num_blocks=num_blocks,
        payload_bytes=payload_bytes,
        checksum=checksum,
        head_start=head_start,
        num_heads=num_heads,
        num_context_tokens=num_context_tokens,
        token_id=token_id,
        token_index=token_index,
    )


_KINDS = frozenset(PieceKind)
