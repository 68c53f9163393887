"""The fixed header of a piece, and the checks that come before any of its fields is believed.

The header is little-endian: 120 bytes, and a seal that only services of the mesh can make (`pdmesh.transport.seal`).
The seal tells a damaged or foreign header from one with wrong fields. The header is sent twice, because a receiver
cannot ask again for a piece whose header it does not believe. The header contains the check that opens the payload.
"""

from __future__ import annotations

import hashlib
import struct
from enum import IntEnum
from typing import NamedTuple

from pdmesh.errors import ProtocolError
from pdmesh.kv_layout import IndexRange, KvPart
from pdmesh.model import Epoch, RequestId
from pdmesh.transport.buffers import HEADER_BYTES
from pdmesh.transport.seal import CHECK_BYTES, SEAL_BYTES, MeshKey

_MAGIC = b"pdK9"
_FIELDS = struct.Struct(f"<4sB?HI16sQI2HI2I4HI{CHECK_BYTES}s3I")
_COPY_BYTES = _FIELDS.size + SEAL_BYTES
assert 2 * _COPY_BYTES <= HEADER_BYTES


NO_CHECK = bytes(CHECK_BYTES)
NO_PART = KvPart(IndexRange(0, 0), IndexRange(0, 0), IndexRange(0, 0))


class PieceKind(IntEnum):
    """The kind of a message between two instances.

    * KV: blocks, in one layer or the same ones in several: all blocks of a layer, then all blocks of the next.
    * COMMIT: source to destination, beside its last KV: the part it sent, and the first token if it drew one.
    * LANDED: destination to each source: everything is in place.
    * ABORT: either way: the other side has ended the transfer.
    * HELLO: member of a prefill group to another: KV may be sent here. WELCOME: the same, in answer to HELLO.
    * TRANSCRIPT: for a move: bytes of the request's parameters and tokens.
    * AGAIN: to the sender of KV: this part of the KV came damaged.
    * PEER_READ: as KV, between instances on one host: where the blocks may be read (`pdmesh.kv.peer_reads`).
    * NO_PEER_READS: as AGAIN: this part cannot be read here; send it, and later ones, as bytes.
    * PROBE: without a request: tests whether a peer is reachable (`pdmesh.kv.probes`).
    * QUERY: the owner of a spread context to a shard holder, which replies with ANSWER (`pdmesh.kv.parts`).
    * TOKENS: the owner of a spread context to the instance that computes a lost range again.
    """

    KV = 1
    COMMIT = 2
    LANDED = 3
    ABORT = 4
    HELLO = 5
    WELCOME = 6
    TRANSCRIPT = 7
    AGAIN = 8
    PEER_READ = 9
    NO_PEER_READS = 10
    QUERY = 12
    ANSWER = 13
    TOKENS = 14
    PROBE = 11


class KvDestination(NamedTuple):
    """A destination of a copy: its data address, and the part of the request's KV that goes there."""

    address: bytes
    part: KvPart


class FirstToken(NamedTuple):
    """The next token of a request and its output index, which a COMMIT brings."""

    token_id: int
    token_index: int


class PieceHeader(NamedTuple):
    """The description of a piece. Fields that its kind does not use are 0.

    A tuple, because every piece makes several: a frozen dataclass takes 1 µs more to make and 2 to change.

    * ``request_key``: `request_key`, or `pdmesh.kv.exchange.exchange_key` between members of a group.
    * ``weights``: `weights_word` of the sender. KV of other weights is dropped.
    * ``source``, ``destination``: indices among the transfer's sources and destinations, or among a group's members.
    * ``num_members``: for KV between members of a group, and AGAIN: the number of members that the KV is sent to.
    * ``chunk``: for QUERY and ANSWER the question's number; for COMMIT the first block in layers with a window.
    * ``part``: for KV, PEER_READ and AGAIN the blocks and layers of the payload; for COMMIT the part that this source
      sends. For TRANSCRIPT, TOKENS, QUERY and ANSWER, ``blocks`` is a range of bytes. For QUERY, ``layers`` is the
      layer asked for.
    * ``check``: opens the payload (`MeshKey.close_payload`).
    * ``num_context_tokens``: for COMMIT tokens of the request's context; for QUERY and ANSWER the bytes of all pieces;
      for TOKENS the number of the client's own prompt tokens.
    * ``has_token``, ``token_id``, ``token_index``: for COMMIT the first token, if drawn here, and its output index.
    """

    kind: PieceKind
    request_key: bytes
    epoch: Epoch
    capability: int
    weights: int = 0
    source: int = 0
    destination: int = 0
    num_members: int = 0
    chunk: int = 0
    part: KvPart = NO_PART
    payload_bytes: int = 0
    check: bytes = NO_CHECK
    num_context_tokens: int = 0
    has_token: bool = False
    token_id: int = 0
    token_index: int = 0


def request_key(request_id: RequestId) -> bytes:
    """Return 16 bytes that identify a request id of any length."""
    return hashlib.blake2b(request_id.encode(), digest_size=16).digest()


def weights_word(weights: str) -> int:
    """Return 32 bits that stand for a weights identity; 0 for an unknown one."""
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
    """Decode the result of `pack_header`. Raises ProtocolError, and no other error, for other bytes."""
    if len(data) < 2 * _COPY_BYTES:
        raise ProtocolError(f"a piece header has {len(data)} bytes")
    fields = key.open(data[:_COPY_BYTES]) or key.open(data[_COPY_BYTES : 2 * _COPY_BYTES])
    if fields is None:
        raise ProtocolError("a piece header is damaged or from another mesh")
    magic, kind, has_token, num_members, epoch, request, capability, weights, *numbers = _FIELDS.unpack(fields)
    if magic != _MAGIC:
        raise ProtocolError("a piece is of another version of pdmesh")
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
