"""How much of what could be tried `make test` tries, and how much is left to `make test-all`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import pytest
from hypothesis import settings

#: Examples of a profile that draws all that tests ask for.
_ALL = 100


def examples(number: int) -> int:
    """``max_examples`` of a test that asks for ``number``: the loaded profile's percentage of it, at least 1."""
    return max(1, number * settings().max_examples // _ALL)


def slow_beyond(num_fast: int, values: Iterable[Any]) -> Sequence[Any]:
    """Return the values of a test parameter, all but the first ``num_fast`` marked ``slow``."""
    rows = [value if isinstance(value, tuple) else (value,) for value in values]
    return [pytest.param(*row, marks=[pytest.mark.slow] * (place >= num_fast)) for place, row in enumerate(rows)]
