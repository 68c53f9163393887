"""Attention, and the operations between a layer's matrix products, by compiled kernels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from pdmesh.engine.attention import AttentionOutput, PartialPlan, QuerySpan
from pdmesh.engine.kernels import Elementwise, Rotation, TorchKernels
from pdmesh.engine.kv_cache import TORCH_DTYPES, num_cache_heads
from pdmesh.engine.levels import CpuLevel, KernelLibrary
from pdmesh.engine.model_config import Activation, ModelConfig, NormKind
from pdmesh.kv_layout import KvLayout, num_blocks_for


def suits(level: CpuLevel, config: ModelConfig, layout: KvLayout) -> bool:
    """Return whether a level's kernels can compute this model and cache: its dtype, head widths and sizes."""
    pages = config.attention_pages if layout.pages else layout.distinct_pages
    widths = [page.head_dim for page in pages]
    if layout.dtype not in level.suffixes or max(widths, default=0) > 1024:
        return False
    if level.is_ordered:
        return all(width % 8 == 0 for width in widths)
    return (
        all(width % 32 == 0 for width in widths)
        and layout.block_size % 16 == 0
        and config.hidden_size % 16 == 0
        and all(size % 16 == 0 for size in config.inner_sizes)
    )


@dataclass(frozen=True, slots=True)
class NativeAttention:
    """An `AttentionBackend` by compiled kernels. Results depend on a token's own context alone, not on batch or chunks.

    Only ordered libraries support a window or a score cap.
    """

    library: KernelLibrary
    layout: KvLayout
    scale: float
    score_cap: float | None = None

    def plan(self, spans: Sequence[QuerySpan]) -> PartialPlan:
        used = [num_blocks_for(span.end, self.layout.block_size) for span in spans]
        offsets = accumulate(used, initial=0)
        rows = [
            (span.row, span.num_tokens, span.start, offset, span.end - 1)
            for span, offset in zip(spans, offsets, strict=False)
        ]
        tables = np.concatenate([np.asarray(s.block_table[:n], np.int64) for s, n in zip(spans, used, strict=True)])
        return _NativePlan(self, torch.tensor(rows, dtype=torch.int64), torch.from_numpy(tables))


@dataclass(frozen=True, slots=True)
class _NativePlan:
    backend: NativeAttention
    spans: Tensor
    tables: Tensor

    def attend(
        self, query: Tensor, cache: Tensor, *, window: int | None = None, with_lse: bool = False, wide: bool = False
    ) -> AttentionOutput:
        """Attend. Heads of ``query`` are adjacent, perhaps in a wider row. Raise ValueError unless as wide as keys."""
        if query.shape[-1] != cache.shape[-1]:
            raise ValueError(f"queries have {query.shape[-1]} values a head, but keys {cache.shape[-1]}")
        output = query.new_empty(query.shape, dtype=torch.float32 if wide else query.dtype)
        lse = query.new_empty(query.shape[:2], dtype=torch.float32) if with_lse else None
        num_heads, head_dim = query.shape[1:]
        self.backend.library.attention(
            query.data_ptr(),
            query.stride(0),
            cache.data_ptr(),
            None if wide else output.data_ptr(),
            output.data_ptr() if wide else None,
            None if lse is None else lse.data_ptr(),
            self.spans.data_ptr(),
            self.spans.shape[0],
            self.tables.data_ptr(),
            num_heads,
            self.backend.layout.num_kv_heads,
            num_cache_heads(cache),
            self.backend.layout.block_size,
            head_dim,
            self.backend.scale,
            window or 0,
            self.backend.score_cap or 0.0,
            torch.get_num_threads(),
        )
        return AttentionOutput(output, lse)


@dataclass(frozen=True, slots=True)
class NativeKernels:
    """`pdmesh.engine.kernels.Kernels` in place, for contiguous rows of the library's dtype.

    Hidden states and the weights of norms are in fp32. ``deterministic`` is as in `TorchKernels`.
    """

    library: KernelLibrary
    kinds: Elementwise
    deterministic: bool = False

    @property
    def are_complete(self) -> bool:
        """Whether compiled kernels compute all operations. torch computes the others."""
        return self._norms and self._activates

    @property
    def _torch(self) -> TorchKernels:
        return TorchKernels(self.kinds, self.deterministic, TORCH_DTYPES[self.library.dtype])

    @property
    def _norms(self) -> bool:
        return self.kinds.norm.kind is NormKind.RMS

    @property
    def _activates(self) -> bool:
        return self.kinds.activation is Activation.SILU and self.kinds.is_gated

    def add_norm(
        self, hidden: Tensor, delta: Tensor | None, weight: Tensor, bias: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        if not self._norms:
            return self._torch.add_norm(hidden, delta, weight, bias)
        normed = torch.empty_like(hidden, dtype=TORCH_DTYPES[self.library.dtype])
        size = hidden.shape[-1]
        self.library.add_norm(
            hidden.data_ptr(),
            None if delta is None else delta.data_ptr(),
            weight.data_ptr(),
            normed.data_ptr(),
            hidden.numel() // size,
            size,
            self.kinds.norm.epsilon,
            torch.get_num_threads(),
        )
        return hidden, normed

    def norm(self, rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        if not self._norms:
            return self._torch.norm(rows, weight, bias)
        normed = torch.empty_like(rows)
        size = rows.shape[-1]
        self.library.norm(
            rows.data_ptr(),
            rows.dtype == torch.float32,
            weight.data_ptr(),
            normed.data_ptr(),
            rows.numel() // size,
            size,
            self.kinds.norm.epsilon,
            torch.get_num_threads(),
        )
        return normed

    def norm_heads(self, heads: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        if not self._norms:
            return self._torch.norm_heads(heads, weight, bias)
        self.library.norm_heads(
            heads.data_ptr(),
            heads.stride(0),
            weight.data_ptr(),
            *heads.shape,
            self.kinds.norm.epsilon,
            torch.get_num_threads(),
        )
        return heads

    def gate(self, rows: Tensor, gates: Tensor) -> Tensor:
        size = rows.shape[1] * rows.shape[2]
        self.library.gate(rows.data_ptr(), gates.data_ptr(), gates.stride(0), len(rows), size, torch.get_num_threads())
        return rows

    def rotate_and_store(self, qkv: Tensor, num_heads: int, rotation: Rotation, cache: Tensor) -> Tensor:
        num_kv_heads, block_size, head_dim = cache.shape[2:]
        self.library.rotate_and_store(
            qkv.data_ptr(),
            qkv.stride(0),
            rotation.cos.data_ptr(),
            rotation.sin.data_ptr(),
            rotation.slots.data_ptr(),
            cache.data_ptr(),
            qkv.shape[0],
            num_heads,
            num_kv_heads,
            num_cache_heads(cache),
            block_size,
            head_dim,
            torch.get_num_threads(),
        )
        return qkv[:, :num_heads]

    def activate(self, rows: Tensor) -> Tensor:
        if not self._activates:
            return self._torch.activate(rows)
        gate_up, size = rows, rows.shape[-1] // 2
        output = gate_up.new_empty(*gate_up.shape[:-1], size)
        self.library.gated_silu(
            gate_up.data_ptr(), output.data_ptr(), gate_up.numel() // (2 * size), size, torch.get_num_threads()
        )
        return output
