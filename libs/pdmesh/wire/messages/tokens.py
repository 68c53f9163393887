"""Messages from workers to gateways, and their answers: ``/pdmesh.v1.Gateway/Tokens``."""

from __future__ import annotations

import msgspec

from pdmesh.model import (
    Epoch,
    FinishReason,
    InstanceId,
    RequestId,
)
from pdmesh.wire.messages.envelope import PROTOCOL_VERSION, Message


class RegisterTokens(Message, frozen=True, kw_only=True):
    """First message of a worker's token stream. ``arithmetic`` and ``weights`` are as in `InstanceProfile`."""

    instance_id: InstanceId
    arithmetic: str = ""
    weights: str = ""
    version: int = PROTOCOL_VERSION


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Log-probabilities at one position: ``logprob`` of the token itself, and ``top`` of the most likely tokens."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class TokenOut(Message, frozen=True, kw_only=True):
    """An output token, or the end of a generation.

    The gateway delivers it only if ``epoch`` is current, ``index`` is the next one, and it comes from the instance
    whose turn it is: the instance that opened the epoch, or the last token's ``next_instance_id``.

    * ``token_id`` is None only if the generation ended without a token (``finish_reason`` error or cancelled), or for
      an ``embedding``.
    * ``stop_token_id``: the stop token id that ended the generation; None for eos.
    * ``next_instance_id``: the instance that sends the next token, if it is another one.
    * ``num_cached_tokens``: for the token drawn from the prompt, number of prompt tokens whose KV was cached.
    * ``embedding``: little-endian float32 of the last prompt token, not normalised.
    """

    request_id: RequestId
    epoch: Epoch
    index: int
    token_id: int | None
    logprobs: TokenLogprobs | None = None
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    next_instance_id: InstanceId | None = None
    num_cached_tokens: int = 0
    error: str | None = None
    embedding: bytes = b""


class PromptLogprobs(Message, frozen=True, kw_only=True):
    """Log-probabilities of prompt tokens from ``start`` on. The first prompt token has none."""

    request_id: RequestId
    epoch: Epoch
    start: int
    logprobs: tuple[TokenLogprobs, ...]


class StreamHandover(Message, frozen=True, kw_only=True):
    """The next sender of a request's tokens.

    Token ``index`` comes from ``next_instance_id``, whichever instance was named before. The message counts if it comes
    from the instance whose turn it is, or from the instance that passed the turn to one that has sent nothing since. If
    that one has sent tokens, two instances would continue: the gateway then resumes the request under the next epoch.
    ``num`` grows with each message of a sender, so that repeats after a broken stream are recognised.
    """

    request_id: RequestId
    epoch: Epoch
    index: int
    next_instance_id: InstanceId
    num: int


class TokensHeartbeat(Message, frozen=True, kw_only=True):
    """The worker's heartbeat, whether or not it has tokens to send. The gateway answers at once."""


#: Messages about a request.
TokenMessage = TokenOut | PromptLogprobs | StreamHandover

TokensUp = RegisterTokens | TokenMessage | TokensHeartbeat


class TokensAccepted(Message, frozen=True, kw_only=True):
    """The gateway's answer to `RegisterTokens`.

    The worker sends a heartbeat every ``heartbeat_s``, and opens a new stream after ``max_unanswered`` without an
    answer.
    """

    heartbeat_s: float
    max_unanswered: int


class TokensHeard(Message, frozen=True, kw_only=True):
    """The gateway's answer to a `TokensHeartbeat`."""


TokensDown = TokensAccepted | TokensHeard
