"""Which tokens an answer's text is made of, and how likely they were."""

from __future__ import annotations

from collections import deque

from pdmesh.wire.messages import TokenLogprobs
from pdmesh_gateway.choices import Delta
from pdmesh_gateway.http.logprobs import chat_logprobs
from pdmesh_gateway.protocol.chat import ChatTokenLogprob
from pdmesh_gateway.tokenizer import ModelTokenizer


class TextLogprobs:
    """Tokens of an answer, by where in it they begin, until they are taken with the text that they begin in."""

    def __init__(self, tokenizer: ModelTokenizer) -> None:
        self._tokenizer = tokenizer
        self._waiting: deque[tuple[int, int, TokenLogprobs | None]] = deque()

    def add(self, delta: Delta) -> None:
        """Tokens come before the text of them: a part of that may be held back."""
        self._waiting.extend(zip(delta.text_offsets, delta.token_ids, delta.logprobs, strict=True))

    def take(self, start: int, end: int) -> list[ChatTokenLogprob]:
        """Return the tokens that begin within these characters, each once; earlier ones are in no text."""
        waiting = self._waiting
        token_ids: list[int] = []
        logprobs: list[TokenLogprobs | None] = []
        while waiting and waiting[0][0] < end:
            offset, token_id, at = waiting.popleft()
            if offset >= start:
                token_ids.append(token_id)
                logprobs.append(at)
        return chat_logprobs(self._tokenizer, token_ids, logprobs).content
