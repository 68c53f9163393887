"""The recurrences of delta nets and of Mamba-2 in torch, token by token: the reference of compiled kernels.

Sums have one order, and functions of single values are polynomials. So results have the same bits on every processor.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

_LOG2_E = 1.4426950408889634

#: Number of lanes of a norm's sums.
_NUM_LANES = 16


class Stop(NamedTuple):
    """A place (value heads, key_dim, value_dim) for the state behind the first ``num_tokens`` rows of a sequence."""

    num_tokens: int
    state: Tensor


class RecurrentRows(NamedTuple):
    """Rows of one sequence: ``num_tokens`` rows from ``row`` on. ``before`` is the state before; None means zeros."""

    row: int
    num_tokens: int
    before: Tensor | None
    stops: Sequence[Stop]


def recur(
    rows: Sequence[RecurrentRows],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    decay: Tensor,
    beta: Tensor,
    *,
    is_additive: bool,
) -> Tensor:
    """Return S query for each row, and write the states at the stops. S is a matrix (keys, values) of each value head.

    A row makes S decay, and then adds key (value - S key) beta, or key value beta if ``is_additive``.

    ``query`` and ``key`` are (num_tokens, value heads, key_dim), ``value`` and the result (num_tokens, value heads,
    value_dim), ``decay`` and ``beta`` (num_tokens, value heads), in fp32. ``key_dim`` is a power of two.
    """
    results = torch.empty_like(value)
    for part in rows:
        state = value.new_zeros(value.shape[1], key.shape[2], value.shape[2]) if part.before is None else part.before
        stops = {stop.num_tokens: stop.state for stop in part.stops}
        for number in range(1, part.num_tokens + 1):
            row = part.row + number - 1
            state = state * decay[row, :, None, None]
            own_key = key[row, :, :, None]
            own_value = value[row] if is_additive else value[row] - tree_sum(state * own_key)
            delta = own_value * beta[row, :, None]
            state = state + own_key * delta[:, None]
            results[row] = tree_sum(state * query[row, :, :, None])
            if number in stops:
                stops[number].copy_(state)
    return results


def tree_sum(terms: Tensor) -> Tensor:
    """Return the sum over the dimension before the last, a power of two, in one order."""
    while (half := terms.shape[-2] // 2) > 0:
        terms = terms[..., :half, :] + terms[..., half:, :]
    return terms[..., 0, :]


def normed(rows: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """Return rows divided by their root mean square, times a weight."""
    size = rows.shape[-1]
    squares = functional.pad(rows * rows, (0, -size % _NUM_LANES)).view(*rows.shape[:-1], -1, _NUM_LANES)
    total = torch.zeros_like(squares[..., 0, :])
    for lanes in squares.unbind(-2):
        total = total + lanes
    return rows * torch.rsqrt(tree_sum(total[..., None]) / size + epsilon) * weight


def exp(x: Tensor) -> Tensor:
    """Return e^x to 2e-7 in fp32, exactly 1 for 0."""
    return _exp2(x * _LOG2_E)


def sigmoid(x: Tensor) -> Tensor:
    """Return 1 / (1 + e^-x)."""
    return 1.0 / (exp(-x) + 1.0)


def silu(x: Tensor) -> Tensor:
    """Return x / (1 + e^-x)."""
    return x / (exp(-x) + 1.0)


def softplus(x: Tensor) -> Tensor:
    """Return log(1 + e^x) to 3e-7 in fp32."""
    y = exp(-x.abs())
    s = y / (y + 2.0)
    t = s * s  # log(1 + y) is 2 atanh(s)
    series = torch.full_like(t, 1 / 15)
    for odd in range(13, 0, -2):
        series = series * t + 1 / odd
    return x.clamp(min=0.0) + s * 2.0 * series


def _exp2(x: Tensor) -> Tensor:
    """Compute as ``exp2`` in ``csrc/ordered/vec.h``."""
    magic = torch.tensor(1.5 * 2**23)  # a float of this size has no fraction
    shifted = x.clamp(-127.0, 128.0) + magic
    part = x.clamp(-127.0, 128.0) - (shifted - magic)
    y = torch.full_like(part, 0.0013264728)
    for factor in (0.009671514, 0.055507336, 0.24022242, 0.693147, 1.0):
        y = y * part + factor
    whole = shifted.view(torch.int32) - magic.view(torch.int32)
    half = whole >> 1
    y = y * ((half + 127) << 23).view(torch.float32) * ((whole - half + 127) << 23).view(torch.float32)
    return torch.where(x < -126.0, 0.0, y)
