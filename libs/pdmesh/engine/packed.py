"""Linear layers by compiled kernels, with weights that stay packed in memory: codes of 4 to 8 bits and their scales.

If codes are integers, sums of products are scaled. Other codes give the bits of plain weights (`CodeKind.is_rounded`).
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from pdmesh.engine.grouped import Factors, GroupedWeight, padded_factors
from pdmesh.engine.kv_cache import TORCH_DTYPES
from pdmesh.engine.levels import KernelLibrary
from pdmesh.engine.linear import TILE_SIZE, Linear, WeightMemory, check_token_ids, padded_to

#: Name of this arithmetic in an arithmetic class: sums of products with codes are scaled, and weights are not rounded.
#: Increase the number when a change of the kernels changes a bit of any result.
PACKED_KIND = "packed-1"

_BASE_TYPES = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2, torch.uint8: 3}


class _Factors(ctypes.Structure):
    """The struct of the same name in ``csrc/packed.h``."""

    _fields_ = (
        ("bases", ctypes.c_void_p),
        ("base_type", ctypes.c_int64),
        ("groups_per_base", ctypes.c_int64),
        ("multipliers", ctypes.c_void_p),
        ("table", ctypes.c_void_p),
        ("offsets", ctypes.c_void_p),
    )


class _PackedWeight(ctypes.Structure):
    """The struct of the same name in ``csrc/packed.h``."""

    _fields_ = (
        ("codes", ctypes.c_void_p),
        ("bits", ctypes.c_int64),
        ("kind", ctypes.c_int64),
        ("group_size", ctypes.c_int64),
        ("scales", _Factors),
        ("minima", _Factors),
        ("table", ctypes.c_void_p),
    )


@dataclass(frozen=True, slots=True)
class PackedLinear:
    """A linear layer, or a vocabulary, with packed weights in the library's dtype; made by `packed_linear`.

    ``is_rounded``: weights are rounded to the library's dtype, as plain ones are. ``memory`` has the tensors that
    ``weight`` points to. ``order`` permutes inputs.
    """

    library: KernelLibrary
    is_rounded: bool
    weight: _PackedWeight
    memory: tuple[Tensor, ...]
    bias: Tensor | None
    order: Tensor | None
    num_outputs: int
    num_inputs: int
    row_by_row = True

    def __call__(self, rows: Tensor, *, wide: bool = False) -> Tensor:
        if self.order is not None:
            rows = rows[:, self.order]
        num_rows, num_outputs, num_inputs = len(rows), _rounded_up(self.num_outputs), _rounded_up(self.num_inputs)
        rows = padded_to(rows, num_rows, num_inputs).contiguous()
        output = rows.new_empty(num_rows, num_outputs, dtype=torch.float32 if wide else None)
        multiply = self.library.linear_rounded if self.is_rounded else self.library.linear_packed
        multiply(
            rows.data_ptr(),
            ctypes.addressof(self.weight),
            None if self.bias is None else self.bias.data_ptr(),
            output.data_ptr(),
            wide,
            num_rows,
            num_outputs,
            num_inputs,
            torch.get_num_threads(),
        )
        return output[:, : self.num_outputs].contiguous()

    def embed(self, token_ids: Tensor) -> Tensor:
        check_token_ids(token_ids, self.num_outputs)
        num_inputs = _rounded_up(self.num_inputs)
        output = torch.empty(len(token_ids), num_inputs)
        self.library.unpack_codes(
            ctypes.addressof(self.weight), token_ids.data_ptr(), output.data_ptr(), len(token_ids), num_inputs
        )
        values = output[:, : self.num_inputs]
        return values.to(TORCH_DTYPES[self.library.dtype]) if self.is_rounded else values


@dataclass(frozen=True, slots=True)
class JoinedLinear:
    """Layers of the same input, with concatenated outputs."""

    parts: tuple[Linear, ...]

    @property
    def row_by_row(self) -> bool:
        return all(part.row_by_row for part in self.parts)

    def __call__(self, rows: Tensor, *, wide: bool = False) -> Tensor:
        return torch.cat([part(rows, wide=wide) for part in self.parts], dim=1)


def packed_linear(
    weight: GroupedWeight, bias: Tensor | None, memory: WeightMemory, library: KernelLibrary
) -> PackedLinear:
    """Return a layer with the packed weight. Zeros pad any shape, and change no sum."""
    num_outputs, num_inputs = weight.codes.shape
    outputs, inputs = _rounded_up(num_outputs), _rounded_up(num_inputs)
    codes = padded_to(weight.codes, outputs, inputs).contiguous()
    packed = memory.bytes(outputs * inputs * weight.bits // 8).zero_()
    library.pack_codes(codes.data_ptr(), packed.data_ptr(), weight.bits, outputs, inputs)
    num_groups = -(-inputs // weight.group_size)
    kept = [packed]

    def address_of(values: Tensor | None) -> int | None:
        if values is None:
            return None
        kept.append(memory.bytes(values.nbytes).copy_(values.contiguous().view(-1).view(torch.uint8)))
        return kept[-1].data_ptr()

    def factors(given: Factors | None) -> _Factors:
        if given is None:
            return _Factors(None, 0, 1, None, None, None)
        padded = padded_factors(given, outputs, num_groups)
        bases = address_of(_by_panel(padded.bases))
        multipliers = None if padded.multipliers is None else address_of(_by_panel(padded.multipliers))
        table, offsets = address_of(padded.table), address_of(padded.offsets)
        return _Factors(bases, _BASE_TYPES[given.bases.dtype], given.groups_per_base, multipliers, table, offsets)

    if bias is not None:
        bias = functional.pad(bias, (0, outputs - num_outputs))
    struct = _PackedWeight(
        packed.data_ptr(), weight.bits, weight.kind, weight.group_size, factors(weight.scales),
        factors(weight.minima), address_of(weight.table),
    )  # fmt: skip
    return PackedLinear(
        library, weight.kind.is_rounded, struct, tuple(kept), bias, weight.order, num_outputs, num_inputs
    )


def joined_linear(parts: Sequence[Linear]) -> Linear:
    """Return the layers as one."""
    return parts[0] if len(parts) == 1 else JoinedLinear(tuple(parts))


def _by_panel(values: Tensor) -> Tensor:
    """Return (outputs, columns) in the kernels' order: for each panel and column, the panel's outputs side by side."""
    return values.view(-1, TILE_SIZE, values.shape[1]).transpose(1, 2)


def _rounded_up(size: int) -> int:
    return -(-size // TILE_SIZE) * TILE_SIZE
