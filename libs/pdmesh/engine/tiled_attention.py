"""Attention in plain torch whose results depend on a token's own context alone, to the last bit.

Libraries choose the order of sums by the given shapes, and so does torch's vectorized arithmetic. Here every operation
has one shape, (64 query rows) x (256 keys) of one key-value head. Rows are padded, and keys are masked. Tiles of keys
begin at multiples of 256 and are summed in order. Masked keys add exact zeros. Deterministic mode uses this on CPUs if
no compiled kernel suits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from pdmesh.engine.attention import AttentionOutput, PartialPlan, QuerySpan, cap_scores, multiplicable
from pdmesh.kv_layout import KvLayout, num_blocks_for

_TILE_ROWS = 64
_TILE_KEYS = 256


@dataclass(frozen=True, slots=True)
class TiledAttention:
    """An `AttentionBackend` on CPU."""

    layout: KvLayout
    scale: float
    score_cap: float | None = None

    def plan(self, spans: Sequence[QuerySpan]) -> PartialPlan:
        block_size = self.layout.block_size
        tables = [torch.tensor(span.block_table[: num_blocks_for(span.end, block_size)]) for span in spans]
        return _TiledPlan(self.layout.num_kv_heads, self.scale, self.score_cap, tuple(zip(spans, tables, strict=True)))


@dataclass(frozen=True, slots=True)
class _TiledPlan:
    num_kv_heads: int
    scale: float
    score_cap: float | None
    spans: tuple[tuple[QuerySpan, Tensor], ...]

    def attend(
        self, query: Tensor, cache: Tensor, *, window: int | None = None, with_lse: bool = False, wide: bool = False
    ) -> AttentionOutput:
        output = query.new_empty(query.shape, dtype=torch.float32 if wide else query.dtype)
        lse = query.new_empty(query.shape[:2], dtype=torch.float32)
        query = query.float() if wide else multiplicable(query)  # the dtype of products
        num_heads, head_dim = query.shape[1:]
        group = num_heads // self.num_kv_heads
        for span, table in self.spans:
            rows = slice(span.row, span.row + span.num_tokens)
            seen = _seen_keys(span, window).repeat_interleave(group, dim=0)
            for head in range(self.num_kv_heads):
                heads = slice(head * group, (head + 1) * group)
                pages = cache[table, :, head].transpose(0, 1).reshape(2, -1, head_dim)[:, : span.end]
                keys, values = functional.pad(pages.to(query.dtype), (0, 0, 0, -span.end % _TILE_KEYS))
                own = query[rows, heads].reshape(-1, head_dim) * self.scale
                parts = [
                    _attend_rows(tile, tile_seen, keys, values, self.score_cap)
                    for tile, tile_seen in zip(torch.split(own, _TILE_ROWS), torch.split(seen, _TILE_ROWS), strict=True)
                ]
                output[rows, heads] = torch.cat([part for part, _ in parts]).view(-1, group, head_dim)
                lse[rows, heads] = torch.cat([part for _, part in parts]).view(-1, group)
        return AttentionOutput(output, lse if with_lse else None)


def _seen_keys(span: QuerySpan, window: int | None) -> Tensor:
    """Return (num_tokens, 2): the first and the last key that each row sees."""
    positions = torch.arange(span.start, span.start + span.num_tokens)
    firsts = torch.zeros_like(positions) if window is None else (positions + 1 - window).clamp(min=0)
    return torch.stack((firsts, positions.clamp(max=span.end - 1)), dim=1)


def _attend_rows(
    rows: Tensor, seen: Tensor, keys: Tensor, values: Tensor, score_cap: float | None
) -> tuple[Tensor, Tensor]:
    """Return results and log-sum-exps of up to 64 scaled query rows, which see the keys given by ``seen``."""
    num_rows = len(rows)
    begin, visible = int(seen[0, 0]) // _TILE_KEYS * _TILE_KEYS, int(seen[-1, 1]) + 1
    rows = functional.pad(rows, (0, 0, 0, _TILE_ROWS - num_rows))
    firsts, lasts = functional.pad(seen, (0, 0, 0, _TILE_ROWS - num_rows)).unsqueeze(-1).unbind(1)
    result = torch.zeros_like(rows)
    maximum = rows.new_full((_TILE_ROWS, 1), torch.finfo(rows.dtype).min)  # finite: all of a tile may be masked
    total = rows.new_zeros(_TILE_ROWS, 1)
    for first in range(begin, visible, _TILE_KEYS):
        scores = rows @ keys[first : first + _TILE_KEYS].t()
        if score_cap is not None:
            scores = cap_scores(scores, score_cap)
        numbers = torch.arange(first, first + _TILE_KEYS)
        scores.masked_fill_((numbers < firsts) | (numbers > lasts), -torch.inf)
        higher = torch.maximum(maximum, scores.amax(dim=-1, keepdim=True))
        keep, weights = torch.exp(maximum - higher), torch.exp(scores - higher)
        total = total * keep + weights.sum(dim=-1, keepdim=True)
        result = result * keep + weights @ values[first : first + _TILE_KEYS]
        maximum = higher
    return (result / total)[:num_rows], (maximum + total.log())[:num_rows, 0]
