"""Memory on demand: how much KV a request is given at a time, and how many may share an instance's blocks.

A request is admitted with room for its prompt and little more, and gets more as it grows. The length of the output is
unknown. So an instance takes as many requests as will, except for a small risk, never need more than its blocks. The
test is a normal bound on the total of the running requests, as in `pdmesh.policy.batching_theory.max_safe_slots`.
"""

from __future__ import annotations

import math
from statistics import NormalDist
from typing import NamedTuple

from pdmesh.kv_layout import num_blocks_for
from pdmesh.model import Request

#: Room for output that a request is admitted with, in blocks.
FIRST_BLOCKS = 2

#: Number of free tokens of a request below which an instance asks for more room. A grant arrives long before this many
#: decode steps have run.
LOW_TOKENS = 32

#: Number of free tokens that a grant leaves.
GRANT_TOKENS = 64

#: Assumed observations at the start: number of ended requests, and their mean output.
PRIOR_ENDED = 4
PRIOR_TOKENS = 512

#: Number of the last ends that count, roughly.
WINDOW = 256

#: Moments, in mean remaining lengths from now, at which the sum may be largest.
_HORIZONS = (0.0, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0)
_SURVIVING = tuple((share, math.exp(-share)) for share in _HORIZONS)


def first_tokens(request: Request, block_size: int) -> int:
    """Return the number of tokens for which a request on demand gets room at admission."""
    return min(request.max_total_tokens, request.num_prompt_tokens + FIRST_BLOCKS * block_size)


def granted_blocks(num_tokens: int, max_blocks: int, block_size: int) -> int:
    """Return the total blocks that a request of ``num_tokens`` should have, at most ``max_blocks``."""
    return min(max_blocks, num_blocks_for(num_tokens + GRANT_TOKENS, block_size))


def is_low(num_tokens: int, num_blocks: int, block_size: int) -> bool:
    """Whether a request that holds ``num_tokens`` should be given more than its ``num_blocks``."""
    return num_blocks * block_size - num_tokens < LOW_TOKENS


class RemainingTokens:
    """Mean number of tokens that a running request will still draw, however many it has drawn.

    The estimate is tokens drawn over requests ended. Tokens of running requests count, so that a change to long outputs
    shows before the first of these has ended.
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
    """Return the standard deviations above the mean that a sum exceeds with this risk.

    The result has a margin, because the sums are skewed and vary in time.
    """
    return NormalDist().inv_cdf(1 - risk) + 0.8


class Room(NamedTuple):
    """Room in blocks for one more request that may grow (`open`), or that gets its maximum at once (`bounded`)."""

    open: float
    bounded: float


def safe_room(room: float, number: int, blocks: float, squares: float, mean_growth: float, score: float) -> Room:
    """Return with how many blocks one more request may join ``number`` growing ones; negative: it may not.

    The growing requests hold ``blocks`` in sum, with this sum of ``squares``. ``room`` is for them and the new one.
    All grow at the same rate, and each ends at random, after ``mean_growth`` more blocks in the mean. So at a horizon t
    a share p of them is left. At each t, sum p (b + t) + score sqrt(sum p (1 - p) (b + t)^2) must stay within the room.
    For a new request that grows too, this is solved for its b.
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
