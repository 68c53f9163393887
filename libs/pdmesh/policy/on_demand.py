"""Memory on demand: how much KV a request is given at a time, and how many may share an instance's blocks.

A request is admitted with room for its prompt and little more, and granted more as it grows. The length of its
output is unknown. So an instance takes as many requests as will, except for a small risk, never need more blocks than
it has: a normal bound on the sum of what they hold, as `pdmesh.policy.batching_theory.max_safe_slots` has
it, of the requests that are there.
"""

from __future__ import annotations

import math
from statistics import NormalDist
from typing import NamedTuple

from pdmesh.model import Request, num_blocks_for

#: Room for output that a request is admitted with, in blocks.
FIRST_BLOCKS = 2

#: With room for less than this, in tokens, an instance says so. Decode steps go on meanwhile: about as many as a grant
#: takes to come, many times over.
LOW_TOKENS = 32

#: A grant leaves room for so many tokens.
GRANT_TOKENS = 64

#: Until outputs have been observed: that many requests are taken to have ended, after so many tokens in the mean.
PRIOR_ENDED = 4
PRIOR_TOKENS = 512

#: Number of the last ends that count, roughly.
WINDOW = 256

#: Moments, in mean remaining lengths from now, at which the sum may be largest.
_HORIZONS = (0.0, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0)
_SURVIVING = tuple((share, math.exp(-share)) for share in _HORIZONS)


def first_tokens(request: Request, block_size: int) -> int:
    """Tokens that a request on demand is admitted with room for."""
    return min(request.max_total_tokens, request.num_prompt_tokens + FIRST_BLOCKS * block_size)


def granted_blocks(num_tokens: int, max_blocks: int, block_size: int) -> int:
    """What a request that holds ``num_tokens`` should have in all, at most ``max_blocks``."""
    return min(max_blocks, num_blocks_for(num_tokens + GRANT_TOKENS, block_size))


def is_low(num_tokens: int, num_blocks: int, block_size: int) -> bool:
    """Whether a request that holds ``num_tokens`` should be given more than its ``num_blocks``."""
    return num_blocks * block_size - num_tokens < LOW_TOKENS


class RemainingTokens:
    """How many tokens more a running request will draw, in the mean, whatever it has drawn so far.

    The rate at which requests end: ends over tokens drawn, of those that run too. So a change to long outputs shows
    before the first of them has ended.
    """

    def __init__(self) -> None:
        self._num_ended = float(PRIOR_ENDED)
        self._num_tokens = float(PRIOR_ENDED * PRIOR_TOKENS)

    def drew(self, num_tokens: int) -> None:
        self._num_tokens += num_tokens

    def ended(self) -> None:
        kept = 1 - 1 / WINDOW
        self._num_ended = self._num_ended * kept + 1
        self._num_tokens *= kept

    @property
    def mean(self) -> float:
        return max(1.0, self._num_tokens / self._num_ended)


def risk_score(risk: float) -> float:
    """Deviations above the mean, exceeded with this risk; a little more, for the sums are skewed and vary in time."""
    return NormalDist().inv_cdf(1 - risk) + 0.8


class Room(NamedTuple):
    """Blocks for one more request, which may grow (`open`) or has all that it may ever need (`bounded`)."""

    open: float
    bounded: float


def safe_room(room: float, number: int, blocks: float, squares: float, mean_growth: float, score: float) -> Room:
    """Return with how many blocks one more request may join ``number`` growing ones; negative if with none.

    These hold ``blocks``, with this sum of ``squares``; ``room`` is for them and the new one. Each grows by a block in
    the same time, and ends after ``mean_growth`` blocks more in the mean, at any time alike. At each horizon t, where a
    share p of them is left, sum p (b + t) + score sqrt(sum p (1 - p) (b + t)^2) is to be within the room. For one that
    grows too, that is solved for its b.
    """
    least_open = least_bounded = math.inf
    for share, survival in _SURVIVING:
        growth = share * mean_growth
        spread = score * score * survival * (1 - survival)
        squared = squares + growth * (2 * blocks + number * growth)
        bounded = room - survival * (blocks + number * growth)
        least_bounded = min(least_bounded, bounded - math.sqrt(spread * squared))
        left = bounded - survival * growth
        rest = left * left - spread * (squared + growth * growth)
        if left < 0 or rest < 0:
            least_open = -1.0
            continue
        half = left * survival + spread * growth
        root = math.sqrt(max(0.0, half * half - (survival * survival - spread) * rest))
        least_open = min(least_open, rest / (half + root) if half + root > 0 else 0.0)
    return Room(least_open, least_bounded)
