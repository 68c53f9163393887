"""Attention by FlashInfer (0.6.3 and later), over the cache as it is: pages of (keys or values, head, token, lane).

Chunks go to its prefill wrapper, decodes to its decode wrapper, each planned once a step. FlashInfer gives logarithms
of sums to base 2; what leaves here is to base e, as everywhere in pdmesh.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from pdmesh.engine.attention import AttentionOutput, AttentionPlan, Span
from pdmesh.engine.cuda.page_tables import Ints, PageIndex, PageTables
from pdmesh.engine.cuda.staging import Staging
from pdmesh.engine.kv_cache import TORCH_DTYPES
from pdmesh.model import KvLayout

#: FlashInfer's own advice is 128 MiB; with CUDA graphs of up to 256 decodes, 64 heads of 128 lanes need 170.
_WORKSPACE_BYTES = 256 * 1024 * 1024

_HEAD_DIMS = (64, 128, 256)

#: Decodes by the tensor cores' kernels, which take any number of heads to a key-value head and split long contexts over
#: the device; FlashInfer's choice on Hopper ("fa3") does not split.
_DECODE_BACKEND = "fa2"


class Wrapper(Protocol):
    """What both wrappers of FlashInfer have in common."""

    def run(self, q: Tensor, paged_kv_cache: Tensor, *, out: Tensor, lse: Tensor | None, return_lse: bool) -> object:
        """Writes ``out`` (rows, heads, head_dim) and ``lse`` (rows, heads), fp32, base 2."""
        ...


def load_library() -> Any | None:
    """The package, if it is installed."""
    try:
        return importlib.import_module("flashinfer")
    except ModuleNotFoundError:
        return None


def suits(layout: KvLayout) -> bool:
    """Whether FlashInfer has kernels for this cache."""
    return layout.dtype in ("bfloat16", "float16") and layout.head_dim in _HEAD_DIMS


class FlashInfer:
    """Makes and plans wrappers for one model. They share a workspace: one stream runs them one after the other."""

    def __init__(self, library: Any, layout: KvLayout, *, num_heads: int, scale: float, device: torch.device) -> None:
        self._library = library
        self._layout = layout
        self._num_heads = num_heads
        self._device = device
        dtype = TORCH_DTYPES[layout.dtype]
        self._options = {"sm_scale": scale, "q_data_type": dtype, "kv_data_type": dtype}
        self._workspace = torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device=device)

    def prefill(self) -> Any:
        return self._library.BatchPrefillWithPagedKVCacheWrapper(self._workspace, "HND")

    def decode(self) -> Any:
        return self._library.BatchDecodeWithPagedKVCacheWrapper(
            self._workspace, "HND", use_tensor_cores=True, backend=_DECODE_BACKEND
        )

    def graph_decode(self, batch_size: int, max_pages: int) -> Any:
        """A wrapper that a CUDA graph can hold: its plans are written to the same device memory each time."""

        def buffer(size: int) -> Tensor:
            return torch.zeros(size, dtype=torch.int32, device=self._device)

        return self._library.BatchDecodeWithPagedKVCacheWrapper(
            self._workspace,
            "HND",
            use_cuda_graph=True,
            use_tensor_cores=True,
            paged_kv_indptr_buffer=buffer(batch_size + 1),
            paged_kv_indices_buffer=buffer(max_pages),
            paged_kv_last_page_len_buffer=buffer(batch_size),
            backend=_DECODE_BACKEND,
        )

    def plan_prefill(self, wrapper: Any, lengths: Ints, index: PageIndex, staging: Staging) -> None:
        """``lengths``: how many tokens of each sequence are queries, its last ones."""
        qo_indptr = np.zeros(len(lengths) + 1, dtype=np.int32)
        np.cumsum(lengths, out=qo_indptr[1:])
        wrapper.plan(
            staging.host(qo_indptr),
            staging.host(index.indptr),
            index.pages,
            staging.host(index.last_page_len),
            self._num_heads,
            self._layout.num_kv_heads,
            self._layout.head_dim,
            self._layout.block_size,
            causal=True,
            **self._options,
        )

    def plan_decode(self, wrapper: Any, index: PageIndex, staging: Staging) -> None:
        wrapper.plan(
            staging.host(index.indptr),
            index.pages,
            staging.host(index.last_page_len),
            self._num_heads,
            self._layout.num_kv_heads,
            self._layout.head_dim,
            self._layout.block_size,
            **self._options,
        )


class FlashInferAttention:
    """`pdmesh.engine.attention.AttentionBackend`. One plan at a time: the next one takes its wrappers."""

    def __init__(self, flashinfer: FlashInfer, tables: PageTables, staging: Staging) -> None:
        self._flashinfer = flashinfer
        self._tables = tables
        self._staging = staging
        self._prefill = flashinfer.prefill()
        self._decode = flashinfer.decode()

    def plan(self, spans: Sequence[Span]) -> AttentionPlan:
        parts: list[_Part] = []
        if chunks := [span for span in spans if span.num_tokens > 1]:
            lengths = np.asarray([span.num_tokens for span in chunks], dtype=np.int32)
            index = self._tables.index(chunks, self._staging)
            self._flashinfer.plan_prefill(self._prefill, lengths, index, self._staging)
            parts.append(_Part(self._prefill, self._rows(chunks)))
        if decodes := [span for span in spans if span.num_tokens == 1]:
            self._flashinfer.plan_decode(self._decode, self._tables.index(decodes, self._staging), self._staging)
            parts.append(_Part(self._decode, self._rows(decodes)))
        return FlashInferPlan(tuple(parts))

    def _rows(self, spans: Sequence[Span]) -> slice | Tensor:
        first, end = spans[0].row, spans[-1].row + spans[-1].num_tokens
        if sum(span.num_tokens for span in spans) == end - first:
            return slice(first, end)
        rows = np.concatenate([np.arange(span.row, span.row + span.num_tokens) for span in spans])
        (device_rows,) = self._staging.upload(rows)
        return device_rows


class GraphAttention:
    """The same for a CUDA graph of ``batch_size`` decodes: every plan lets the graph, once captured, compute it."""

    def __init__(
        self, flashinfer: FlashInfer, tables: PageTables, staging: Staging, *, batch_size: int, max_pages: int
    ) -> None:
        self._flashinfer = flashinfer
        self._tables = tables
        self._staging = staging
        self._wrapper = flashinfer.graph_decode(batch_size, max_pages)

    def plan(self, spans: Sequence[Span]) -> AttentionPlan:
        self._flashinfer.plan_decode(self._wrapper, self._tables.index(spans, self._staging), self._staging)
        return FlashInferPlan((_Part(self._wrapper, slice(0, len(spans))),))


@dataclass(frozen=True, slots=True)
class _Part:
    wrapper: Wrapper
    rows: slice | Tensor  # of the step


@dataclass(frozen=True, slots=True)
class FlashInferPlan:
    parts: tuple[_Part, ...]

    def attend(self, query: Tensor, cache: Tensor, *, with_lse: bool = False) -> AttentionOutput:
        output = torch.empty_like(query, memory_format=torch.contiguous_format)
        lse = query.new_empty(query.shape[:2], dtype=torch.float32) if with_lse else None
        for part in self.parts:
            if isinstance(part.rows, slice):
                part_lse = None if lse is None else lse[part.rows]
                self._run(part.wrapper, query[part.rows], cache, output[part.rows], part_lse)
            else:
                part_output = torch.empty_like(query[part.rows])
                part_lse = None if lse is None else lse[part.rows]
                self._run(part.wrapper, query[part.rows], cache, part_output, part_lse)
                output[part.rows] = part_output
                if lse is not None and part_lse is not None:
                    lse[part.rows] = part_lse
        return AttentionOutput(output, None if lse is None else lse * math.log(2))

    def _run(self, wrapper: Wrapper, query: Tensor, cache: Tensor, output: Tensor, lse: Tensor | None) -> None:
        wrapper.run(query, cache, out=output, lse=lse, return_lse=lse is not None)
