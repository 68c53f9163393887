"""Token ids to text, as they come.

``tokenizers``' own ``DecodeStream`` is not used: it keeps an ever longer buffer while a model emits bytes that never
form a character, and raises where a byte-fallback decoder changes its mind about bytes it has shown already.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from tokenizers import Tokenizer

REPLACEMENT = "\ufffd"

#: A UTF-8 character that is not complete yet is at most three bytes, each of which may show as one U+FFFD.
_MAX_PENDING = 3

#: Tokens decoded again with each new one, and how far the window grows before it is cut back to that. At least 12
#: bytes: three pending characters of three bytes, and three bytes until UTF-8 is in step again after a cut.
_KEEP = 16
_GROW = 48


class Detokenizer(Protocol):
    """One generation's text. The concatenated results of `push` and `flush` are the decoded whole."""

    def push(self, token_id: int) -> str:
        """Return the text that is certain with this token: no character that a later token may complete."""
        ...

    def flush(self) -> str:
        """Return what was held back, at the end of the generation."""
        ...


class WindowDetokenizer:
    """A `Detokenizer` for any vocabulary: with each token the last ones are decoded again.

    The end of the prompt is decoded along, so that a leading space which a decoder strips from the first token of a
    text is kept in the middle of one.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        hidden_ids: frozenset[int] = frozenset(),
        prompt_tail: Sequence[int] = (),
    ) -> None:
        self._tokenizer = tokenizer
        self._hidden_ids = hidden_ids  # special tokens, where they are not wanted
        self._window = [token_id for token_id in prompt_tail[-_KEEP:] if token_id not in hidden_ids]
        self._text = self._decode()  # of the window
        self._shown = len(self._text) - _num_pending(self._text)  # characters of it that were returned before
        self._flushable = False

    def push(self, token_id: int) -> str:
        """The text that is certain with this token: no character that a later token may complete."""
        if token_id in self._hidden_ids:
            return ""
        self._window.append(token_id)
        text = self._decode()
        if not text.startswith(self._text[: self._shown]):
            # A byte-fallback decoder shows a whole run of bytes as U+FFFD once one of them is wrong, also those it had
            # decoded before. What was shown stays; the run begins anew with this token.
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
        """What was held back, at the end of the generation."""
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
