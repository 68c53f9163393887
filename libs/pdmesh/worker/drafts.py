"""Speculation: a guess of the tokens that come next, which one step verifies as a chunk.

*Prompt lookup* guesses what followed the same few tokens where they stood before, in the prompt or in the output. A
guess costs nothing but rows of a step, and no answer depends on it: what is drawn at each position is what would be
drawn without.
"""

from __future__ import annotations

import array
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from pdmesh.worker.sequences import LocalRequest


class Drafter(Protocol):
    """Guesses what comes next."""

    def draft(self, request: LocalRequest) -> tuple[int, ...]:
        """Return what a request's next step is to verify: no more than it may draw and has room for."""
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
        """Return at most ``most`` tokens: what followed the longest n-gram at the end where it stood last.

        A repetition that reaches the end goes on, so a loop is guessed in whole.
        """
        last = len(token_ids) - 1
        if most <= 0 or last < 1:
            return ()
        ids: npt.NDArray[np.int32] = np.frombuffer(token_ids, dtype=np.int32)
        places = np.flatnonzero(ids[:last] == ids[last])  # where the n-gram ends
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
    """Return how many tokens a request's next step may verify: what it may draw, and has room for.

    None of one that is held to a grammar: what may follow depends on each token before.
    """
    sequence, params = request.sequence, request.sequence.params
    if params.grammar:
        return 0
    room = len(sequence.block_table) * request.block_size - len(sequence.token_ids)
    return max(0, min(room, params.max_tokens - sequence.num_output_tokens - 1))
