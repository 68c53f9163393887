"""Log-probabilities of a prompt's tokens in vLLM's shape."""

from __future__ import annotations

import msgspec


class PromptLogprob(msgspec.Struct, kw_only=True):
    """A token at a position of a prompt, in vLLM's shape. ``rank`` is null if the token is not among the likeliest."""

    logprob: float
    rank: int | None
    decoded_token: str


#: By position and token id; the first token has none.
PromptLogprobList = list[dict[str, PromptLogprob] | None]
