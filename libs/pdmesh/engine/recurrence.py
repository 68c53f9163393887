"""Recurrences of delta nets and of Mamba-2, token by token: in torch, and by compiled kernels with the same bits."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from pdmesh.engine.levels import FOLDER, CpuLevel, open_library, processor_levels

_POINTER, _INT = ctypes.c_void_p, ctypes.c_int64

#: The kernel's sums begin with this number of keys.
_NUM_LEAVES = 8


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


class Recurrence(Protocol):
    """A gated delta rule, for one matrix S (keys, values) of each value head."""

    def __call__(
        self,
        rows: Sequence[RecurrentRows],
        query: Tensor,
        key: Tensor,
        value: Tensor,
        decay: Tensor,
        beta: Tensor,
        *,
        is_additive: bool = False,
    ) -> Tensor:
        """Return S query for each row, and write the states at the stops.

        A row makes S decay, and then adds key (value - S key) beta, or key value beta if ``is_additive``.

        ``query`` and ``key`` are (num_tokens, key heads, key_dim), with as many neighbouring value heads for each.
        ``value`` and the result are (num_tokens, value heads, value_dim). ``decay`` and ``beta`` are (num_tokens, value
        heads). All are contiguous, in fp32. ``key_dim`` is a power of two.
        """
        ...


def tree_sum(terms: Tensor) -> Tensor:
    """Return the sum over the dimension before the last, a power of two, in one order."""
    while (half := terms.shape[-2] // 2) > 0:
        terms = terms[..., :half, :] + terms[..., half:, :]
    return terms[..., 0, :]


def recur_by_torch(
    rows: Sequence[RecurrentRows],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    decay: Tensor,
    beta: Tensor,
    *,
    is_additive: bool = False,
) -> Tensor:
    """Advance states as `Recurrence` describes: the reference."""
    results = torch.empty_like(value)
    repeats = value.shape[1] // key.shape[1]
    query, key = query.repeat_interleave(repeats, dim=1), key.repeat_interleave(repeats, dim=1)
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


@dataclass(frozen=True, slots=True)
class RecurrenceKernel:
    """`Recurrence` by one level's ``csrc/ordered/recurrence.cpp``. All levels give the same bits."""

    function: Callable[..., None]

    def __call__(
        self,
        rows: Sequence[RecurrentRows],
        query: Tensor,
        key: Tensor,
        value: Tensor,
        decay: Tensor,
        beta: Tensor,
        *,
        is_additive: bool = False,
    ) -> Tensor:
        if key.shape[2] < _NUM_LEAVES:
            return recur_by_torch(rows, query, key, value, decay, beta, is_additive=is_additive)
        results = torch.empty_like(value)
        slices: list[tuple[int, int, int, int, int]] = []
        stops: list[tuple[int, int]] = []
        for part in rows:
            before = 0 if part.before is None else part.before.data_ptr()
            slices.append((part.row, part.num_tokens, before, len(stops), len(part.stops)))
            stops += [(stop.num_tokens, stop.state.data_ptr()) for stop in part.stops]
        slice_fields, stop_fields = np.array(slices, dtype=np.int64), np.array(stops, dtype=np.int64)
        self.function(
            slice_fields.ctypes.data,
            len(slices),
            stop_fields.ctypes.data,
            *(each.data_ptr() for each in (query, key, value, decay, beta, results)),
            key.shape[1],
            value.shape[1],
            key.shape[2],
            value.shape[2],
            is_additive,
            torch.get_num_threads(),
        )
        return results


@cache
def fastest_recurrence() -> Recurrence:
    """Return the fastest compiled kernel for this processor, or the reference if none was compiled."""
    found = (load_recurrence_kernel(level) for level in processor_levels() if level.is_ordered)
    return next((kernel for kernel in found if kernel is not None), recur_by_torch)


def load_recurrence_kernel(level: CpuLevel, folder: Path = FOLDER) -> RecurrenceKernel | None:
    """Load an ordered level's kernel, or return None if it was not compiled. The processor must have the level."""
    library = open_library(level, folder)
    if library is None or not hasattr(library, "pdmesh_recurrence"):
        return None
    function = library.pdmesh_recurrence
    function.argtypes, function.restype = [_POINTER, _INT, *[_POINTER] * 7, *[_INT] * 6], None
    return RecurrenceKernel(function)
