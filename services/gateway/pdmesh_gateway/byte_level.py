"""Byte-level vocabularies of GPT-2, Llama 3 and Qwen: each token stands for the same bytes at every position.

The text of a token that is whole characters is looked up in a table. Only other tokens pass an incremental decoder.
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
    """Return the types of a tokenizer's decoders, in order; empty without a decoder."""
    if tokenizer.decoder is None:
        return []
    decoder: dict[str, Any] = json.loads(tokenizer.decoder.__getstate__())
    return [str(part.get("type")) for part in decoder.get("decoders", [decoder])]


class ByteLevelVocabulary:
    """Bytes and texts of the tokens of a tokenizer whose only decoder is ``ByteLevel``."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._bytes: dict[int, bytes] = {}
        #: Texts of the tokens looked up so far that are whole characters.
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
    """A `pdmesh_gateway.detokenizer.Detokenizer` for byte-level vocabularies.

    ``prompt_tail`` is decoded first and not shown, because a prompt may end within a character.
    """

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
        self._is_whole = True
        for token_id in prompt_tail:
            self.push(token_id)
        self._flushable = False

    def push(self, token_id: int) -> str:
        """Add a token and return the text that is now certain.

        A character that a later token may complete is held back. A hidden token has no text.
        """
        if token_id in self._hidden_ids:
            return ""
        self._flushable = True
        if self._is_whole and (text := self._texts.get(token_id)) is not None:
            return text
        text = self._decoder.decode(self._vocabulary.bytes_of(token_id))
        self._is_whole = not self._decoder.getstate()[0]
        return text

    def flush(self) -> str:
        """Return the text that was held back, at the end of the generation."""
        text = self._decoder.decode(b"", final=True) if self._flushable else ""
        self._flushable = False
        return text


def _bytes_of(piece: str) -> bytes:
    """Return the bytes of a vocabulary's entry.

    An entry outside the alphabet, such as an added token, is its own UTF-8.
    """
    try:
        return bytes([_BYTE_OF_CHAR[char] for char in piece])
    except KeyError:
        return piece.encode()


def _alphabet() -> dict[str, int]:
    """Return the byte of each of GPT-2's stand-in characters.

    Printable Latin-1 stands for itself; the other bytes follow from U+0100 on.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable}
    alphabet.update({chr(0x100 + i): byte for i, byte in enumerate(others)})
    return alphabet


_BYTE_OF_CHAR = _alphabet()
