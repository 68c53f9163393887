"""Fused Triton kernels for the operations between matrix products. Each reads and writes its tensors once.

Rounding follows `pdmesh.engine.kernels.TorchKernels`. Only the rotation differs: its products are summed before the
result is rounded.
"""

# Triton comes only with torch for CUDA. A type checker cannot see what the decorator makes of these functions.
# pyright: reportMissingImports=false, reportIndexIssue=false

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from pdmesh.engine.kernels import Elementwise, Rotation, TorchKernels
from pdmesh.engine.model_config import Activation, NormKind

#: Number of values of a row that one program computes.
_TILE = 1024


# One program per row. WIDTH is a power of two, at least size.
@triton.jit
def _add_norm_kernel(hidden, delta, weight, normed, size, epsilon, HAS_DELTA: tl.constexpr, WIDTH: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * size
    column = tl.arange(0, WIDTH)
    inside = column < size
    values = tl.load(hidden + row + column, inside, other=0.0)
    if HAS_DELTA:
        added = tl.load(delta + row + column, inside, other=0.0).to(tl.float32)
        values = (values.to(tl.float32) + added).to(values.dtype)
        tl.store(hidden + row + column, values, inside)
    wide = values.to(tl.float32)
    wide = wide / tl.sqrt(tl.sum(wide * wide, axis=0) / size + epsilon)
    scale = tl.load(weight + column, inside, other=0.0).to(tl.float32)
    scaled = wide.to(values.dtype).to(tl.float32) * scale
    tl.store(normed + row + column, scaled.to(values.dtype), inside)


# One program per token. The widths are powers of two: at least half a head, and at least the number of heads.
@triton.jit
def _rotate_and_store_kernel(
    qkv,
    cos,
    sin,
    slots,
    cache,
    num_heads,
    num_kv_heads,
    block_size,
    HALF: tl.constexpr,
    HALF_WIDTH: tl.constexpr,
    HEADS_WIDTH: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    head = tl.arange(0, HEADS_WIDTH)[:, None]
    lane = tl.arange(0, HALF_WIDTH)[None, :]
    total_heads = num_heads + 2 * num_kv_heads
    inside = (head < total_heads) & (lane < HALF)
    place = qkv + (token * total_heads + head) * (2 * HALF) + lane
    first, second = tl.load(place, inside, other=0.0), tl.load(place + HALF, inside, other=0.0)
    x, y = first.to(tl.float32), second.to(tl.float32)
    angle = token * HALF + lane
    cosine = tl.load(cos + angle, lane < HALF, other=0.0).to(tl.float32)
    sine = tl.load(sin + angle, lane < HALF, other=0.0).to(tl.float32)
    is_rotated = head < num_heads + num_kv_heads
    turned_first = tl.where(is_rotated, x * cosine - y * sine, x).to(first.dtype)
    turned_second = tl.where(is_rotated, y * cosine + x * sine, y).to(first.dtype)
    is_query = inside & (head < num_heads)
    tl.store(place, turned_first, is_query)
    tl.store(place + HALF, turned_second, is_query)
    slot = tl.load(slots + token).to(tl.int64)
    # The cache has keys, then values. The heads of a block are in the order of the row.
    row = (slot // block_size * (2 * num_kv_heads) + (head - num_heads)) * block_size + slot % block_size
    stored = cache + row * (2 * HALF) + lane
    is_stored = inside & (head >= num_heads)
    tl.store(stored, turned_first, is_stored)
    tl.store(stored + HALF, turned_second, is_stored)


# One program per WIDTH values of a row.
@triton.jit
def _gated_silu_kernel(gate_up, output, size, WIDTH: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    inside = column < size
    gate = tl.load(gate_up + row * 2 * size + column, inside, other=0.0)
    up = tl.load(gate_up + row * 2 * size + size + column, inside, other=0.0)
    wide = gate.to(tl.float32)
    activated = (wide / (1 + tl.exp(-wide))).to(gate.dtype).to(tl.float32)
    tl.store(output + row * size + column, (activated * up.to(tl.float32)).to(gate.dtype), inside)


# One program per WIDTH pages of a sequence.
@triton.jit
def _write_pages_kernel(table, rows, indptr, pages, table_width, WIDTH: tl.constexpr):
    sequence = tl.program_id(0)
    first = tl.load(indptr + sequence)
    column = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    inside = column < tl.load(indptr + sequence + 1) - first
    row = tl.load(rows + sequence).to(tl.int64) * table_width
    tl.store(pages + first + column, tl.load(table + row + column, inside, other=0), inside)


def write_pages_kernel(table: Tensor, rows: Tensor, indptr: Tensor, pages: Tensor) -> None:
    """Write pages as `pdmesh.engine.cuda.page_tables.PageWriter` requires, with Triton."""
    width = table.shape[1]
    _write_pages_kernel[(len(rows), triton.cdiv(width, _TILE))](table, rows, indptr, pages, width, WIDTH=_TILE)


@dataclass(frozen=True, slots=True)
class TritonKernels:
    """`pdmesh.engine.kernels.Kernels` in Triton, partly in place, for contiguous rows."""

    kinds: Elementwise

    def add_norm(
        self, hidden: Tensor, delta: Tensor | None, weight: Tensor, bias: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        if self.kinds.norm.kind is not NormKind.RMS or self.kinds.norm.in_float32:
            return TorchKernels(self.kinds).add_norm(hidden, delta, weight, bias)
        normed = hidden.new_empty(hidden.shape)
        size = hidden.shape[-1]
        width = triton.next_power_of_2(size)
        _add_norm_kernel[(hidden.numel() // size,)](
            hidden,
            hidden if delta is None else delta,
            weight,
            normed,
            size,
            self.kinds.norm.epsilon,
            HAS_DELTA=delta is not None,
            WIDTH=width,
            num_warps=min(16, max(1, width // 512)),
        )
        return hidden, normed

    def norm(self, rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        _, normed = self.add_norm(rows, None, weight, bias)
        return normed

    def norm_heads(self, heads: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return self.norm(heads.contiguous(), weight, bias)

    def gate(self, rows: Tensor, gates: Tensor) -> Tensor:
        return TorchKernels(self.kinds).gate(rows, gates)

    def rotate_and_store(self, qkv: Tensor, num_heads: int, rotation: Rotation, cache: Tensor) -> Tensor:
        num_kv_heads, block_size, head_dim = cache.shape[2:]
        _rotate_and_store_kernel[(len(qkv),)](
            qkv,
            rotation.cos,
            rotation.sin,
            rotation.slots,
            cache,
            num_heads,
            num_kv_heads,
            block_size,
            HALF=head_dim // 2,
            HALF_WIDTH=triton.next_power_of_2(head_dim // 2),
            HEADS_WIDTH=triton.next_power_of_2(qkv.shape[1]),
            num_warps=8,
        )
        return qkv[:, :num_heads]

    def activate(self, rows: Tensor) -> Tensor:
        if self.kinds.activation is not Activation.SILU or not self.kinds.is_gated:
            return TorchKernels(self.kinds).activate(rows)
        gate_up, size = rows, rows.shape[-1] // 2
        output = gate_up.new_empty(*gate_up.shape[:-1], size)
        _gated_silu_kernel[(gate_up.numel() // (2 * size), triton.cdiv(size, _TILE))](
            gate_up, output, size, WIDTH=_TILE
        )
        return output
