"""Incremental conversion of token ids to text.

``DecodeStream`` of ``tokenizers`` is not used, because its buffer grows while a model emits bytes that never form a
character. Also, ``DecodeStream`` raises where a byte-fallback decoder reinterprets bytes that were shown already.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from tokenizers import Tokenizer

REPLACEMENT = "\ufffd"

#: An incomplete UTF-8 character has at most three bytes, and each byte may show as one U+FFFD.
_MAX_PENDING = 3

#: Number of last tokens that each cut keeps for decoding, and number of tokens that triggers a cut. At least 12 bytes
#: are needed: three pending characters of three bytes, and three bytes until UTF-8 is in step again after a cut.
_KEEP = 16
_GROW = 48


class Detokenizer(Protocol):
    """The text of one generation. The results of `push` and `flush`, concatenated, are the decoded text."""

    def push(self, token_id: int) -> str:
        """Add a token and return the text that is now certain.

        A character that a later token may complete is held back. A hidden token has no text.
        """
        ...

    def flush(self) -> str:
        """Return the text that was held back, at the end of the generation."""
        ...


class WindowDetokenizer:
    """A `Detokenizer` for any vocabulary, which decodes a window of the last tokens again with each token.

    The window begins with the end of the prompt: a decoder strips a leading space from the first token of a text, and
    the answer does not begin a text. Tokens in ``hidden_ids`` show no text.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        hidden_ids: frozenset[int] = frozenset(),
        prompt_tail: Sequence[int] = (),
    ) -> None:
        self._tokenizer = tokenizer
        self._hidden_ids = hidden_ids
        self._window = [token_id for token_id in prompt_tail[-_KEEP:] if token_id not in hidden_ids]
        #: Text of the window, and the number of characters of it that were returned before.
        self._text = self._decode()
        self._shown = len(self._text) - _num_pending(self._text)
        self._flushable = False

    def push(self, token_id: int) -> str:
        """Add a token and return the text that is now certain: a character that a later token may complete is held
        back.
        """
        if token_id in self._hidden_ids:
            return ""
        self._window.append(token_id)
        text = self._decode()
        if not text.startswith(self._text[: self._shown]):
            # A byte-fallback decoder shows a whole run of bytes as U+FFFD once one byte is wrong, also bytes that it
            # decoded before. Shown text stays; the run begins anew with this token.
            self._window = [token_id]
            self._shown = 0
            text = self._decode()
        self._text = text
        self._flushable = True
        until = max(self._shown, len(text) - _num_pending(text))
        delta = text[self._shown : until]
        self._shown = until
        if len(self._window) > _GROW:
            self._cut()
        return delta

    def flush(self) -> str:
        """Return the text that was held back, at the end of the generation."""
        delta = self._text[self._shown :] if self._flushable else ""
        self._shown = len(self._text)
        return delta

    def _cut(self) -> None:
        held = len(self._text) - self._shown
        self._window = self._window[-_KEEP:]
        self._text = self._decode()
        self._shown = max(0, len(self._text) - held)

    def _decode(self) -> str:
        return self._tokenizer.decode(self._window, skip_special_tokens=False)


def _num_pending(text: str) -> int:
    if not text.endswith(REPLACEMENT):
        return 0
    return min(len(text) - len(text.rstrip(REPLACEMENT)), _MAX_PENDING)
