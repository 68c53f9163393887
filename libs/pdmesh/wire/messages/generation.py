"""A request as workers are given it: its tokens, how to draw more, and where they go."""

from __future__ import annotations

import array
import sys

import msgspec

from pdmesh.model import (
    Epoch,
    GatewayId,
    PrefixHashes,
    RequestId,
    SamplingParams,
)


def pack_token_ids(token_ids: list[int] | array.array[int]) -> bytes:
    """Token ids as little-endian int32, four bytes a token: 1M tokens decode without a million objects."""
    packed = array.array("i", token_ids)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def unpack_token_ids(packed: bytes) -> array.array[int]:
    """Inverse of `pack_token_ids`. Raises ValueError if ``packed`` is not whole tokens."""
    token_ids = array.array("i")
    token_ids.frombytes(packed)
    if sys.byteorder == "big":
        token_ids.byteswap()
    return token_ids


class Generation(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """All that a worker needs to run a request; the scheduler passes it on without looking inside the tokens.

    ``token_ids`` is the transcript: the client's prompt and, for a resumed request, the output tokens delivered
    before. ``params.max_tokens`` and ``min_tokens`` count from the client's prompt, not from here.
    """

    request_id: RequestId  # the gateway's own: never a client's, never used again, not to be guessed
    epoch: Epoch
    gateway_id: GatewayId
    token_address: str  # host:port of the gateway's Tokens stream
    token_ids: bytes  # see `pack_token_ids`
    num_prompt_tokens: int  # of them, the client's own; the rest are output tokens delivered before
    params: SamplingParams
    traceparent: str | None = None  # W3C trace context
    label: str = ""  # what its client calls it, for people to find it by; several requests may have the same
    arithmetic: str = ""  # class of the instance that drew the last token delivered before
    weights: str = ""  # identity of the weights that drew the tokens delivered before; empty: there are none
    prefix_root: bytes = b""  # what the hashes of its granules begin with; empty: no KV is reused or kept
    prefix: PrefixHashes = ()  # of all full granules of ``token_ids``, in order
    prefix_weights: str = ""  # identity of the weights that these are made for

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids) // 4

    @property
    def num_output_tokens(self) -> int:
        """Output tokens delivered before this epoch; the next one has this index."""
        return self.num_tokens - self.num_prompt_tokens

    @property
    def max_tokens_left(self) -> int:
        return self.params.max_tokens - self.num_output_tokens


class Prompt(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What an instance needs to compute a request's prompt, or to decode it after a hand-over.

    A receiver of KV gets a ``generation`` without tokens, unless sampling, drafts or lost KV need them. The transcript
    has ``num_context_tokens`` in any case.
    """

    generation: Generation
    num_context_tokens: int
    tail: bytes = b""  # packed tokens behind the last full granule, for a receiver that keeps the KV it generates
