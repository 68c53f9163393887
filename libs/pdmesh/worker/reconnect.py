"""How long to wait before the next attempt to reach a peer."""

from __future__ import annotations

import random

FIRST_S = 0.05
LAST_S = 1.0  # below the scheduler's grace for orphans, so that residents are claimed in time


def backoff_s(num_failures: int) -> float:
    """Doubling from `FIRST_S` to `LAST_S`, with jitter so that a mesh does not knock all at once."""
    return min(LAST_S, FIRST_S * 2.0 ** min(num_failures, 10)) * random.uniform(0.5, 1.0)
