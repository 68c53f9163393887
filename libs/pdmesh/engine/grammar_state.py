"""Enforcement of a grammar on a sequence's output: which tokens may follow, and when none can."""

from __future__ import annotations

import array
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher

from pdmesh.engine.json_bounds import JsonBounds


class GrammarState:
    """Tokens that a grammar allows in one sequence. Each instance rebuilds it from the output tokens.

    A step may be computed again after its token was drawn. The guide is then rolled back to the sequence's output.
    """

    def __init__(
        self, matcher: LLMatcher, model_end_ids: Sequence[int] = (), json_bounds: JsonBounds | None = None
    ) -> None:
        self._matcher = matcher
        self._fresh = matcher.deep_copy()
        self._json_bounds = json_bounds
        self._is_stuck = False
        self._model_end_ids = list(model_end_ids)
        self._taken = array.array("i")

    @property
    def error(self) -> str:
        """Reason why the output cannot continue, in the library's words. Empty if it can."""
        if self._is_stuck:
            return "no token of the vocabulary can follow"
        return self._matcher.get_error().partition("\n")[0] if self._matcher.is_error() else ""

    @property
    def is_complete(self) -> bool:
        """Whether only an end can follow the consumed tokens."""
        return self._matcher.is_stopped()

    def catch_up(self, output_token_ids: array.array[int]) -> None:
        """Consume the output so far: usually nothing, or the one token that was appended since."""
        num_common = min(len(self._taken), len(output_token_ids))
        if self._taken[:num_common].tobytes() != output_token_ids[:num_common].tobytes():
            self._restart()
        elif len(self._taken) > num_common:
            # A matcher consumes nothing after its end, and cannot be rolled back within a part with a token limit.
            if self._matcher.is_stopped() or not self._matcher.rollback(len(self._taken) - num_common):
                self._restart()
            del self._taken[num_common:]
        self.take(output_token_ids[len(self._taken) :].tolist())

    def _restart(self) -> None:
        self._matcher = self._fresh.deep_copy()
        del self._taken[:]

    def take(self, token_ids: list[int]) -> None:
        """Consume tokens that follow. After the grammar's end, they are only recorded."""
        if token_ids and not self._matcher.is_stopped():
            self._matcher.consume_tokens(token_ids)
        self._taken.extend(token_ids)

    def allowed(self, vocab_size: int, end_token_ids: Sequence[int]) -> npt.NDArray[np.uint8] | None:
        """Return a bit for each token, lowest first: 1 if the token may follow. None if the grammar cannot be obeyed.

        ``end_token_ids`` may be drawn if the output is complete. The model's other end tokens may be drawn only if
        nothing else can follow.
        """
        self._is_stuck = False
        if self._matcher.is_error():
            return None
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)[: -(-vocab_size // 8)].copy()
        if self._matcher.is_error():
            return None
        bits[vocab_size // 8 :] &= (1 << vocab_size % 8) - 1  # no tokens after the vocabulary
        may_end = self._matcher.is_accepting()
        for ends, may_follow in ((self._model_end_ids, False), (end_token_ids, may_end)):
            for token_id in ends:
                if token_id < vocab_size:
                    _set_bit(bits, token_id, may_follow)
        if self._json_bounds is not None:
            self._json_bounds.apply(bits, self._taken, may_end=may_end)
        if not bits.any():
            if not may_end:
                self._is_stuck = True
                return None
            for token_id in self._model_end_ids[:1]:
                _set_bit(bits, token_id, True)
        return bits


def _set_bit(bits: npt.NDArray[np.uint8], number: int, value: bool) -> None:
    place, bit = number // 8, 1 << number % 8
    bits[place] = int(bits[place]) & ~bit | (bit if value else 0)
