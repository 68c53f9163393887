"""Attention in plain torch whose results depend on a token's own context alone, to the last bit.

Libraries choose how to sum by the shapes they are given, and so does torch's vectorized arithmetic. Here every
operation has one shape, (64 query rows) x (256 keys) of one key-value head: rows are padded, keys are masked, and tiles
of keys begin at multiples of 256 and are summed in order. Masked keys add exact zeros. It is what deterministic mode
uses on CPU where no compiled kernel does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from pdmesh.engine.attention import AttentionOutput, PartialPlan, QuerySpan, cap_scores, multiplicable
from pdmesh.model import KvLayout, num_blocks_for

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
        self, query: Tensor, cache: Tensor, *, window: int | None = None, with_lse: bool = False
    ) -> AttentionOutput:
        output = torch.empty_like(query, memory_format=torch.contiguous_format)
        lse = query.new_empty(query.shape[:2], dtype=torch.float32)
        self._attend(multiplicable(query), cache, window, output, lse)
        return AttentionOutput(output, lse if with_lse else None)

    def attend_partly(self, query: Tensor, cache: Tensor) -> tuple[Tensor, Tensor]:
        output = query.new_empty(query.shape, dtype=torch.float32)
        lse = query.new_empty(query.shape[:2], dtype=torch.float32)
        self._attend(query.float(), cache, None, output, lse)
        return output, lse

    def _attend(self, query: Tensor, cache: Tensor, window: int | None, output: Tensor, lse: Tensor) -> None:
        """``query`` says in which dtype to multiply."""
        num_heads, head_dim = query.shape[1:]
        group = num_heads // self.num_kv_heads
        for span, table in self.spans:
            rows = slice(span.row, span.row + span.num_tokens)
            positions = _last_keys(span).repeat_interleave(group)
            for head in range(self.num_kv_heads):
                heads = slice(head * group, (head + 1) * group)
                pages = cache[table, :, head].transpose(0, 1).reshape(2, -1, head_dim)[:, : span.end]
                keys, values = functional.pad(pages.to(query.dtype), (0, 0, 0, -span.end % _TILE_KEYS))
                own = query[rows, heads].reshape(-1, head_dim) * self.scale
                parts = [
                    _attend_rows(tile, tile_positions, keys, values, window, self.score_cap)
                    for tile, tile_positions in zip(
                        torch.split(own, _TILE_ROWS), torch.split(positions, _TILE_ROWS), strict=True
                    )
                ]
                output[rows, heads] = torch.cat([part for part, _ in parts]).view(-1, group, head_dim)
                lse[rows, heads] = torch.cat([part for _, part in parts]).view(-1, group)


def _last_keys(span: QuerySpan) -> Tensor:
    """Return the last key that each row sees."""
    if span.num_keys is not None:
        return torch.full((span.num_tokens,), span.num_keys - 1)
    return torch.arange(span.start, span.end)


def _attend_rows(
    rows: Tensor, positions: Tensor, keys: Tensor, values: Tensor, window: int | None, score_cap: float | None
) -> tuple[Tensor, Tensor]:
    """Results and log-sum-exp of up to 64 scaled query rows."""
    num_rows = len(rows)
    visible = int(positions[-1]) + 1
    begin = 0 if window is None else max(0, int(positions[0]) + 1 - window) // _TILE_KEYS * _TILE_KEYS
    rows = functional.pad(rows, (0, 0, 0, _TILE_ROWS - num_rows))
    positions = functional.pad(positions, (0, _TILE_ROWS - num_rows))[:, None]
    result = torch.zeros_like(rows)
    maximum = rows.new_full((_TILE_ROWS, 1), torch.finfo(rows.dtype).min)  # finite: all of a tile may be masked
    total = rows.new_zeros(_TILE_ROWS, 1)
    for first in range(begin, visible, _TILE_KEYS):
        scores = rows @ keys[first : first + _TILE_KEYS].t()
        if score_cap is not None:
            scores = cap_scores(scores, score_cap)
        ahead = torch.arange(first, first + _TILE_KEYS) - positions
        scores.masked_fill_(ahead > 0 if window is None else (ahead > 0) | (ahead <= -window), -torch.inf)
        higher = torch.maximum(maximum, scores.amax(dim=-1, keepdim=True))
        keep, weights = torch.exp(maximum - higher), torch.exp(scores - higher)
        total = total * keep + weights.sum(dim=-1, keepdim=True)
        result = result * keep + weights @ values[first : first + _TILE_KEYS]
        maximum = higher
    return (result / total)[:num_rows], (maximum + total.log())[:num_rows, 0]
