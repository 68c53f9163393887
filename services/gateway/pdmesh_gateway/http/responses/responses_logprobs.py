"""Log-probabilities of the tokens of an answer's text."""

from __future__ import annotations

from collections import deque

from pdmesh.wire.messages import TokenLogprobs
from pdmesh_gateway.choices import Delta
from pdmesh_gateway.http.logprobs import chat_logprobs
from pdmesh_gateway.model_tokenizer import ModelTokenizer
from pdmesh_gateway.protocol.chat_protocol import ChatTokenLogprob


class TextLogprobs:
    """Queue of an answer's tokens by offset, until the text that they belong to is taken."""

    def __init__(self, tokenizer: ModelTokenizer) -> None:
        self._tokenizer = tokenizer
        self._waiting: deque[tuple[int, int, TokenLogprobs | None]] = deque()

    def add(self, delta: Delta) -> None:
        """Add a delta's tokens, whose text may be held back and follow later."""
        self._waiting.extend(zip(delta.text_offsets, delta.token_ids, delta.logprobs, strict=True))

    def take(self, start: int, end: int) -> list[ChatTokenLogprob]:
        """Return the tokens that overlap the characters ``start`` to ``end``, each once, and drop earlier tokens."""
        begun: list[tuple[int, int, TokenLogprobs | None]] = []
        while self._waiting and self._waiting[0][0] < end:
            begun.append(self._waiting.popleft())
        ends = [*(offset for offset, _, _ in begun[1:]), end]
        parts = [each for each, end_offset in zip(begun, ends, strict=False) if each[0] >= start or end_offset > start]
        token_ids, logprobs = [token_id for _, token_id, _ in parts], [at for _, _, at in parts]
        return chat_logprobs(self._tokenizer, token_ids, logprobs).content
