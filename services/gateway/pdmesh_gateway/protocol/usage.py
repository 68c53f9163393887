"""How many tokens a request took."""

from __future__ import annotations

import msgspec


class PromptTokensDetails(msgspec.Struct):
    """Number of a prompt's tokens whose KV was there before."""

    cached_tokens: int = 0


class CompletionTokensDetails(msgspec.Struct):
    """Number of an answer's tokens that came before the answer proper."""

    reasoning_tokens: int = 0


class Usage(msgspec.Struct, kw_only=True):
    """Tokens of a whole HTTP request: a prompt counts once, each of its choices' outputs by itself."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails = msgspec.field(default_factory=PromptTokensDetails)
    completion_tokens_details: CompletionTokensDetails = msgspec.field(default_factory=CompletionTokensDetails)
