"""Matrix products of one row in Triton. A single decode needs them: it reads every weight once and computes little.

Libraries split such a product for their matrix units. Weights of Llama-3-8B's shapes, read row by row, arrive at 2.7 to
3.2 TB/s; cuBLAS reaches 2.1 to 2.9 (H100, 2026-11-23: 4.8 ms instead of 5.4 for all layers).
"""

# Triton comes only with torch for CUDA. A type checker cannot see what the decorator makes of these functions.
# pyright: reportMissingImports=false, reportIndexIssue=false

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional

#: Measured tiles: inputs that a program reads at a time, outputs of a program, warps. The first tile that divides the
#: inputs is used.
_TILES = ((4096, 1, 8), (2048, 4, 4), (1024, 8, 8), (512, 16, 4))


# One program per OUTPUTS outputs. INPUTS divides NUM_INPUTS.
@triton.jit
def _row_kernel(
    row,
    weight,
    bias,
    output,
    num_outputs,
    NUM_INPUTS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    INPUTS: tl.constexpr,
    OUTPUTS: tl.constexpr,
):
    number = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    lane = tl.arange(0, INPUTS)
    inside = number < num_outputs
    place = weight + number.to(tl.int64)[:, None] * NUM_INPUTS + lane[None, :]
    sums = tl.zeros((OUTPUTS, INPUTS), tl.float32)
    for first in range(0, NUM_INPUTS, INPUTS):
        weights = tl.load(place + first, inside[:, None], other=0.0, eviction_policy="evict_first")
        values = tl.load(row + first + lane).to(tl.float32)
        sums += weights.to(tl.float32) * values[None, :]
    result = tl.sum(sums, axis=1)
    if HAS_BIAS:
        result += tl.load(bias + number, inside, other=0.0).to(tl.float32)
    tl.store(output + number, result.to(output.dtype.element_ty), inside)


@dataclass(frozen=True, slots=True)
class RowLinear:
    """`pdmesh.engine.linear.Vocabulary` in bf16 on a device. The kernel above multiplies one row, and torch several."""

    weight: Tensor  # (outputs, inputs), contiguous
    bias: Tensor | None
    row_by_row = False

    def __call__(self, rows: Tensor, *, wide: bool = False) -> Tensor:
        if len(rows) == 1:
            return self._multiply_row(rows, torch.float32 if wide else rows.dtype)
        if wide:
            return torch.mm(rows, self.weight.t(), out_dtype=torch.float32)
        return functional.linear(rows, self.weight, self.bias)

    def embed(self, token_ids: Tensor) -> Tensor:
        return functional.embedding(token_ids, self.weight)

    def _multiply_row(self, rows: Tensor, dtype: torch.dtype) -> Tensor:
        num_outputs, num_inputs = self.weight.shape
        inputs, outputs, num_warps = next(tile for tile in _TILES if num_inputs % tile[0] == 0)
        output = rows.new_empty(1, num_outputs, dtype=dtype)
        _row_kernel[(triton.cdiv(num_outputs, outputs),)](
            rows.contiguous(),
            self.weight,
            output if self.bias is None else self.bias,
            output,
            num_outputs,
            NUM_INPUTS=num_inputs,
            HAS_BIAS=self.bias is not None,
            INPUTS=inputs,
            OUTPUTS=outputs,
            num_warps=num_warps,
        )
        return output


def row_linear(weight: Tensor, bias: Tensor | None) -> RowLinear | None:
    """Return a row-by-row layer, or None if the dtype or the shape does not suit the kernel."""
    suits = weight.dtype == torch.bfloat16 and weight.is_contiguous() and weight.shape[1] % _TILES[-1][0] == 0
    return RowLinear(weight, bias) if suits else None
