"""What a number may be: a mark on a field's type, and the question whether a value keeps to its own.

``num_tokens: Annotated[int, COUNT]`` is a field of a frozen dataclass or struct. Marks cost nothing where values are
made; what comes from a file or from another process is looked at once, where it is decoded (`pdmesh.eventlog`,
`pdmesh.wire`).
"""

from __future__ import annotations

import dataclasses
import functools
import math
import typing
from dataclasses import dataclass
from typing import Any

from msgspec import Struct


@dataclass(frozen=True, slots=True)
class Range:
    """Inclusive limits of a number, which is finite in any case."""

    low: float
    high: float = math.inf

    def __contains__(self, number: float) -> bool:
        return self.low <= number <= self.high and math.isfinite(number)

    def __str__(self) -> str:
        """Return what follows "a number", such as " of at least 1" or " from 1 to 3"."""
        if math.isinf(self.low):
            return " that is finite"
        return f" of at least {self.low:g}" if math.isinf(self.high) else f" from {self.low:g} to {self.high:g}"


ANY_COUNT = Range(0)
COUNT = Range(1)
SHARE = Range(0, 1)
PORT = Range(0, 65535)
SECONDS = Range(0)
FINITE = Range(-math.inf)
KV_RISK = Range(1e-6, 0.5)  # its score is a quantile of a normal distribution: infinite at 0


def out_of_range(value: Any) -> str | None:
    """What is wrong with the first marked number of a dataclass or struct that is not in its range; None if all are.

    Fields that are such themselves, or tuples of them, are looked into.
    """
    kind: Any = type(value)
    ranges, nested = _marks(kind)
    for name, allowed in ranges:
        number = getattr(value, name)
        if number is not None and number not in allowed:
            return f"{name} is {number}: must be a number{allowed}"
    for name in nested:
        inner = getattr(value, name)
        for item in inner if isinstance(inner, tuple) else (inner,):
            if (problem := out_of_range(item)) is not None:
                return f"{name}: {problem}"
    return None


@functools.cache
def _marks(kind: type) -> tuple[tuple[tuple[str, Range], ...], tuple[str, ...]]:
    """The fields of ``kind`` that have a range, and those to look into; none of what has no fields."""
    if not _has_fields(kind):
        return (), ()
    ranges: list[tuple[str, Range]] = []
    nested: list[str] = []
    for name, hint in typing.get_type_hints(kind, include_extras=True).items():
        parts = list(_parts(hint))
        ranges += [(name, part) for part in parts if isinstance(part, Range)]
        if any(isinstance(part, type) and _has_marks(part) for part in parts):
            nested.append(name)
    return tuple(ranges), tuple(nested)


def _has_fields(kind: type) -> bool:
    return dataclasses.is_dataclass(kind) or issubclass(kind, Struct)


def _has_marks(kind: Any) -> bool:
    return any(_marks(kind))


def _parts(hint: Any) -> typing.Iterator[Any]:
    """A type, and what it is made of: the marks of an annotated one, the members of a union, the items of a tuple."""
    yield hint
    for part in (*typing.get_args(hint), *getattr(hint, "__metadata__", ())):
        yield from _parts(part)
