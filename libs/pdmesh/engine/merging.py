"""Merging of attention over ranges of keys: in plain torch, and by compiled kernels."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pdmesh.engine.attention import AttentionOutput
from pdmesh.engine.kernels import by_value
from pdmesh.engine.levels import FOLDER, CpuLevel, open_library, processor_levels

#: Kind of the kernel's arithmetic. Increase its number when a change alters a bit of any result.
MERGE_KIND = "merge-1"

_POINTER, _INT = ctypes.c_void_p, ctypes.c_int64


class RangeResult(NamedTuple):
    """Attention of some rows of a step over one range of keys, in fp32.

    ``output`` is (n, heads, head_dim), and ``lse`` (n, heads). The results of row ``rows[i]`` of the step are at
    ``rows[i] - first``. A ``lse`` of -inf means that the row sees nothing of the range.
    """

    rows: npt.NDArray[np.int64]
    first: int
    output: Tensor
    lse: Tensor


class Merge(Protocol):
    """Merging of the parts of each row, in their order."""

    def __call__(self, parts: Sequence[RangeResult], query: Tensor, *, with_lse: bool) -> AttentionOutput:
        """Return results of the shape and dtype of ``query``. Each row sees a key of some part."""
        ...


def merge_by_torch(parts: Sequence[RangeResult], query: Tensor, *, with_lse: bool) -> AttentionOutput:
    """Merge as `Merge` describes: the reference."""
    peak = query.new_full(query.shape[:2], -torch.inf, dtype=torch.float32)
    total, output = torch.zeros_like(peak), query.new_zeros(query.shape, dtype=torch.float32)
    placed = [(torch.from_numpy(part.rows), torch.from_numpy(part.rows - part.first), part) for part in parts]
    for rows, places, part in placed:
        peak[rows] = torch.maximum(peak[rows], part.lse[places])
    for rows, places, part in placed:
        weights = by_value(torch.exp, part.lse[places] - peak[rows])
        total[rows] += weights
        output[rows] += part.output[places] * weights[..., None]
    lse = peak + by_value(torch.log, total) if with_lse else None
    return AttentionOutput((output / total[..., None]).to(query.dtype), lse)


@dataclass(frozen=True, slots=True)
class MergeKernel:
    """`Merge` by one level's ``csrc/ordered/merge.cpp``. All levels give the same bits."""

    functions: dict[torch.dtype, Callable[..., None]]

    def __call__(self, parts: Sequence[RangeResult], query: Tensor, *, with_lse: bool) -> AttentionOutput:
        output = torch.empty(query.shape, dtype=query.dtype)
        lse = torch.empty(query.shape[:2], dtype=torch.float32) if with_lse else None
        fields = np.array(
            [
                (part.output.data_ptr(), part.lse.data_ptr(), part.rows.ctypes.data, len(part.rows), part.first)
                for part in parts
            ],
            dtype=np.int64,
        )
        self.functions[query.dtype](
            fields.ctypes.data,
            len(parts),
            output.data_ptr(),
            None if lse is None else lse.data_ptr(),
            *query.shape,
            torch.get_num_threads(),
        )
        return AttentionOutput(output, lse)


@cache
def merge_kernel() -> MergeKernel | None:
    """Return the fastest compiled kernel for this processor, or None if none was compiled."""
    found = (load_merge_kernel(level) for level in processor_levels() if level.is_ordered)
    return next((kernel for kernel in found if kernel is not None), None)


def load_merge_kernel(level: CpuLevel, folder: Path = FOLDER) -> MergeKernel | None:
    """Load an ordered level's kernel, or return None if it was not compiled. The processor must have the level."""
    if (library := open_library(level, folder)) is None:
        return None

    def function(suffix: str) -> Callable[..., None]:
        found = library[f"pdmesh_merge{suffix}"]
        found.argtypes, found.restype = [_POINTER, _INT, _POINTER, _POINTER, *[_INT] * 4], None
        return found

    return MergeKernel({torch.bfloat16: function(""), torch.float16: function("_f16")})
