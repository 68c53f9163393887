"""Log-probabilities of a prompt's tokens, by vLLM's shape."""

from __future__ import annotations

import msgspec


class PromptLogprob(msgspec.Struct, kw_only=True):
    """A token at a place of a prompt, by vLLM's shape; the ``rank`` of one that is not among the likeliest is null."""

    logprob: float
    rank: int | None
    decoded_token: str


#: By position and token id; the first token has none.
PromptLogprobList = list[dict[str, PromptLogprob] | None]
