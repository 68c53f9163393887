"""Log-probabilities in both dialects of the API."""

from __future__ import annotations

from collections.abc import Sequence

from pdmesh.wire.messages import TokenLogprobs
from pdmesh_gateway.protocol import ChatLogprobs, ChatTokenLogprob, ChatTopLogprob, CompletionLogprobs
from pdmesh_gateway.tokenizer import ModelTokenizer

#: JSON has no -inf; vLLM's stand-in.
MIN_LOGPROB = -9999.0


def chat_logprobs(
    tokenizer: ModelTokenizer, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs | None]
) -> ChatLogprobs:
    """Return tokens in a chat's shape: text, bytes and natural log-probability, and those of the likeliest."""
    content: list[ChatTokenLogprob] = []
    for token_id, at in zip(token_ids, logprobs, strict=True):
        top = [
            ChatTopLogprob(tokenizer.token_text(other), _finite(logprob), list(tokenizer.token_bytes(other)))
            for other, logprob in (at.top if at is not None else ())
        ]
        content.append(
            ChatTokenLogprob(
                tokenizer.token_text(token_id),
                MIN_LOGPROB if at is None else _finite(at.logprob),
                list(tokenizer.token_bytes(token_id)),
                top,
            )
        )
    return ChatLogprobs(content)


def completion_logprobs(
    tokenizer: ModelTokenizer,
    token_ids: Sequence[int],
    logprobs: Sequence[TokenLogprobs | None],
    *,
    num_top: int,
    text_offsets: Sequence[int],
) -> CompletionLogprobs:
    """``text_offsets`` has the characters of the choice's text before each token. A token without log-probabilities
    (the first of an echoed prompt) has null."""
    result = CompletionLogprobs([], [], [], [])
    result.text_offset.extend(text_offsets)
    for token_id, at in zip(token_ids, logprobs, strict=True):
        text = tokenizer.token_text(token_id)
        result.tokens.append(text)
        if at is None:
            result.token_logprobs.append(None)
            result.top_logprobs.append(None)
            continue
        result.token_logprobs.append(_finite(at.logprob))
        # The drawn token is listed too, also if it is not among the most likely ones; of two tokens with one text the
        # more likely counts.
        top: dict[str, float] = {}
        for other, logprob in at.top[:num_top]:
            top.setdefault(tokenizer.token_text(other), _finite(logprob))
        top.setdefault(text, _finite(at.logprob))
        result.top_logprobs.append(top)
    return result


def _finite(logprob: float) -> float:
    return max(logprob, MIN_LOGPROB)
