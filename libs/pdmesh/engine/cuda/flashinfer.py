"""Attention by FlashInfer (0.6.3 and later) over the cache as it is: pages of (keys or values, head, token, lane).

The prefill wrapper computes chunks, and the decode wrapper decodes. Each is planned once per step. FlashInfer returns
log-sum-exps to base 2. `AttentionPlan.attend` converts them to base e, as everywhere in pdmesh.
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

from pdmesh.engine.attention import AttentionOutput, QuerySpan
from pdmesh.engine.cuda.page_tables import Ints, PageIndex, PageTables
from pdmesh.engine.cuda.staging import Staging
from pdmesh.engine.kv_cache import TORCH_DTYPES
from pdmesh.kv_layout import KvLayout

#: Alignment of each part of FlashInfer's workspace.
_ALIGNMENT_BYTES = 4096

#: Largest chunk that "fa2" computes. This backend splits long contexts over the device, and "fa3" does not.
MAX_SHORT_CHUNK = 256

_HEAD_DIMS = (64, 128, 256)

#: Backend of decodes. The tensor cores' kernels allow any number of heads per key-value head, and split long contexts
#: over the device. FlashInfer's own choice on Hopper ("fa3") does not split.
_DECODE_BACKEND = "fa2"


class Wrapper(Protocol):
    """The common interface of FlashInfer's two wrappers."""

    def run(self, q: Tensor, paged_kv_cache: Tensor, *, out: Tensor, lse: Tensor | None, return_lse: bool) -> object:
        """Write ``out`` (rows, heads, head_dim), and ``lse`` (rows, heads) in fp32 to base 2."""
        ...


def load_library() -> Any | None:
    """Return the FlashInfer package, or None if it is not installed."""
    try:
        return importlib.import_module("flashinfer")
    except ModuleNotFoundError:
        return None


def suits(layout: KvLayout) -> bool:
    """Return whether FlashInfer has kernels for this cache."""
    return layout.dtype in ("bfloat16", "float16") and layout.head_dim in _HEAD_DIMS


class FlashInfer:
    """Factory and planner of FlashInfer's wrappers for one model.

    They share a workspace, so one stream runs them in turn. ``prefill_backend`` is FlashInfer's name of a backend, or
    "auto": "fa2" for short chunks, and FlashInfer's choice for long ones.
    """

    def __init__(
        self,
        library: Any,
        layout: KvLayout,
        *,
        num_heads: int,
        scale: float,
        max_decodes: int,
        num_multiprocessors: int,
        device: torch.device,
        prefill_backend: str = "auto",
    ) -> None:
        self._library = library
        self._layout = layout
        self._num_heads = num_heads
        self._prefill_backend = prefill_backend
        dtype = TORCH_DTYPES[layout.dtype]
        self._options = {"sm_scale": scale, "q_data_type": dtype, "kv_data_type": dtype}
        size = workspace_bytes(
            layout, num_heads=num_heads, max_decodes=max_decodes, num_multiprocessors=num_multiprocessors
        )
        self._workspace = torch.zeros(size, dtype=torch.uint8, device=device)

    def backend_for(self, num_queries: int) -> str:
        """Return the backend for a chunk of ``num_queries`` tokens.

        "auto" means "fa3" on Hopper, except for short chunks. "fa3" gives each processor one tile of 128 queries of a
        head. Over 32K tokens, 192 queries took "fa2" 345 us and "fa3" 455, 256 426 and 454, 512 841 and 470 (H100,
        2026-11).
        """
        if self._prefill_backend == "auto" and num_queries <= MAX_SHORT_CHUNK:
            return "fa2"
        return self._prefill_backend

    def prefill(self, backend: str) -> Any:
        return self._library.BatchPrefillWithPagedKVCacheWrapper(self._workspace, "HND", backend=backend)

    def decode(self) -> Any:
        return self._library.BatchDecodeWithPagedKVCacheWrapper(
            self._workspace, "HND", use_tensor_cores=True, backend=_DECODE_BACKEND
        )

    def graph_decode(self, indptr: Tensor, pages: Tensor, last_page_len: Tensor) -> GraphDecode:
        """Return attention for a graph of the batch size of ``last_page_len``. The graph reads these tensors."""
        wrapper = self._library.BatchDecodeWithPagedKVCacheWrapper(
            self._workspace,
            "HND",
            use_cuda_graph=True,
            use_tensor_cores=True,
            paged_kv_indptr_buffer=indptr,
            paged_kv_indices_buffer=pages,
            paged_kv_last_page_len_buffer=last_page_len,
            backend=_DECODE_BACKEND,
        )
        return GraphDecode(self, wrapper, pages, len(last_page_len))

    def plan_prefill(self, wrapper: Any, num_queries: Ints, index: PageIndex, staging: Staging) -> None:
        """Plan chunks. The last ``num_queries`` tokens of each sequence are queries."""
        qo_indptr = np.zeros(len(num_queries) + 1, dtype=np.int32)
        np.cumsum(num_queries, out=qo_indptr[1:])
        wrapper.plan(
            staging.host(qo_indptr),
            staging.host(index.lengths.indptr),
            index.pages,
            staging.host(index.lengths.last_page_len),
            *self._shape,
            causal=True,
            **self._options,
        )

    def plan_decode(self, wrapper: Any, index: PageIndex, staging: Staging) -> None:
        indptr, last_page_len = staging.host(index.lengths.indptr), staging.host(index.lengths.last_page_len)
        wrapper.plan(indptr, index.pages, last_page_len, *self._shape, **self._options)

    def plan_graph_decode(self, wrapper: Any, indptr: Tensor, pages: Tensor, last_page_len: Tensor) -> None:
        """Make the wrapper's first plan, which chooses the kernels that the graph will hold."""
        wrapper.plan(indptr, pages, last_page_len, *self._shape, **self._options)

    def replan_graph_decode(self, wrapper: Any, indptr: Tensor, pages: Tensor, last_page_len: Tensor) -> None:
        """Make a later plan. It skips the copies and checks of the first one."""
        self._library.fast_decode_plan(
            wrapper, indptr, pages, last_page_len, *self._shape, global_override_indptr_cpu=indptr, **self._options
        )

    @property
    def _shape(self) -> tuple[int, int, int, int]:
        layout = self._layout
        return self._num_heads, layout.num_kv_heads, layout.head_dim, layout.block_size


def workspace_bytes(layout: KvLayout, *, num_heads: int, max_decodes: int, num_multiprocessors: int) -> int:
    """Return the bytes of the partial results of FlashInfer's "fa2" kernels, which split contexts over the device.

    The formula is from the planner (``scheduler.cuh`` of 0.6.3): outputs and log-sums of every head in fp32, for all
    tiles of queries that may run at once. Each of a graph's ``max_decodes`` decodes has its own tile: the smallest of
    16, 64 and 128 rows that holds the query heads of one KV head. Plans without a graph split only as far as two tiles
    of 128 fit each multiprocessor.
    """
    group = num_heads // layout.num_kv_heads
    at_once = 2 * num_multiprocessors // layout.num_kv_heads
    tile = next((rows for rows in (16, 64) if group <= rows), 128)
    graph_tiles = max(at_once, -(-max_decodes * group // tile) + max_decodes - 1)
    num_rows = num_heads * max(graph_tiles * tile, at_once * 128)
    return num_rows * (layout.head_dim + 1) * 4 + _ALIGNMENT_BYTES


class FlashInferAttention:
    """`pdmesh.engine.attention.AttentionBackend` by FlashInfer. Each plan reuses the wrappers of the plan before.

    ``_prefill`` has the wrappers by backend.
    """

    def __init__(self, flashinfer: FlashInfer, tables: PageTables, staging: Staging) -> None:
        self._flashinfer = flashinfer
        self._tables = tables
        self._staging = staging
        self._prefill: dict[str, Any] = {}
        self._decode = flashinfer.decode()

    def plan(self, spans: Sequence[QuerySpan]) -> FlashInferPlan:
        parts: list[_Part] = []
        chunks = [span for span in spans if span.num_tokens > 1]
        for backend in dict.fromkeys(self._flashinfer.backend_for(span.num_tokens) for span in chunks):
            mine = [span for span in chunks if self._flashinfer.backend_for(span.num_tokens) == backend]
            wrapper = self._prefill.get(backend)
            if wrapper is None:
                wrapper = self._prefill[backend] = self._flashinfer.prefill(backend)
            num_queries = np.asarray([span.num_tokens for span in mine], dtype=np.int32)
            self._flashinfer.plan_prefill(wrapper, num_queries, self._tables.index(mine, self._staging), self._staging)
            parts.append(_Part(wrapper, self._rows(mine)))
        if decodes := [span for span in spans if span.num_tokens == 1]:
            self._flashinfer.plan_decode(self._decode, self._tables.index(decodes, self._staging), self._staging)
            parts.append(_Part(self._decode, self._rows(decodes)))
        return FlashInferPlan(tuple(parts))

    def _rows(self, spans: Sequence[QuerySpan]) -> slice | Tensor:
        first, end = spans[0].row, spans[-1].row + spans[-1].num_tokens
        if sum(span.num_tokens for span in spans) == end - first:
            return slice(first, end)
        rows = np.concatenate([np.arange(span.row, span.row + span.num_tokens) for span in spans])
        (device_rows,) = self._staging.upload(rows)
        return device_rows


class GraphDecode:
    """`pdmesh.engine.attention.AttentionPlan` of a fixed number of decodes, for a CUDA graph.

    After each `plan`, replaying the captured graph computes the sequences in the wrapper's buffers.
    """

    def __init__(self, flashinfer: FlashInfer, wrapper: Any, pages: Tensor, batch_size: int) -> None:
        self._flashinfer = flashinfer
        self._wrapper = wrapper
        self._pages = pages
        self._attention = FlashInferPlan((_Part(wrapper, slice(0, batch_size)),))
        self._planned = False

    def plan(self, indptr: Tensor, last_page_len: Tensor, pinned: Tensor) -> None:
        """Plan for lengths on the host.

        The plan is copied to the device from ``pinned``, which must not change until then. FlashInfer has no call for
        this. Each wrapper has its own pinned memory, and its next plan would overwrite the memory before the device has
        read it.
        """
        self._wrapper._pin_memory_int_workspace_buffer = pinned
        plan = self._flashinfer.replan_graph_decode if self._planned else self._flashinfer.plan_graph_decode
        plan(self._wrapper, indptr, self._pages, last_page_len)
        self._planned = True

    def attend(
        self, query: Tensor, cache: Tensor, *, window: int | None = None, with_lse: bool = False
    ) -> AttentionOutput:
        """Attend without a window. Models with windows use another backend."""
        return self._attention.attend(query, cache, with_lse=with_lse)


@dataclass(frozen=True, slots=True)
class _Part:
    wrapper: Wrapper
    rows: slice | Tensor


@dataclass(frozen=True, slots=True)
class FlashInferPlan:
    """`AttentionPlan` of FlashInfer: the rows of a step in parts, with one planned wrapper for each."""

    parts: tuple[_Part, ...]

    def attend(
        self, query: Tensor, cache: Tensor, *, window: int | None = None, with_lse: bool = False
    ) -> AttentionOutput:
        """Attend without a window. Models with windows use another backend."""
        output = torch.empty_like(query, memory_format=torch.contiguous_format)
        lse = query.new_empty(query.shape[:2], dtype=torch.float32) if with_lse else None
        self.attend_into(output, query, cache, lse)
        return AttentionOutput(output, None if lse is None else lse * math.log(2))

    def attend_into(self, output: Tensor, query: Tensor, cache: Tensor, lse: Tensor | None = None) -> None:
        """Write the result of `attend` into the contiguous ``output``. ``lse`` (num_tokens, heads) is to base 2."""
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

    def _run(self, wrapper: Wrapper, query: Tensor, cache: Tensor, output: Tensor, lse: Tensor | None) -> None:
        wrapper.run(query, cache, out=output, lse=lse, return_lse=lse is not None)
