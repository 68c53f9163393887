"""Speculation: drafts of the next tokens, which one step verifies like a chunk.

*Prompt lookup* finds the last few tokens earlier in the prompt or output, and drafts the tokens that followed there. A
draft costs only rows of a step. No answer depends on it, because each drawn token equals the token without drafts.
"""

from __future__ import annotations

import array
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from pdmesh.worker.sequences import LocalRequest


class Drafter(Protocol):
    """Source of drafts."""

    def draft(self, request: LocalRequest) -> tuple[int, ...]:
        """Return tokens for a request's next step to verify, at most `most_drafted`."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptLookup:
    """Drafts of at most ``num_tokens``, after n-grams of ``min_ngram`` to ``max_ngram`` tokens."""

    num_tokens: int
    min_ngram: int
    max_ngram: int

    def draft(self, request: LocalRequest) -> tuple[int, ...]:
        return self.continuation(request.sequence.token_ids, min(self.num_tokens, most_drafted(request)))

    def continuation(self, token_ids: array.array[int], most: int) -> tuple[int, ...]:
        """Return ``most`` tokens that followed the last earlier occurrence of the longest n-gram at the end.

        Return none if no n-gram of ``min_ngram`` to ``max_ngram`` tokens occurs earlier. Tokens that reach the end are
        repeated, so a loop is drafted as a whole.
        """
        last = len(token_ids) - 1
        if most <= 0 or last < 1:
            return ()
        ids: npt.NDArray[np.int32] = np.frombuffer(token_ids, dtype=np.int32)
        places = np.flatnonzero(ids[:last] == ids[last])
        found = -1
        for length in range(1, self.max_ngram + 1):
            if length > 1:
                places = places[places >= length - 1]
                places = places[ids[places - (length - 1)] == ids[last - (length - 1)]]
            if not len(places):
                break
            if length >= self.min_ngram:
                found = int(places[-1])
        if found < 0:
            return ()
        period = last - found
        return tuple([token_ids[found + 1 + number % period] for number in range(most)])


def most_drafted(request: LocalRequest) -> int:
    """Return how many tokens a request's next step may verify, by its output limit and its room.

    Returns 0 for a request with a grammar, because each allowed token depends on the ones before.
    """
    sequence, params = request.sequence, request.sequence.params
    if params.grammar:
        return 0
    room = len(sequence.block_table) * request.block_size - len(sequence.token_ids)
    return max(0, min(room, params.max_tokens - sequence.num_output_tokens - 1))
