"""Attention over the paged KV cache.

An `AttentionBackend` plans a step once, for all layers. The plan then attends layer by layer.

The torch backend here is the reference, and runs on CPUs without compiled kernels. Keys and values are copied into
contiguous tensors for plain batched matmuls. These read a bf16 cache ten times faster than torch's fused attention on
the CPUs that we measured. The copies are fp32 where the processor cannot multiply bf16.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pdmesh.engine.bf16 import onednn_multiplies_bf16
from pdmesh.engine.kv_cache import num_cache_heads
from pdmesh.kv.remote_kv import RemoteKv
from pdmesh.kv_layout import KvLayout, PageShape, num_blocks_for

#: Score elements of one tile of queries. The bound limits the memory of a long context, and keeps a tile within the
#: processor's caches. On CPU, softmax of bf16 computes in fp32 inside; asking for an fp32 result would only add two
#: passes.
_TILE_SCORES = 1 << 20
#: Bytes of gathered keys and values for one group of decodes.
_GROUP_BYTES = 8 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class QuerySpan:
    """Rows ``row`` … ``row + num_tokens - 1`` of a step: the tokens from ``start`` on of one sequence.

    If ``num_keys`` is set, the rows are tokens after these keys, and each sees all of them, or those inside its window.
    If other instances hold the first tokens' KV (``elsewhere``), ``block_table`` begins after these tokens.
    """

    row: int
    num_tokens: int
    start: int
    block_table: Sequence[int]
    num_keys: int | None = None
    elsewhere: RemoteKv | None = None

    @property
    def end(self) -> int:
        """Position after the last key that a row sees."""
        return self.start + self.num_tokens if self.num_keys is None else self.num_keys


class AttentionOutput(NamedTuple):
    """Attention results for the rows of a step.

    ``output`` is (num_tokens, num_heads, head_dim). ``lse`` is (num_tokens, num_heads) in fp32: the log-sum-exp of the
    scaled scores, None unless requested.
    """

    output: Tensor
    lse: Tensor | None


class AttentionPlan(Protocol):
    """A step's attention, prepared once for all layers."""

    def attend(
        self, query: Tensor, cache: Tensor, *, window: int | None = None, with_lse: bool = False
    ) -> AttentionOutput:
        """Return the causal attention of ``query`` (num_tokens, num_heads, head_dim) over one layer's cache.

        A query sees its own token and those before, or the last ``window`` of these. The cache already contains the
        step's own keys and values. ``with_lse`` adds the log-sum-exps, by which partial results are merged.
        """
        ...


class AttentionBackend(Protocol):
    """Planner of a step's attention."""

    def plan(self, spans: Sequence[QuerySpan]) -> AttentionPlan: ...


class PartialPlan(AttentionPlan, Protocol):
    """A plan whose spans may be ranges of keys. Results of several ranges can be merged."""

    def attend(
        self, query: Tensor, cache: Tensor, *, window: int | None = None, with_lse: bool = False, wide: bool = False
    ) -> AttentionOutput:
        """Attend as `AttentionPlan.attend` does, with an fp32 output if ``wide``.

        Rows outside all spans are left undefined. With a ``window``, each row of a span must see at least one key.
        """
        ...


class PartialBackend(Protocol):
    """An `AttentionBackend` for ranges of keys."""

    def plan(self, spans: Sequence[QuerySpan]) -> PartialPlan: ...


@dataclass(frozen=True, slots=True)
class AttentionByPage:
    """An `AttentionBackend` for layers whose pages have several shapes."""

    backends: Mapping[PageShape, PartialBackend]

    def plan(self, spans: Sequence[QuerySpan]) -> PartialPlan:
        return _PlanByPage({page: backend.plan(spans) for page, backend in self.backends.items()})


@dataclass(frozen=True, slots=True)
class _PlanByPage:
    plans: Mapping[PageShape, PartialPlan]

    def attend(
        self, query: Tensor, cache: Tensor, *, window: int | None = None, with_lse: bool = False, wide: bool = False
    ) -> AttentionOutput:
        plan = self.plans[PageShape(cache.shape[2], cache.shape[4])]
        return plan.attend(query, cache, window=window, with_lse=with_lse, wide=wide)


@dataclass(frozen=True, slots=True)
class TorchAttention:
    """The backend in plain torch, for any device.

    ``num_cache_heads`` is the number of key-value heads in the cache if ``layout`` has only some of them; 0 means
    equal.
    """

    layout: KvLayout
    scale: float
    device: torch.device
    score_cap: float | None = None
    num_cache_heads: int = 0

    def plan(self, spans: Sequence[QuerySpan]) -> PartialPlan:
        chunks = [self._chunk(span) for span in spans if span.num_tokens > 1]
        decodes = [self._decodes(group) for group in self._groups([span for span in spans if span.num_tokens == 1])]
        return _TorchPlan(self.layout, self.scale, self.score_cap, tuple(chunks), tuple(decodes))

    def _chunk(self, span: QuerySpan) -> _Chunk:
        table = np.asarray(span.block_table[: num_blocks_for(span.end, self.layout.block_size)], dtype=np.int64)
        return _Chunk(span.row, span.num_tokens, span.start, span.num_keys, self._head_rows(table[None]))

    def _decodes(self, spans: Sequence[QuerySpan]) -> _Decodes:
        num_blocks = [num_blocks_for(span.end, self.layout.block_size) for span in spans]
        tables = np.empty((len(spans), max(num_blocks)), dtype=np.int64)
        for table, span, used in zip(tables, spans, num_blocks, strict=True):
            table[:used] = span.block_table[:used]
            table[used:] = span.block_table[used - 1]  # masked padding: a sequence reads only its own blocks
        positions = np.arange(tables.shape[1] * self.layout.block_size)
        starts = [span.start for span in spans]
        ends = np.asarray([span.end for span in spans])[:, None]
        ahead = np.where(positions < ends, positions - np.asarray(starts)[:, None], 1)
        rows = torch.tensor([span.row for span in spans], device=self.device)
        return _Decodes(rows, min(starts), self._head_rows(tables), torch.from_numpy(ahead).to(self.device))

    def _groups(self, spans: Sequence[QuerySpan]) -> Iterator[list[QuerySpan]]:
        """Yield groups of decodes to compute together.

        Contexts of a group are within a factor of two, and their KV takes at most `_GROUP_BYTES` (or the group is one
        decode). The cache's heads, not the rank's, set the size of a group, so every rank forms the same groups.
        """
        longest_first = sorted(spans, key=lambda span: -span.end)
        for _, bucket in groupby(longest_first, key=lambda span: span.end.bit_length()):
            group = list(bucket)
            num_blocks = num_blocks_for(group[0].end, self.layout.block_size)
            block_bytes = self.layout.page_bytes(0) // self.layout.num_kv_heads * self._num_cache_heads
            size = max(1, _GROUP_BYTES // (num_blocks * block_bytes))
            yield from (group[first : first + size] for first in range(0, len(group), size))

    @property
    def _num_cache_heads(self) -> int:
        return self.num_cache_heads or self.layout.num_kv_heads

    def _head_rows(self, tables: npt.NDArray[np.int64]) -> Tensor:
        """Return row numbers (2, sequences, heads, blocks) of keys and values in the cache.

        The cache is viewed as rows of (block, key or value, head). Numbers count from the cache view's own first head.
        """
        halves = np.arange(2)[:, None, None, None]
        heads = np.arange(self.layout.num_kv_heads)[None, None, :, None]
        rows = (tables[None, :, None, :] * 2 + halves) * self._num_cache_heads + heads
        return torch.from_numpy(rows).to(self.device)


@dataclass(frozen=True, slots=True)
class _Chunk:
    row: int
    num_tokens: int
    start: int
    num_keys: int | None
    head_rows: Tensor  # (2, 1, num_kv_heads, num_blocks)


@dataclass(frozen=True, slots=True)
class _Decodes:
    rows: Tensor  # (sequences,)
    start: int
    head_rows: Tensor  # (2, sequences, num_kv_heads, num_blocks)
    ahead: Tensor  # (sequences, num_blocks * block_size)


@dataclass(frozen=True, slots=True)
class _TorchPlan:
    layout: KvLayout
    scale: float
    score_cap: float | None
    chunks: tuple[_Chunk, ...]
    decodes: tuple[_Decodes, ...]

    def attend(
        self, query: Tensor, cache: Tensor, *, window: int | None = None, with_lse: bool = False, wide: bool = False
    ) -> AttentionOutput:
        output = query.new_empty(query.shape, dtype=torch.float32 if wide else query.dtype)
        lse = query.new_empty(query.shape[:2], dtype=torch.float32) if with_lse else None
        # Products are computed in the dtype of the scaled query.
        query = (query.float() if wide else multiplicable(query)) * self.scale
        for chunk in self.chunks:
            self._attend_chunk(chunk, query, cache, window, output, lse)
        for decodes in self.decodes:
            self._attend_decodes(decodes, query, cache, window, output, lse)
        return AttentionOutput(output, lse)

    def _gather(self, cache: Tensor, head_rows: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return keys and values, each (sequences * num_kv_heads, positions, head_dim)."""
        size, num_rows = cache.stride(2), (2 * len(cache) - 1) * num_cache_heads(cache) + cache.shape[2]
        rows = cache.as_strided((num_rows, size), (size, 1)).index_select(0, head_rows.view(-1))
        _, num_sequences, num_heads, num_blocks = head_rows.shape
        shape = (2, num_sequences * num_heads, num_blocks * self.layout.block_size, self.layout.head_dim)
        keys, values = rows.to(dtype).view(shape)
        return keys, values

    def _attend_chunk(
        self, chunk: _Chunk, query: Tensor, cache: Tensor, window: int | None, output: Tensor, lse: Tensor | None
    ) -> None:
        skipped = 0 if window is None else max(0, chunk.start + 1 - window) // self.layout.block_size
        # Both are (num_kv_heads, positions, head_dim), from `origin` on.
        all_keys, all_values = self._gather(cache, chunk.head_rows[..., skipped:].contiguous(), query.dtype)
        origin = skipped * self.layout.block_size
        group = query.shape[1] // self.layout.num_kv_heads
        num_keys = chunk.start + chunk.num_tokens if chunk.num_keys is None else chunk.num_keys
        tile_size = max(1, _TILE_SCORES // (group * (num_keys - origin)))
        # One key-value head at a time: its keys up to any position are contiguous, so no matmul copies them.
        for head, (keys, values) in enumerate(zip(all_keys, all_values, strict=True)):
            heads = slice(head * group, (head + 1) * group)
            for first in range(0, chunk.num_tokens, tile_size):
                size = min(tile_size, chunk.num_tokens - first)
                visible = (chunk.start + first + size if chunk.num_keys is None else num_keys) - origin
                tile = slice(chunk.row + first, chunk.row + first + size)
                scores = self._capped(query[tile, heads].reshape(size * group, -1) @ keys[:visible].t())
                by_token = scores.view(size, group, visible)
                if chunk.num_keys is None:
                    # Mask the keys after a query's own position, within the tile.
                    later = torch.ones(size, size, dtype=torch.bool, device=query.device).triu(1)
                    by_token[..., visible - size :].masked_fill_(later[:, None], -torch.inf)
                if window is not None:
                    earlier = torch.ones(size, visible, dtype=torch.bool, device=query.device)
                    passed = chunk.start + first - window - origin  # the last key before the first row's window
                    by_token.masked_fill_(earlier.tril(passed)[:, None], -torch.inf)
                attended = torch.softmax(scores, dim=-1) @ values[:visible]
                output[tile, heads] = attended.view(size, group, -1)
                if lse is not None:
                    lse[tile, heads] = torch.logsumexp(scores.float(), dim=-1).view(size, group)

    def _attend_decodes(
        self, decodes: _Decodes, query: Tensor, cache: Tensor, window: int | None, output: Tensor, lse: Tensor | None
    ) -> None:
        skipped = 0 if window is None else max(0, decodes.start + 1 - window) // self.layout.block_size
        ahead = decodes.ahead[:, skipped * self.layout.block_size :]
        keys, values = self._gather(cache, decodes.head_rows[..., skipped:].contiguous(), query.dtype)
        num_kv_heads, head_dim = self.layout.num_kv_heads, self.layout.head_dim
        num_sequences, num_heads = len(decodes.rows), query.shape[1]
        group = num_heads // num_kv_heads
        grouped = query[decodes.rows].view(num_sequences * num_kv_heads, group, head_dim)
        scores = self._capped(torch.bmm(grouped, keys.transpose(1, 2)))
        unseen = ahead > 0
        if window is not None:
            unseen |= ahead <= -window
        scores.view(num_sequences, num_heads, -1).masked_fill_(unseen[:, None], -torch.inf)
        attended = torch.bmm(torch.softmax(scores, dim=-1), values)
        output[decodes.rows] = attended.view(num_sequences, num_heads, head_dim).to(output.dtype)
        if lse is not None:
            lse[decodes.rows] = torch.logsumexp(scores.float(), dim=-1).view(num_sequences, num_heads)

    def _capped(self, scores: Tensor) -> Tensor:
        return scores if self.score_cap is None else cap_scores(scores, self.score_cap)


def cap_scores(scores: Tensor, cap: float) -> Tensor:
    """Squeeze ``scores`` into -cap ... cap, in place, and return them."""
    return scores.div_(cap).tanh_().mul_(cap)


def multiplicable(tensor: Tensor) -> Tensor:
    """Return ``tensor``, or an fp32 copy if it has 16 bits and the processor multiplies these slowly."""
    narrow = tensor.dtype == torch.float16 or (tensor.dtype == torch.bfloat16 and not onednn_multiplies_bf16())
    return tensor.float() if narrow and tensor.is_cpu else tensor
