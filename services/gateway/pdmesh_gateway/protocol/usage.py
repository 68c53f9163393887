"""Token counts of a request."""

from __future__ import annotations

import msgspec


class PromptTokensDetails(msgspec.Struct):
    """Number of a prompt's tokens that were cached."""

    cached_tokens: int = 0


class CompletionTokensDetails(msgspec.Struct):
    """Number of an answer's reasoning tokens."""

    reasoning_tokens: int = 0


class Usage(msgspec.Struct, kw_only=True):
    """Tokens of a whole HTTP request. A prompt counts once; the output of each choice counts."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails = msgspec.field(default_factory=PromptTokensDetails)
    completion_tokens_details: CompletionTokensDetails = msgspec.field(default_factory=CompletionTokensDetails)
