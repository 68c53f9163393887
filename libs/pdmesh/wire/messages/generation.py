"""A request as workers receive it: its tokens, its sampling parameters, and its gateway."""

from __future__ import annotations

import array
import sys

import msgspec

from pdmesh.model import (
    CacheUser,
    Epoch,
    GatewayId,
    PrefixHashes,
    RequestId,
    SamplingParams,
)


def pack_token_ids(token_ids: list[int] | array.array[int]) -> bytes:
    """Return token ids as little-endian int32, four bytes a token: 1M tokens decode without a million objects."""
    packed = array.array("i", token_ids)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def unpack_token_ids(packed: bytes) -> array.array[int]:
    """Invert `pack_token_ids`. Raises ValueError if ``packed`` is not whole tokens."""
    token_ids = array.array("i")
    token_ids.frombytes(packed)
    if sys.byteorder == "big":
        token_ids.byteswap()
    return token_ids


class Generation(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """All that a worker needs to run a request; the scheduler passes it on without looking at the tokens.

    ``token_ids`` is the packed transcript: the ``num_prompt_tokens`` of the client's prompt and, for a resumed request,
    the output tokens delivered before. ``params.max_tokens`` and ``min_tokens`` count from the end of the client's
    prompt.

    * ``request_id`` is made by the gateway: never a client's, never used again, and not guessable.
    * ``token_address``: host:port of the gateway's Tokens stream.
    * ``traceparent``: W3C trace context.
    * ``label``: the client's name for the request, by which people find it; not unique.
    * ``arithmetic``: class of the instance that drew the last token delivered before.
    * ``weights``: identity of the weights that drew the tokens delivered before; empty without such tokens.
    * ``prefix_root``: the root of the granules' hashes; empty: no KV is reused or cached.
    * ``prefix``: hashes of all full granules of ``token_ids``, in order, for KV of the weights ``prefix_weights``.
    * ``user``: the request's tenant and session, which the scheduler adds for instances.
    """

    request_id: RequestId
    epoch: Epoch
    gateway_id: GatewayId
    token_address: str
    token_ids: bytes
    num_prompt_tokens: int
    params: SamplingParams
    traceparent: str | None = None
    label: str = ""
    arithmetic: str = ""
    weights: str = ""
    prefix_root: bytes = b""
    prefix: PrefixHashes = ()
    prefix_weights: str = ""
    user: CacheUser | None = None

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids) // 4

    @property
    def num_output_tokens(self) -> int:
        """Number of output tokens delivered before this epoch, and so the index of the next one."""
        return self.num_tokens - self.num_prompt_tokens

    @property
    def max_tokens_left(self) -> int:
        return self.params.max_tokens - self.num_output_tokens


class Prompt(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A request's prompt, for an instance that computes it or decodes it after a hand-over.

    A receiver of KV gets a ``generation`` without tokens, unless sampling, drafts or lost KV need them. The transcript
    has ``num_context_tokens`` tokens in any case. ``tail`` holds the packed tokens behind the last full granule, for a
    receiver that caches the KV it generates.
    """

    generation: Generation
    num_context_tokens: int
    tail: bytes = b""
