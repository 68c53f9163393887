"""What workers stream to gateways: ``/pdmesh.v1.Gateway/Tokens``."""

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
    """First message of a worker's token stream."""

    instance_id: InstanceId
    arithmetic: str = ""  # the instance's class, as in `InstanceProfile`
    weights: str = ""  # the identity of its weights, likewise
    version: int = PROTOCOL_VERSION


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Log-probabilities at one position. ``logprob`` is that of the token at hand; ``top`` the most likely ones."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class TokenOut(Message, frozen=True, kw_only=True):
    """One output token. It is delivered only if ``epoch`` is current, ``index`` is the next one, and it came from the
    instance whose turn it is: that which opened the epoch, or which the last token named as the next.

    ``token_id`` is None only if the generation ended without one (``finish_reason`` error or cancelled), or what was
    asked for is an ``embedding``.
    """

    request_id: RequestId
    epoch: Epoch
    index: int
    token_id: int | None
    logprobs: TokenLogprobs | None = None
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None  # which stop token id ended it; None for eos
    next_instance_id: InstanceId | None = None  # which sends the token after this one, if it is another instance
    num_cached_tokens: int = 0  # of one drawn from the prompt: so many of its tokens had their KV here before
    error: str | None = None
    embedding: bytes = b""  # little-endian float32: the last prompt token's, not normalised


class PromptLogprobs(Message, frozen=True, kw_only=True):
    """Log-probabilities of prompt tokens ``start`` … ``start + len - 1``; the first prompt token has none."""

    request_id: RequestId
    epoch: Epoch
    start: int
    logprobs: tuple[TokenLogprobs, ...]


class TurnOver(Message, frozen=True, kw_only=True):
    """The token ``index`` comes from ``next_instance_id``, whoever was named before.

    It is for the instance whose turn it is to say, or for the one that gave the turn to another that has not spoken
    since. If that has, two would go on from there: the gateway then goes on under the next epoch.
    """

    request_id: RequestId
    epoch: Epoch
    index: int
    next_instance_id: InstanceId
    num: int  # the sender's next one has a larger one: what it repeats after its stream broke is known by it


class TokensHeartbeat(Message, frozen=True, kw_only=True):
    """The worker is there, whether or not it has tokens to send. The gateway answers it at once."""


#: What is said of a request.
TokenMessage = TokenOut | PromptLogprobs | TurnOver

TokensUp = RegisterTokens | TokenMessage | TokensHeartbeat


class TokensAccepted(Message, frozen=True, kw_only=True):
    """The gateway's answer to `RegisterTokens`."""

    heartbeat_s: float  # how often the worker says that it is there
    max_unanswered: int  # so many heartbeats without an answer, and the worker opens the stream anew


class TokensHeard(Message, frozen=True, kw_only=True):
    """The gateway's answer to a `TokensHeartbeat`."""


TokensDown = TokensAccepted | TokensHeard
