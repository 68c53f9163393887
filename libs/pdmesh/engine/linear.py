"""Linear layers: plain torch, or with the weight in the order that one machine's matrix products read fastest."""

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

#: Rows that oneDNN's order is tuned for; any number may follow.
_PACKED_FOR_ROWS = 512
#: From so many rows on, products in fp32 are faster than those in bf16, the copies of weights included: 2 times at 8
#: rows, 4 at 32, 7 at 512; at 4 to 64 rows even faster than with a weight that lies in fp32 (Zen 3, 2026-11).
_WIDENED_FROM_ROWS = 4
#: Of a weight, copied at once: what stays in the processor's caches until it is multiplied.
_PANEL_ELEMENTS = 1 << 19
#: Of one piece of memory for packed weights, unless a weight has more.
_PIECE_BYTES = 1 << 26
_LINE_BYTES = 64  # of a cache line
TILE_SIZE = 32  # inputs and outputs of packed weights come in so many


class Linear(Protocol):
    """A matrix product with a weight of the checkpoint."""

    @property
    def row_by_row(self) -> bool:
        """Whether a row's result depends on that row alone, to the last bit, and not on how many there are."""
        ...

    def __call__(self, rows: Tensor, *, wide: bool = False) -> Tensor:
        """(num_rows, inputs) to (num_rows, outputs): in the rows' dtype, or if ``wide`` in fp32, as they are summed."""
        ...


class Vocabulary(Linear, Protocol):
    """A layer with an output for each token; where embeddings are tied, the embedding too."""

    def embed(self, token_ids: Tensor) -> Tensor:
        """Rows of the weight, (num_tokens, inputs), not rounded. Raises IndexError for an id that is none."""
        ...


@dataclass(frozen=True, slots=True)
class PlainLinear:
    """A layer for any device and dtype. ``weight`` (outputs, inputs), and perhaps ``bias`` (outputs,)."""

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
    """bf16 on a CPU without bf16 products: ``weight`` stays bf16, and rows multiply fp32 copies of its panels."""

    def __call__(self, rows: Tensor, *, wide: bool = False) -> Tensor:
        if not wide and rows.shape[0] < _WIDENED_FROM_ROWS:
            return functional.linear(rows, self.weight, self.bias)
        return widened_linear(rows, self.weight, self.bias, torch.float32 if wide else rows.dtype)


def widened_linear(rows: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Multiply in fp32 on a CPU, by copies of the weight's panels; each result is rounded once, to ``dtype``."""
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
    """bf16 where oneDNN multiplies it; ``weight`` is in oneDNN's own order."""

    weight: Tensor
    bias: Tensor | None
    row_by_row = False

    def __call__(self, rows: Tensor, *, wide: bool = False) -> Tensor:
        product: Tensor = torch.ops.mkldnn._linear_pointwise(rows, self.weight, self.bias, "none", [], "")
        return product.float() if wide else product  # oneDNN has rounded


@dataclass(frozen=True, slots=True)
class TileLinear:
    """A linear layer by compiled kernels, in bf16 or float16; `tile_linear` orders ``weight`` as ``csrc`` wants.

    Decodes need it: it reads weights at the memory's speed, oneDNN at half of it (8 to 32 rows, Xeon, 2026-11).
    """

    library: KernelLibrary
    weight: Tensor  # packed, (outputs, inputs), each a multiple of 32
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
        return output[:, : self.num_outputs].contiguous()

    def embed(self, token_ids: Tensor) -> Tensor:
        check_token_ids(token_ids, self.num_outputs)
        output = self.weight.new_empty(len(token_ids), self.weight.shape[1])
        self.library.unpack_rows(
            self.weight.data_ptr(), token_ids.data_ptr(), output.data_ptr(), len(token_ids), self.weight.shape[1]
        )
        return output[:, : self.num_inputs].contiguous()


def tile_linear(weight: Tensor, bias: Tensor | None, memory: WeightMemory, library: KernelLibrary) -> TileLinear:
    """Packs a weight (outputs, inputs) of any shape, padded with zeros: these change no sum."""
    num_outputs, num_inputs = weight.shape
    padded = padded_to(weight, *(-(-size // TILE_SIZE) * TILE_SIZE for size in weight.shape))
    if bias is not None:
        bias = functional.pad(bias, (0, padded.shape[0] - num_outputs))
    packed = memory.like(padded)
    library.pack_linear(padded.contiguous().data_ptr(), packed.data_ptr(), *padded.shape)
    return TileLinear(library, packed, bias, num_outputs, num_inputs)


def check_token_ids(token_ids: Tensor, vocab_size: int) -> None:
    """Raise IndexError, since kernels would read what lies beyond, unless all ids are of the vocabulary."""
    lowest, highest = token_ids.aminmax()
    if lowest < 0 or highest >= vocab_size:
        raise IndexError(f"token ids {int(lowest)} … {int(highest)} in a vocabulary of {vocab_size}")


def padded_to(matrix: Tensor, num_rows: int, num_columns: int) -> Tensor:
    """Return ``matrix`` padded with zeros; itself where nothing is missing."""
    missing = (0, num_columns - matrix.shape[1], 0, num_rows - matrix.shape[0])
    return functional.pad(matrix, missing) if any(missing) else matrix


class WeightMemory:
    """Memory of packed weights, in pieces so large that the system gives pages of 2 MiB: numpy asks it to.

    Through pages of 4 KiB, a decode reads weights a quarter slower (EPYC Zen 5 in a VM, 2026-11).
    """

    def __init__(self) -> None:
        self._free = torch.empty(0, dtype=torch.uint8)

    def like(self, weight: Tensor) -> Tensor:
        """Uninitialized, of ``weight``'s shape and dtype; begins at a cache line."""
        return self.bytes(weight.nbytes).view(weight.dtype).view(weight.shape)

    def bytes(self, num_bytes: int) -> Tensor:
        """So many bytes, uninitialized; they begin at a cache line."""
        taken = -(-num_bytes // _LINE_BYTES) * _LINE_BYTES
        if taken > len(self._free):
            # what was not written yet has no pages, so nothing is lost with the rest of a piece
            raw = np.empty(max(taken, _PIECE_BYTES) + _LINE_BYTES, dtype=np.uint8)
            self._free = torch.from_numpy(raw[-raw.ctypes.data % _LINE_BYTES :])
        given, self._free = self._free[:num_bytes], self._free[taken:]
        return given


def fastest_linear(weight: Tensor, bias: Tensor | None, memory: WeightMemory, library: KernelLibrary | None) -> Linear:
    """A layer that computes with ``weight`` as fast as this machine can; it need not keep the tensor it is given.

    ``library`` has kernels for the weight's dtype.
    """
    if (own := _own_linear(weight, bias, memory, library)) is not None:
        return own
    if weight.dtype == torch.bfloat16 and weight.is_cpu and onednn_multiplies_bf16():
        return OneDnnLinear(torch.ops.mkldnn._reorder_linear_weight(weight, _PACKED_FOR_ROWS), bias)
    return _torch_linear(weight, bias)


def fastest_vocabulary(weight: Tensor, memory: WeightMemory, library: KernelLibrary | None) -> Vocabulary:
    """`fastest_linear` for a vocabulary: oneDNN's order does not give rows back."""
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
    """Return a layer computed by a kernel of our own, if there is one."""
    if weight.is_cuda and has_triton():
        from pdmesh.engine.cuda.cuda_linear import row_linear  # only where there is a device

        return row_linear(weight, bias)
    return None if library is None else tile_linear(weight, bias, memory, library)
