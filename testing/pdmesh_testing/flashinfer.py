"""A stand-in for FlashInfer's batch wrappers, in torch: the same calls, the same state between them, any device.

What a wrapper reads at `run` is what the real one's kernels read: device copies made by `plan`, in CUDA graph mode in
the buffers given at its making, so that a replayed `run` sees the latest plan and nothing else. Results are computed
in fp32. `FakeFlashInfer.calls` records every call, to be held against the real signatures.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Call:
    wrapper: str
    method: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@dataclass(slots=True)
class FakeFlashInfer:
    """Stand-in for the module ``flashinfer``."""

    calls: list[Call] = field(default_factory=list[Call])
    #: Buffer of the last plan of a wrapper for graphs.
    last_pinned: Tensor | None = None

    @property
    def BatchPrefillWithPagedKVCacheWrapper(self) -> partial[FakePrefillWrapper]:
        return partial(FakePrefillWrapper, self)

    @property
    def BatchDecodeWithPagedKVCacheWrapper(self) -> partial[FakeDecodeWrapper]:
        return partial(FakeDecodeWrapper, self)

    def fast_decode_plan(self, wrapper: FakeDecodeWrapper, *args: Any, **kwargs: Any) -> None:
        self.calls.append(Call("", "fast_decode_plan", (wrapper, *args), kwargs))
        wrapper.plan_fast(*args, **kwargs)


@dataclass(slots=True)
class _Pages:
    """Page tables that the kernels read; int32, on the device."""

    indptr: Tensor
    indices: Tensor
    last_page_len: Tensor


class _FakeWrapper:
    name = ""

    def __init__(self, library: FakeFlashInfer, *args: Any, **kwargs: Any) -> None:
        self._library = library
        self._calls = library.calls
        self._calls.append(Call(self.name, "__init__", args, kwargs))
        workspace, kv_layout = args
        assert kv_layout == "HND"
        assert workspace.dtype == torch.uint8
        self._pages: _Pages | None = None
        self._buffers: _Pages | None = None

    def run(self, *args: Any, **kwargs: Any) -> Any:
        self._calls.append(Call(self.name, "run", args, kwargs))
        return self._run(*args, **kwargs)

    def _take_plan(
        self,
        query_lengths: list[int],
        indptr: Tensor,
        indices: Tensor,
        last_page_len: Tensor,
        shape: tuple[int, ...],
        options: dict[str, Any],
    ) -> None:
        for values in (indptr, indices, last_page_len):
            assert values.dtype == torch.int32
        assert indptr.is_cpu
        assert last_page_len.is_cpu
        assert len(indptr) == len(last_page_len) + 1
        assert len(indices) == indptr[-1] or self._buffers is not None
        assert ((last_page_len >= 1) & (last_page_len <= shape[3])).all()
        self._num_heads, self._num_kv_heads, self._head_dim, self._page_size = shape
        self._query_lengths = query_lengths
        self._options = options
        if self._buffers is None:
            self._pages = _Pages(indptr.clone(), indices.clone(), last_page_len.clone())
            return
        self._pages = self._buffers
        assert len(self._buffers.last_page_len) == len(last_page_len), "the batch size of a graph is fixed"
        assert len(indices) <= len(self._buffers.indices)
        self._buffers.indptr.copy_(indptr)
        self._buffers.last_page_len.copy_(last_page_len)
        self._buffers.indices[: len(indices)].copy_(indices)

    def _run(
        self, q: Tensor, paged_kv_cache: Tensor, *, out: Tensor, lse: Tensor | None = None, return_lse: bool = False
    ) -> Tensor | tuple[Tensor, Tensor]:
        assert self._pages is not None, "run before plan"
        assert q.dtype == self._options["q_data_type"] == out.dtype
        assert paged_kv_cache.dtype == self._options["kv_data_type"]
        assert paged_kv_cache.shape[1:] == (2, self._num_kv_heads, self._page_size, self._head_dim)
        assert out.shape == q.shape
        assert out.is_contiguous()
        assert q.stride(-1) == 1
        if return_lse:
            assert lse is not None
            assert lse.shape == q.shape[:2]
            assert lse.dtype == torch.float32
        first = 0
        for number, length in enumerate(self._query_lengths):
            rows = slice(first, first + length)
            output, log_sums = self._attend(q[rows], paged_kv_cache, number)
            out[rows] = output.to(out.dtype)
            if return_lse and lse is not None:
                lse[rows] = log_sums / math.log(2)
            first += length
        assert first == len(q)
        return (out, lse) if return_lse and lse is not None else out

    def _attend(self, query: Tensor, cache: Tensor, number: int) -> tuple[Tensor, Tensor]:
        assert self._pages is not None
        start, end = self._pages.indptr[number : number + 2].tolist()
        used = self._pages.indices[start:end].long()
        length = (end - start - 1) * self._page_size + int(self._pages.last_page_len[number])
        keys, values = cache[used].float().permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, :length]
        group = self._num_heads // self._num_kv_heads
        keys, values = keys.repeat_interleave(group, 0), values.repeat_interleave(group, 0)
        scores = query.float().transpose(0, 1) @ keys.transpose(1, 2) * self._options["sm_scale"]
        if self._options.get("causal", False):
            later = torch.ones(scores.shape[1:], dtype=torch.bool, device=scores.device)
            scores = scores.masked_fill(later.triu(length - len(query) + 1), -torch.inf)
        return (scores.softmax(-1) @ values).transpose(0, 1), scores.logsumexp(-1).t()


class FakePrefillWrapper(_FakeWrapper):
    name = "BatchPrefillWithPagedKVCacheWrapper"

    def plan(self, *args: Any, **kwargs: Any) -> None:
        self._calls.append(Call(self.name, "plan", args, kwargs))
        qo_indptr, indptr, indices, last_page_len, *shape = args
        assert qo_indptr.dtype == torch.int32
        assert qo_indptr.is_cpu
        self._take_plan(qo_indptr.diff().tolist(), indptr, indices, last_page_len, tuple(shape), kwargs)


class FakeDecodeWrapper(_FakeWrapper):
    name = "BatchDecodeWithPagedKVCacheWrapper"

    def __init__(self, library: FakeFlashInfer, *args: Any, **kwargs: Any) -> None:
        super().__init__(library, *args, **kwargs)
        assert kwargs["use_tensor_cores"]
        self._pin_memory_int_workspace_buffer = torch.empty(0)
        if kwargs.get("use_cuda_graph", False):
            self._buffers = _Pages(
                kwargs["paged_kv_indptr_buffer"],
                kwargs["paged_kv_indices_buffer"],
                kwargs["paged_kv_last_page_len_buffer"],
            )

    def plan(self, *args: Any, **kwargs: Any) -> None:
        self._calls.append(Call(self.name, "plan", args, kwargs))
        self._claim_pinned()
        indptr, indices, last_page_len, *shape = args
        self._take_plan([1] * len(last_page_len), indptr, indices, last_page_len, tuple(shape), kwargs)

    def plan_fast(
        self,
        indptr: Tensor,
        indices: Tensor,
        last_page_len: Tensor,
        *shape: int,
        global_override_indptr_cpu: Tensor,
        **options: Any,
    ) -> None:
        """Plan without touching the buffers: their content is right now, or will be when the kernels run."""
        assert self._pages is not None, "the first plan of a wrapper chooses its kernels"
        assert self._buffers is not None
        assert shape == (self._num_heads, self._num_kv_heads, self._head_dim, self._page_size)
        assert options == self._options
        assert global_override_indptr_cpu.is_cpu
        assert last_page_len.is_cpu
        assert len(indices) <= len(self._buffers.indices)
        assert len(last_page_len) == len(self._buffers.last_page_len)
        self._claim_pinned()

    def _claim_pinned(self) -> None:
        """What a plan writes to pinned memory, the device reads later: the next plan must write elsewhere."""
        if self._buffers is not None:
            pinned = self._pin_memory_int_workspace_buffer
            assert pinned is not self._library.last_pinned, "the device may not have read the last plan"
            self._library.last_pinned = pinned
