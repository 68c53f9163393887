"""Linear layers: plain torch, or with the weight in the order that this machine's matrix products read fastest."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from pdmesh.engine.bf16 import onednn_multiplies_bf16
from pdmesh.engine.cuda import has_triton
from pdmesh.engine.levels import KernelLibrary

#: Number of rows that oneDNN's order is tuned for. Products may have any number.
_PACKED_FOR_ROWS = 512
#: Least number of rows for which fp32 products are faster than bf16 ones, including the copies of weights: 2 times at 8
#: rows, 4 at 32, 7 at 512. At 4 to 64 rows they are even faster than with a weight stored in fp32 (Zen 3, 2026-11).
_WIDENED_FROM_ROWS = 4
#: Number of a weight's elements that are copied at once. They stay in the processor's caches until they are multiplied.
_PANEL_ELEMENTS = 1 << 19
#: Size of one piece of memory for packed weights, unless a weight is larger.
_PIECE_BYTES = 1 << 26
#: Size of a cache line.
_LINE_BYTES = 64
#: Packed weights have multiples of this number of inputs and of outputs.
TILE_SIZE = 32


class Linear(Protocol):
    """A matrix product with a weight of the checkpoint."""

    @property
    def row_by_row(self) -> bool:
        """Whether a row's result depends on that row alone, to the last bit, and not on the number of rows."""
        ...

    def __call__(self, rows: Tensor, *, wide: bool = False) -> Tensor:
        """Multiply (num_rows, inputs) to (num_rows, outputs), in the rows' dtype or, if ``wide``, the sums' fp32."""
        ...


class Vocabulary(Linear, Protocol):
    """A layer with an output for each token. If embeddings are tied, it is the embedding, too."""

    def embed(self, token_ids: Tensor) -> Tensor:
        """Return rows of the weight, (num_tokens, inputs), not rounded. Raise IndexError for a wrong id."""
        ...


@dataclass(frozen=True, slots=True)
class PlainLinear:
    """A layer for any device and dtype. ``weight`` is (outputs, inputs), and ``bias`` (outputs,) if there is one."""

    weight: Tensor
    bias: Tensor | None
    row_by_row = False

    def __call__(self, rows: Tensor, *, wide: bool = False) -> Tensor:
        if not wide:
            return functional.linear(rows, self.weight, self.bias)
        if rows.is_cuda and rows.dtype != torch.float32:
            return torch.mm(rows, self.weight.t(), out_dtype=torch.float32)
        return widened_linear(rows, self.weight, self.bias, torch.float32)

    def embed(self, token_ids: Tensor) -> Tensor:
        return functional.embedding(token_ids, self.weight)


@dataclass(frozen=True, slots=True)
class WidenedLinear(PlainLinear):
    """A bf16 layer for CPUs without bf16 products: rows multiply fp32 copies of the bf16 weight's panels."""

    def __call__(self, rows: Tensor, *, wide: bool = False) -> Tensor:
        if not wide and rows.shape[0] < _WIDENED_FROM_ROWS:
            return functional.linear(rows, self.weight, self.bias)
        return widened_linear(rows, self.weight, self.bias, torch.float32 if wide else rows.dtype)


def widened_linear(rows: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Multiply in fp32 on a CPU, by copies of the weight's panels. Each result is rounded once, to ``dtype``."""
    if rows.dtype == torch.float32:
        return functional.linear(rows, weight, bias)
    num_outputs, num_inputs = weight.shape
    panel_size = max(1, _PANEL_ELEMENTS // num_inputs)
    panel = rows.new_empty(min(panel_size, num_outputs), num_inputs, dtype=torch.float32)
    output = rows.new_empty(rows.shape[0], num_outputs, dtype=dtype)
    wide = rows.float()
    for first in range(0, num_outputs, panel_size):
        outputs = slice(first, min(first + panel_size, num_outputs))
        copied = panel[: outputs.stop - first].copy_(weight[outputs])
        output[:, outputs] = functional.linear(wide, copied, None if bias is None else bias[outputs].float())
    return output


@dataclass(frozen=True, slots=True)
class OneDnnLinear:
    """A bf16 layer by oneDNN. ``weight`` is in oneDNN's own order."""

    weight: Tensor
    bias: Tensor | None
    row_by_row = False

    def __call__(self, rows: Tensor, *, wide: bool = False) -> Tensor:
        product: Tensor = torch.ops.mkldnn._linear_pointwise(rows, self.weight, self.bias, "none", [], "")
        return product.float() if wide else product  # oneDNN has rounded already


@dataclass(frozen=True, slots=True)
class TileLinear:
    """A linear layer by compiled kernels, in bf16 or float16. `tile_linear` packs ``weight`` in the order of ``csrc``.

    Decodes need it: it reads weights at the memory's speed, oneDNN at half of it (8 to 32 rows, Xeon, 2026-11). Outputs
    and inputs of ``weight`` are multiples of 32.
    """

    library: KernelLibrary
    weight: Tensor
    bias: Tensor | None
    num_outputs: int
    num_inputs: int
    row_by_row = True

    def __call__(self, rows: Tensor, *, wide: bool = False) -> Tensor:
        num_outputs, num_inputs = self.weight.shape
        num_rows = rows.shape[0]
        rows = padded_to(rows, num_rows, num_inputs).contiguous()
        output = rows.new_empty(num_rows, num_outputs, dtype=torch.float32 if wide else None)
        self.library.linear(
            rows.data_ptr(),
            self.weight.data_ptr(),
            None if self.bias is None else self.bias.data_ptr(),
            output.data_ptr(),
            wide,
            num_rows,
            num_outputs,
            num_inputs,
            torch.get_num_threads(),
        )
        return output if num_outputs == self.num_outputs else output[:, : self.num_outputs].contiguous()

    def embed(self, token_ids: Tensor) -> Tensor:
        check_token_ids(token_ids, self.num_outputs)
        output = self.weight.new_empty(len(token_ids), self.weight.shape[1])
        self.library.unpack_rows(
            self.weight.data_ptr(), token_ids.data_ptr(), output.data_ptr(), len(token_ids), self.weight.shape[1]
        )
        return output[:, : self.num_inputs].contiguous()


def tile_linear(weight: Tensor, bias: Tensor | None, memory: WeightMemory, library: KernelLibrary) -> TileLinear:
    """Return a layer with the packed weight (outputs, inputs). Zeros pad any shape, and change no sum."""
    num_outputs, num_inputs = weight.shape
    padded = padded_to(weight, *(-(-size // TILE_SIZE) * TILE_SIZE for size in weight.shape))
    if bias is not None:
        bias = functional.pad(bias, (0, padded.shape[0] - num_outputs))
    packed = memory.like(padded)
    library.pack_linear(padded.contiguous().data_ptr(), packed.data_ptr(), *padded.shape)
    return TileLinear(library, packed, bias, num_outputs, num_inputs)


def check_token_ids(token_ids: Tensor, vocab_size: int) -> None:
    """Raise IndexError unless all ids are in the vocabulary. Kernels would read beyond the weight otherwise."""
    lowest, highest = token_ids.aminmax()
    if lowest < 0 or highest >= vocab_size:
        raise IndexError(f"token ids {int(lowest)} … {int(highest)} in a vocabulary of {vocab_size}")


def padded_to(matrix: Tensor, num_rows: int, num_columns: int) -> Tensor:
    """Return ``matrix`` padded with zeros, or the matrix itself if it has this size."""
    missing = (0, num_columns - matrix.shape[1], 0, num_rows - matrix.shape[0])
    return functional.pad(matrix, missing) if any(missing) else matrix


class WeightMemory:
    """Memory of packed weights, in pieces large enough for pages of 2 MiB. numpy asks the system for these.

    With pages of 4 KiB, a decode reads weights a quarter slower (EPYC Zen 5 in a VM, 2026-11).
    """

    def __init__(self) -> None:
        self._free = torch.empty(0, dtype=torch.uint8)

    def like(self, weight: Tensor) -> Tensor:
        """Return an uninitialized tensor of ``weight``'s shape and dtype that begins at a cache line."""
        return self.bytes(weight.nbytes).view(weight.dtype).view(weight.shape)

    def bytes(self, num_bytes: int) -> Tensor:
        """Return ``num_bytes`` uninitialized bytes that begin at a cache line."""
        taken = -(-num_bytes // _LINE_BYTES) * _LINE_BYTES
        if taken > len(self._free):
            # Unwritten memory has no pages, so the unused rest of a piece costs nothing.
            raw = np.empty(max(taken, _PIECE_BYTES) + _LINE_BYTES, dtype=np.uint8)
            self._free = torch.from_numpy(raw[-raw.ctypes.data % _LINE_BYTES :])
        given, self._free = self._free[:num_bytes], self._free[taken:]
        return given


def fastest_linear(weight: Tensor, bias: Tensor | None, memory: WeightMemory, library: KernelLibrary | None) -> Linear:
    """Return the fastest layer of ``weight`` for this machine. The given tensor may not be kept.

    ``library`` has kernels for the weight's dtype.
    """
    if (own := _own_linear(weight, bias, memory, library)) is not None:
        return own
    if weight.dtype == torch.bfloat16 and weight.is_cpu and onednn_multiplies_bf16():
        return OneDnnLinear(torch.ops.mkldnn._reorder_linear_weight(weight, _PACKED_FOR_ROWS), bias)
    return _torch_linear(weight, bias)


def fastest_vocabulary(weight: Tensor, memory: WeightMemory, library: KernelLibrary | None) -> Vocabulary:
    """Return the fastest layer for a vocabulary. Unlike `fastest_linear`, it can return rows of the weight."""
    return _own_linear(weight, None, memory, library) or _torch_linear(weight, None)


def _torch_linear(weight: Tensor, bias: Tensor | None) -> PlainLinear:
    """Return a torch layer with the weight as it is."""
    narrow = weight.dtype == torch.float16 or (weight.dtype == torch.bfloat16 and not onednn_multiplies_bf16())
    if weight.is_cpu and narrow:
        return WidenedLinear(weight, bias)
    return PlainLinear(weight, bias)


def _own_linear(
    weight: Tensor, bias: Tensor | None, memory: WeightMemory, library: KernelLibrary | None
) -> Vocabulary | None:
    """Return a layer by a kernel of pdmesh (Triton or compiled for the CPU), or None if no kernel suits."""
    if weight.is_cuda and has_triton():
        from pdmesh.engine.cuda.cuda_linear import row_linear

        return row_linear(weight, bias)
    return None if library is None else tile_linear(weight, bias, memory, library)
