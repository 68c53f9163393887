"""How many examples a property test draws: as many as it asks for, or the share that hypothesis' profile says."""

from __future__ import annotations

from hypothesis import settings

#: Of a profile that draws all that tests ask for.
_ALL = 100


def examples(number: int) -> int:
    """``max_examples`` of a test that asks for ``number``, at least 1: the loaded profile's percentage of it."""
    return max(1, number * settings().max_examples // _ALL)
