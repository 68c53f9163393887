"""Byte-level vocabularies, as GPT-2, Llama 3 and Qwen have them: each token stands for bytes, wherever it is.

So a text is put together from what its tokens stand for, which is looked up once for each token, and only what is not
a whole character by itself is decoded as it comes.
"""

from __future__ import annotations

import codecs
import contextlib
import json
from collections.abc import Sequence
from typing import Any

from tokenizers import Tokenizer

_utf8_decoder = codecs.getincrementaldecoder("utf-8")


def decoder_types(tokenizer: Tokenizer) -> list[str]:
    """Return the kinds of a tokenizer's decoders, in their order."""
    if tokenizer.decoder is None:
        return []
    decoder: dict[str, Any] = json.loads(tokenizer.decoder.__getstate__())
    return [str(part.get("type")) for part in decoder.get("decoders", [decoder])]


class ByteLevelVocabulary:
    """What the tokens of a tokenizer stand for whose only decoder is ``ByteLevel``."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._bytes: dict[int, bytes] = {}  # at most the vocabulary
        #: Of tokens that are whole characters, of those that were looked up.
        self.texts: dict[int, str] = {}

    def bytes_of(self, token_id: int) -> bytes:
        """Return the bytes of a token; none if there is no such token."""
        found = self._bytes.get(token_id)
        if found is None:
            piece = self._tokenizer.id_to_token(token_id)
            found = self._bytes[token_id] = b"" if piece is None else _bytes_of(piece)
            with contextlib.suppress(UnicodeDecodeError):
                self.texts[token_id] = found.decode()
        return found


class ByteLevelDetokenizer:
    """A `pdmesh_gateway.detokenizer.Detokenizer` for byte-level vocabularies."""

    def __init__(
        self,
        vocabulary: ByteLevelVocabulary,
        *,
        hidden_ids: frozenset[int] = frozenset(),
        prompt_tail: Sequence[int] = (),
    ) -> None:
        self._vocabulary = vocabulary
        self._texts = vocabulary.texts
        self._hidden_ids = hidden_ids
        self._decoder = _utf8_decoder(errors="replace")
        self._is_whole = True  # what was pushed; else the decoder has the beginning of a character
        for token_id in prompt_tail:  # it may end within a character
            self.push(token_id)
        self._flushable = False

    def push(self, token_id: int) -> str:
        """The text that is certain with this token: no character that a later token may complete."""
        if token_id in self._hidden_ids:
            return ""
        self._flushable = True
        if self._is_whole and (text := self._texts.get(token_id)) is not None:
            return text
        text = self._decoder.decode(self._vocabulary.bytes_of(token_id))
        self._is_whole = not self._decoder.getstate()[0]
        return text

    def flush(self) -> str:
        """What was held back, at the end of the generation."""
        text = self._decoder.decode(b"", final=True) if self._flushable else ""
        self._flushable = False
        return text


def _bytes_of(piece: str) -> bytes:
    """What a vocabulary's entry stands for; one that is not of the alphabet, as added tokens may be, is itself."""
    try:
        return bytes([_BYTE_OF_CHAR[char] for char in piece])
    except KeyError:
        return piece.encode()


def _alphabet() -> dict[str, int]:
    """GPT-2's printable stand-ins for bytes: printable Latin-1 stays, the others follow from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable}
    alphabet.update({chr(0x100 + i): byte for i, byte in enumerate(others)})
    return alphabet


_BYTE_OF_CHAR = _alphabet()
