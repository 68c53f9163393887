"""Sizes and durations as people write them: ``4GiB``, ``10GB``, ``30s``, ``5m``."""

from __future__ import annotations

import math
import re

_BYTES = {"": 1, "b": 1} | {
    prefix + suffix: base**power
    for power, prefix in enumerate("kmgt", start=1)
    for suffix, base in (("b", 1000), ("ib", 1024), ("i", 1024))
}
_SECONDS = {"": 1.0, "us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}

_NUMBER = re.compile(r"\s*([0-9.]+(?:e[+-]?[0-9]+)?)\s*([a-z]*)\s*", re.IGNORECASE | re.ASCII)


def parse_bytes(text: str) -> int:
    """Return the number of bytes in a size such as ``1.5GiB``, ``10 gb`` or ``4096``, rounded.

    A number without a unit must be whole. Raises ValueError if ``text`` is not a size.
    """
    number, unit = _split(text)
    num_bytes = float(number) * _BYTES[unit] if unit in _BYTES else math.nan
    if not math.isfinite(num_bytes) or (_BYTES[unit] == 1 and not num_bytes.is_integer()):
        raise ValueError(f"{text!r} is not a size")
    return int(number) * _BYTES[unit] if number.isdecimal() else round(num_bytes)


def parse_seconds(text: str) -> float:
    """Return the number of seconds; a number without a unit is in seconds. Raise ValueError for any other text."""
    number, unit = _split(text)
    seconds = float(number) * _SECONDS[unit] if unit in _SECONDS else math.inf
    if not math.isfinite(seconds):
        raise ValueError(f"{text!r} is not a duration")
    return seconds


def _split(text: str) -> tuple[str, str]:
    match = _NUMBER.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is not a number with a unit")
    return match[1], match[2].lower()
