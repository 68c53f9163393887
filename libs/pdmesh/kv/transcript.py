"""A request as it moves between instances: its sampling parameters, its gateway, and all its tokens so far.

Little-endian: four bytes with the head's length, the head (a `Generation` without tokens, in msgpack), and the tokens
that have KV, prompt and output, four bytes each. Prompt tokens that sampling does not look at are zeros, as they are at
the decode instance.
"""

from __future__ import annotations

import array

import msgspec

from pdmesh.errors import ProtocolError
from pdmesh.wire.messages import Generation, pack_token_ids, unpack_token_ids

_DECODER = msgspec.msgpack.Decoder(Generation)


def pack_transcript(generation: Generation, token_ids: array.array[int]) -> bytes:
    """Return the transcript with these tokens. More tokens can be appended as `pack_token_ids` packs them."""
    head = msgspec.msgpack.encode(msgspec.structs.replace(generation, token_ids=b""))
    return len(head).to_bytes(4, "little") + head + pack_token_ids(token_ids)


def is_complete(transcript: bytes | bytearray, num_tokens: int) -> bool:
    """Whether a transcript has its head and exactly ``num_tokens`` tokens."""
    return len(transcript) > 4 and len(transcript) == 4 + int.from_bytes(transcript[:4], "little") + 4 * num_tokens


def unpack_transcript(transcript: bytes) -> tuple[Generation, array.array[int]]:
    """Decode the result of `pack_transcript`. Raises ProtocolError, and no other error, for other bytes."""
    end = 4 + int.from_bytes(transcript[:4], "little")
    if not 4 <= end <= len(transcript):
        raise ProtocolError(f"a transcript of {len(transcript)} bytes has a head of {end - 4}")
    try:
        generation = _DECODER.decode(memoryview(transcript)[4:end])
        token_ids = unpack_token_ids(transcript[end:])
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise ProtocolError(f"a malformed transcript: {error}") from error
    return generation, token_ids
