"""Bounds of JSON that grammars leave open: digits of a number, and white space between the parts."""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

#: Largest number of digits before, and after, the point of a double. llama.cpp's grammars have the same limit.
MAX_DIGITS = 16
MAX_EXPONENT_DIGITS = 3
MAX_BLANKS = 20

_BLANKS, _DIGITS = b" \n\r\t", b"0123456789"
_EXPONENT = re.compile(rb"[0-9][eE][+-]?\Z")
#: Bytes that may follow a number.
_BEHIND_NUMBERS = (b",", b"}", b"]", b"\n")
_NUM_TOKENS = 64

Bits = npt.NDArray[np.uint8]


class JsonBounds:
    """Filter of tokens that would make a number or white space in JSON too long.

    The output is in a number if the grammar allows digits and a number's end, but neither letters nor a quote. White
    space is bounded where no letters can follow. A bound is ignored if it would forbid every token.
    """

    def __init__(self, token_bytes: Sequence[bytes]) -> None:
        self._token_bytes = token_bytes
        digits = [len(token) - len(token.lstrip(_DIGITS)) for token in token_bytes]
        blanks = [len(token) - len(token.lstrip(_BLANKS)) for token in token_bytes]
        self._with_digits, self._with_blanks = _at_least(digits), _at_least(blanks)
        ids = {token: token_id for token_id, token in reversed([*enumerate(token_bytes)])}
        self._letter, self._quote = ids.get(b"a"), ids.get(b'"')
        self._behind = [ids[token] for token in _BEHIND_NUMBERS if token in ids]

    def apply(self, bits: Bits, output: Sequence[int], *, may_end: bool) -> None:
        """Clear the bits of tokens that exceed a bound after ``output``. ``may_end``: the output is complete.

        Nothing is cleared unless the output ends in blanks or digits and no letter may follow.
        """
        last = self._bytes_of(output[-1]) if output else b""
        if not last or last[-1] not in _DIGITS + _BLANKS or _has(bits, self._letter):
            return
        text = b"".join(map(self._bytes_of, output[-_NUM_TOKENS:]))
        before = text.rstrip(_BLANKS if last[-1] in _BLANKS else _DIGITS)
        length = len(text) - len(before)
        if last[-1] in _BLANKS:
            masks, num_left = self._with_blanks, MAX_BLANKS - length
        elif _has(bits, self._quote) or not (may_end or any(_has(bits, each) for each in self._behind)):
            return
        else:
            most = MAX_EXPONENT_DIGITS if _EXPONENT.search(before[-3:]) else MAX_DIGITS
            masks, num_left = self._with_digits, most - length
        if (num_left := max(0, num_left)) < len(masks):
            kept = bits & ~masks[num_left][: len(bits)]
            if kept.any():
                bits[:] = kept

    def _bytes_of(self, token_id: int) -> bytes:
        return self._token_bytes[token_id] if token_id < len(self._token_bytes) else b""


def _at_least(counts: Sequence[int]) -> list[Bits]:
    """Return masks of tokens with a count over 0, over 1, and so on, up to the highest."""
    values = np.array(counts)
    return [np.packbits(values > over, bitorder="little") for over in range(int(values.max(initial=0)))]


def _has(bits: Bits, token_id: int | None) -> bool:
    return token_id is not None and token_id // 8 < len(bits) and bool(bits[token_id // 8] >> token_id % 8 & 1)
