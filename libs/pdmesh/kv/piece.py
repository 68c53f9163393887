"""The fixed header of a piece, and the checks that come before anything else in it is believed.

Little-endian, 120 bytes, and a seal that only services of the mesh can make (`pdmesh.transport.seal`), so that a
damaged or foreign header is told apart from a wrong one. The header is sent twice, because a receiver cannot ask again
for a piece whose header it does not believe. What opens the payload is in the header.
"""

from __future__ import annotations

import hashlib
import struct
from enum import IntEnum
from typing import NamedTuple

from pdmesh.errors import ProtocolError
from pdmesh.model import Epoch, IndexRange, KvPart, RequestId
from pdmesh.transport.buffers import HEADER_BYTES
from pdmesh.transport.seal import CHECK_BYTES, SEAL_BYTES, MeshKey

_MAGIC = b"pdK9"  # the digit is the version
_FIELDS = struct.Struct(f"<4sB?HI16sQI2HI2I4HI{CHECK_BYTES}s3I")
_COPY_BYTES = _FIELDS.size + SEAL_BYTES
assert 2 * _COPY_BYTES <= HEADER_BYTES


NO_CHECK = bytes(CHECK_BYTES)
NO_PART = KvPart(IndexRange(0, 0), IndexRange(0, 0), IndexRange(0, 0))


class PieceKind(IntEnum):
    """The kind of a message between two instances."""

    KV = 1  # blocks, in one layer or the same ones in several: all of one layer, then those of the next
    COMMIT = 2  # source to destination, beside its last KV: what it sent, and the first token if it drew it
    LANDED = 3  # destination to each source: everything is in place
    ABORT = 4  # either way: the other side gave up
    HELLO = 5  # one member of a prefill group to another: KV may be sent here
    WELCOME = 6  # the same, in answer to it
    TRANSCRIPT = 7  # of a move: bytes of what the request is, and has drawn
    AGAIN = 8  # to the sender of KV: this part of it came damaged
    PEER_READ = 9  # as KV, between instances on one host: where the blocks may be read (`pdmesh.kv.peer_reads`)
    NO_PEER_READS = 10  # as AGAIN: this part cannot be read here; send it, and what follows, as bytes
    QUERY = 12  # a home's question to a member of a context that is spread (`pdmesh.kv.parts`)
    ANSWER = 13
    TOKENS = 14  # a home's, of a range that was lost, to who computes it again
    PROBE = 11  # of no request: whether a peer is reached (`pdmesh.kv.probes`)


class KvDestination(NamedTuple):
    """A destination of a copy: its data address, and the part of the request's KV that goes there."""

    address: bytes
    part: KvPart


class FirstToken(NamedTuple):
    """The next token of a request, which a COMMIT brings."""

    token_id: int
    token_index: int


class PieceHeader(NamedTuple):
    """What a piece says about itself. Fields that its kind does not use are 0.

    A tuple, because every piece makes several: a frozen dataclass takes 1 µs more to make and 2 to change.
    """

    kind: PieceKind
    request_key: bytes  # see `request_key`; between members of a group `pdmesh.kv.exchange.exchange_key`
    epoch: Epoch
    capability: int
    weights: int = 0  # `weights_word` of the sender's: KV of other weights is of no use
    source: int = 0  # which of the transfer's sources and destinations, or of a group's members, this is between
    destination: int = 0
    num_members: int = 0  # KV between members of a group, and AGAIN: so many are sent it by the one that computed it
    chunk: int = 0  # QUERY, ANSWER: the question's number; COMMIT: in layers with a window, the first block
    part: KvPart = NO_PART  # KV, PEER_READ, AGAIN: what the payload is, or was; COMMIT: all that this source has sent;
    # TRANSCRIPT, TOKENS, QUERY, ANSWER: ``blocks`` are bytes; QUERY: ``layers`` is the one that is asked for
    payload_bytes: int = 0
    check: bytes = NO_CHECK  # of the payload: `MeshKey.close_payload`
    num_context_tokens: int = 0  # COMMIT: tokens of the request's context; QUERY, ANSWER: its bytes, in all pieces
    has_token: bool = False  # COMMIT: this source drew the first token
    token_id: int = 0
    token_index: int = 0  # its output index


def request_key(request_id: RequestId) -> bytes:
    """Return 16 bytes that identify a request id of any length."""
    return hashlib.blake2b(request_id.encode(), digest_size=16).digest()


def weights_word(weights: str) -> int:
    """Return 32 bits that stand for a weights identity; 0 for one that is not known."""
    if not weights:
        return 0
    return int.from_bytes(hashlib.blake2b(weights.encode(), digest_size=4, person=b"pdmesh weights").digest(), "little")


def pack_header(header: PieceHeader, out: memoryview, key: MeshKey) -> None:
    """Write the sealed header into ``out``, which is `HEADER_BYTES` long."""
    fields = _FIELDS.pack(
        _MAGIC,
        header.kind,
        header.has_token,
        header.num_members,
        header.epoch,
        header.request_key,
        header.capability,
        header.weights,
        header.source,
        header.destination,
        header.chunk,
        *header.part.blocks,
        *header.part.layers,
        *header.part.heads,
        header.payload_bytes,
        header.check,
        header.num_context_tokens,
        header.token_id,
        header.token_index,
    )
    out[: 2 * _COPY_BYTES] = 2 * key.seal(fields)


def unpack_header(data: memoryview | bytes, key: MeshKey) -> PieceHeader:
    """Decode what `pack_header` wrote. Raises ProtocolError, and nothing else, for anything else."""
    if len(data) < 2 * _COPY_BYTES:
        raise ProtocolError(f"a piece header of {len(data)} bytes")
    fields = key.open(data[:_COPY_BYTES]) or key.open(data[_COPY_BYTES : 2 * _COPY_BYTES])
    if fields is None:
        raise ProtocolError("a damaged piece header, or another mesh's")
    magic, kind, has_token, num_members, epoch, request, capability, weights, *numbers = _FIELDS.unpack(fields)
    if magic != _MAGIC:
        raise ProtocolError("not a piece of this version")
    if (known := _KINDS.get(kind)) is None:
        raise ProtocolError(f"a piece of unknown kind {kind}")
    source, destination, chunk, *spans = numbers[:9]
    payload_bytes, check, num_context_tokens, token_id, token_index = numbers[9:]
    return PieceHeader(
        kind=known,
        request_key=request,
        epoch=Epoch(epoch),
        capability=capability,
        weights=weights,
        source=source,
        destination=destination,
        num_members=num_members,
        chunk=chunk,
        part=KvPart(IndexRange(*spans[:2]), IndexRange(*spans[2:4]), IndexRange(*spans[4:])),
        payload_bytes=payload_bytes,
        check=check,
        num_context_tokens=num_context_tokens,
        has_token=has_token,
        token_id=token_id,
        token_index=token_index,
    )


_KINDS = {kind.value: kind for kind in PieceKind}
