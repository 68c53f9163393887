"""Damaged files, drawn from a seed: bytes that changed, trees of values with one that is wrong."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from typing import Any

#: What no field expects.
_WRONG_VALUES: tuple[object, ...] = (
    None, True, False, 0, 1, -1, 2**31, 2**63 - 1, -(2**63), 10**30, 0.0, -0.5, 5e-324, 1e308, math.inf, math.nan,
    "", "x", "\ud800", "9" * 400, [], {}, [[]], [None], {"": None},
)  # fmt: skip


def damaged_bytes(rng: random.Random, data: bytes) -> bytes:
    """``data`` with some of it changed, cut out, repeated or cut off."""
    damaged = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 8))):
        if not damaged:
            return bytes(damaged)
        start = rng.randrange(len(damaged))
        end = min(len(damaged), start + rng.choice((1, 1, 4, 16, 256)))
        match rng.randrange(6):
            case 0:
                damaged[start] ^= 1 << rng.randrange(8)
            case 1:
                damaged[start:end] = rng.randbytes(end - start)
            case 2:
                del damaged[start:end]
            case 3:
                damaged[start:start] = damaged[start:end]
            case 4:
                damaged[start:start] = rng.randbytes(rng.choice((1, 8, 64)))
            case _:
                del damaged[start:]
    return bytes(damaged)


def damaged_tree(rng: random.Random, tree: Any) -> Any:
    """Return a copy of a tree of plain values, with one value wrong, missing, or swapped."""
    tree = _copied(tree)
    places = list(_places(tree))
    if not places:
        return rng.choice(_WRONG_VALUES)
    container, key = rng.choice(places)
    match rng.randrange(8):
        case 0:
            del container[key]
        case 1:
            other, other_key = rng.choice(places)
            container[key] = _copied(other[other_key])
        case 2 if isinstance(container[key], int | float) and not isinstance(container[key], bool):
            container[key] = container[key] * rng.choice((-1, 2, 1000, 0.5))
        case _:
            container[key] = rng.choice(_WRONG_VALUES)
    return tree


def damaged_sequence(rng: random.Random, items: list[Any]) -> list[Any]:
    """Return the items with some left out, repeated or in another order."""
    items = list(items)
    for _ in range(rng.choice((1, 1, 4))):
        if not items:
            break
        at, to = rng.randrange(len(items)), rng.randrange(len(items))
        match rng.randrange(4):
            case 0:
                del items[at]
            case 1:
                items.insert(to, items[at])
            case 2:
                items[at], items[to] = items[to], items[at]
            case _:
                del items[min(at, to) : max(at, to)]
    return items


def _places(tree: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(tree, dict):
        keys: list[Any] = list(tree)
    elif isinstance(tree, list):
        keys = list(range(len(tree)))
    else:
        return
    for key in keys:
        yield tree, key
        yield from _places(tree[key])


def _copied(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {key: _copied(value) for key, value in tree.items()}
    return [_copied(value) for value in tree] if isinstance(tree, list | tuple) else tree
