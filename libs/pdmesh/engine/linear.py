"""Linear layers: plain torch, or with the weight in the order that one machine's matrix products read fastest."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from pdmesh.engine.native import load_kernels, tiles_multiply

#: Rows that oneDNN's order is tuned for; any number may follow.
_PACKED_FOR_ROWS = 512


class Linear(Protocol):
    @property
    def row_by_row(self) -> bool:
        """Whether a row's result depends on that row alone, to the last bit, and not on how many there are."""
        ...

    def __call__(self, rows: Tensor) -> Tensor:
        """(num_rows, inputs) to (num_rows, outputs)."""
        ...


@dataclass(frozen=True, slots=True)
class PlainLinear:
    """For any device and dtype. ``weight`` (outputs, inputs), and perhaps ``bias`` (outputs,)."""

    weight: Tensor
    bias: Tensor | None
    row_by_row = False

    def __call__(self, rows: Tensor) -> Tensor:
        return functional.linear(rows, self.weight, self.bias)


@dataclass(frozen=True, slots=True)
class OneDnnLinear:
    """bf16 on any CPU; ``weight`` is in oneDNN's own order."""

    weight: Tensor
    bias: Tensor | None
    row_by_row = False

    def __call__(self, rows: Tensor) -> Tensor:
        product: Tensor = torch.ops.mkldnn._linear_pointwise(rows, self.weight, self.bias, "none", [], "")
        return product


@dataclass(frozen=True, slots=True)
class TileLinear:
    """bf16 on processors with AMX; ``weight`` is in the order of ``csrc/linear.cpp``.

    Decodes need it: it reads weights at the memory's speed, oneDNN at half of it (8 to 32 rows, Xeon, 2026-11).
    """

    library: ctypes.CDLL
    weight: Tensor
    bias: Tensor | None
    row_by_row = True

    def __call__(self, rows: Tensor) -> Tensor:
        num_outputs, num_inputs = self.weight.shape
        rows = rows.contiguous()
        output = rows.new_empty(len(rows), num_outputs)
        self.library.pdmesh_linear(
            rows.data_ptr(),
            self.weight.data_ptr(),
            None if self.bias is None else self.bias.data_ptr(),
            output.data_ptr(),
            len(rows),
            num_outputs,
            num_inputs,
            torch.get_num_threads(),
        )
        return output


def fastest_linear(weight: Tensor, bias: Tensor | None) -> Linear:
    """A layer that computes with ``weight`` as fast as this machine can; it need not keep the tensor it is given."""
    if weight.dtype != torch.bfloat16 or not weight.is_cpu:
        return PlainLinear(weight, bias)
    num_outputs, num_inputs = weight.shape
    library = load_kernels()
    if library is not None and tiles_multiply(library) and num_outputs % 32 == num_inputs % 32 == 0:
        packed = torch.empty_like(weight)
        library.pdmesh_pack_linear(weight.data_ptr(), packed.data_ptr(), num_outputs, num_inputs)
        return TileLinear(library, packed, bias)
    reorder = getattr(torch.ops.mkldnn, "_reorder_linear_weight", None)
    return PlainLinear(weight, bias) if reorder is None else OneDnnLinear(reorder(weight, _PACKED_FOR_ROWS), bias)
