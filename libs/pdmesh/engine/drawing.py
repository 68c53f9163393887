"""Compiled kernels that draw tokens. `pdmesh.engine.sampler` is their reference, and the fallback in torch."""

from __future__ import annotations

import array
import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import numpy.typing as npt

from pdmesh.engine.levels import FOLDER, CpuLevel, open_library, processor_levels

_POINTER, _INT = ctypes.c_void_p, ctypes.c_int64


@dataclass(frozen=True, slots=True)
class DrawKernels:
    """The functions of one level's ``csrc/ordered/draw.cpp``. All levels give the same results."""

    level: CpuLevel
    _draw: Callable[..., None]
    _top: Callable[..., None]
    _keep_allowed: Callable[..., None]
    _penalize_repetition: Callable[..., None]
    _penalize_counts: Callable[..., None]

    def draw(
        self,
        row_addresses: npt.NDArray[np.int64],
        settings: npt.NDArray[np.float64],
        step_weights: npt.NDArray[np.float64],
        *,
        vocab_size: int,
        num_threads: int,
    ) -> list[int]:
        """Draw the next token of each row of logits, -1 for rows that only torch can draw.

        ``row_addresses`` are addresses of contiguous fp32 rows. ``settings`` and ``step_weights`` are the results of
        `row_settings` and `step_weights` in `pdmesh.engine.sampler`.
        """
        token_ids = np.empty(len(row_addresses), dtype=np.int64)
        self._draw(
            row_addresses.ctypes.data,
            settings.ctypes.data,
            step_weights.ctypes.data,
            token_ids.ctypes.data,
            len(row_addresses),
            vocab_size,
            num_threads,
        )
        return token_ids.tolist()

    def top(self, logits: npt.NDArray[np.float32], count: int, *, num_threads: int) -> list[list[tuple[int, float]]]:
        """Return the ``count`` most likely tokens of each row, with their logits. Of equal ones, lower ids come first.

        The function is meant for few tokens, because insertion finds their order.
        """
        num_rows, vocab_size = logits.shape
        count = min(count, vocab_size)
        values, ids = np.empty((num_rows, count), dtype=np.float32), np.empty((num_rows, count), dtype=np.int64)
        self._top(logits.ctypes.data, values.ctypes.data, ids.ctypes.data, num_rows, vocab_size, count, num_threads)
        return [list(zip(*row, strict=True)) for row in zip(ids.tolist(), values.tolist(), strict=True)]

    def keep_allowed(self, logits: npt.NDArray[np.float32], allowed: npt.NDArray[np.uint8]) -> None:
        """Set the logits of tokens without a bit in ``allowed`` to -inf, in place. The lowest bit is token 0."""
        self._keep_allowed(logits.ctypes.data, allowed.ctypes.data, len(logits))

    def penalize_repetition(self, logits: npt.NDArray[np.float32], token_ids: array.array[int], penalty: float) -> None:
        """Divide positive logits of ``token_ids`` by ``penalty`` and multiply negative ones, once each, in place."""
        address, num_ids = token_ids.buffer_info()
        self._penalize_repetition(logits.ctypes.data, address, num_ids, len(logits), penalty)

    def penalize_counts(
        self, logits: npt.NDArray[np.float32], token_ids: array.array[int], *, frequency: float, presence: float
    ) -> None:
        """Lower the logits of ``token_ids`` by ``presence``, and by ``frequency`` per occurrence, in place."""
        address, num_ids = token_ids.buffer_info()
        self._penalize_counts(logits.ctypes.data, address, num_ids, len(logits), frequency, presence)


@cache
def draw_kernels() -> DrawKernels | None:
    """Return the fastest compiled kernels for this processor, or None if none were compiled."""
    found = (load_draw_kernels(level) for level in processor_levels() if level.is_ordered)
    return next((kernels for kernels in found if kernels is not None), None)


def load_draw_kernels(level: CpuLevel, folder: Path = FOLDER) -> DrawKernels | None:
    """Load an ordered level's kernels, or return None if they were not compiled. The processor must have the level."""
    if (library := open_library(level, folder)) is None:
        return None

    def function(name: str, arguments: Sequence[type]) -> Callable[..., None]:
        found = library[f"pdmesh_{name}"]
        found.argtypes, found.restype = arguments, None
        return found

    return DrawKernels(
        level,
        function("draw", [*[_POINTER] * 4, *[_INT] * 3]),
        function("top", [*[_POINTER] * 3, *[_INT] * 4]),
        function("keep_allowed", [_POINTER, _POINTER, _INT]),
        function("penalize_repetition", [_POINTER, _POINTER, _INT, _INT, ctypes.c_float]),
        function("penalize_counts", [_POINTER, _POINTER, _INT, _INT, ctypes.c_double, ctypes.c_double]),
    )
