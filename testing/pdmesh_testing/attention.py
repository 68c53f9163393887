"""Random sequences over a paged cache, and attention to them by its definition. Imports torch."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from pdmesh.engine.attention import QuerySpan
from pdmesh.engine.kv_cache import TORCH_DTYPES
from pdmesh.kv_layout import KvLayout, num_blocks_for


class PagedCase(NamedTuple):
    """Query rows of several sequences, with keys and values in blocks of any order."""

    layout: KvLayout
    spans: list[QuerySpan]
    query: Tensor
    cache: Tensor

    @property
    def scale(self) -> float:
        return float(self.layout.head_dim**-0.5)

    def in_dtype(self, dtype: str) -> PagedCase:
        """Return the case rounded to ``dtype``."""
        query, cache = self.query.to(TORCH_DTYPES[dtype]), self.cache.to(TORCH_DTYPES[dtype])
        return PagedCase(replace(self.layout, dtype=dtype), self.spans, query, cache)


def paged_case(
    parts: Sequence[tuple[int, int]],
    seed: int,
    *,
    num_kv_heads: int = 2,
    group: int = 3,
    head_dim: int = 32,
    block_size: int = 16,
) -> PagedCase:
    """Return sequences of (start, tokens) in fp32. Queries are part of wider rows, as projections leave them."""
    generator = torch.Generator().manual_seed(seed)
    num_blocks = [num_blocks_for(start + num_tokens, block_size) for start, num_tokens in parts]
    block_ids = iter(random.Random(seed).sample(range(sum(num_blocks)), sum(num_blocks)))
    spans: list[QuerySpan] = []
    row = 0
    for (start, num_tokens), used in zip(parts, num_blocks, strict=True):
        spans.append(QuerySpan(row, num_tokens, start, [next(block_ids) for _ in range(used)]))
        row += num_tokens
    layout = KvLayout(
        num_layers=1, num_kv_heads=num_kv_heads, head_dim=head_dim, block_size=block_size, dtype="float32"
    )
    cache = torch.randn((sum(num_blocks), 2, num_kv_heads, block_size, head_dim), generator=generator)
    query = torch.randn(row, num_kv_heads * (group + 2), head_dim, generator=generator)
    return PagedCase(layout, spans, query[:, : num_kv_heads * group], cache)


def defined_attention(
    span: QuerySpan,
    query: Tensor,
    cache: Tensor,
    scale: float,
    *,
    window: int | None = None,
    score_cap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Return output and log-sum-exp of a span's rows in fp64; ``query`` is all rows of its case."""
    query = query[span.row : span.row + span.num_tokens]
    keys, values = cache[list(span.block_table)].double().permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, : span.end]
    group = query.shape[1] // len(keys)
    keys, values = keys.repeat_interleave(group, 0), values.repeat_interleave(group, 0)
    scores = query.double().transpose(0, 1) @ keys.transpose(1, 2) * scale
    if score_cap is not None:
        scores = score_cap * torch.tanh(scores / score_cap)
    keys_behind = torch.arange(span.start, span.end)[:, None] - torch.arange(span.end)
    scores.masked_fill_((keys_behind < 0) | (keys_behind >= (window or span.end)), -torch.inf)
    return (scores.softmax(-1) @ values).transpose(0, 1), scores.logsumexp(-1).t()
