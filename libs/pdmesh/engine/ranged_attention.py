"""Attention over a context in ranges of a fixed number of tokens, whoever holds them.

Each range is attended to apart, in fp32, and the results are merged by their log-sum-exp in the order of the context.
Where ranges end follows from the position alone, so results are the same bits whether one instance holds all ranges or
others hold some. A context of one range is computed as if there were none.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from pdmesh.engine.attention import AttentionOutput, AttentionPlan, PartialBackend, PartialPlan, QuerySpan
from pdmesh.engine.kernels import by_value
from pdmesh.kv.elsewhere import KvElsewhere, KvElsewhereLost


class _Part(NamedTuple):
    """What some rows of a step made of one range."""

    rows: Tensor | slice
    output: Tensor  # (rows, heads, head_dim), fp32
    lse: Tensor  # (rows, heads), fp32


@dataclass(frozen=True, slots=True)
class RangedAttention:
    """An `AttentionBackend` over another one. ``range_tokens`` is a multiple of ``block_size``."""

    whole: PartialBackend
    range_tokens: int
    block_size: int

    def plan(self, spans: Sequence[QuerySpan]) -> AttentionPlan:
        if all(span.end <= self.range_tokens for span in spans):
            return self.whole.plan(spans)
        by_range: dict[int, list[QuerySpan]] = {}
        for span in spans:
            self._divide(span, by_range)
        ranges = [(_rows(by_range[number]), self.whole.plan(by_range[number])) for number in sorted(by_range)]
        asked = [
            (slice(span.row, span.row + span.num_tokens), span.elsewhere)
            for span in spans
            if span.elsewhere is not None
        ]
        return _RangedPlan(ranges, asked)

    def attend_part(self, query: Tensor, cache: Tensor, block_ids: Sequence[int]) -> bytes:
        """Return what rows (num_rows, num_heads, head_dim) behind a range make of it: outputs, then log-sum-exps."""
        output, lse = self.whole.plan([self._behind(0, len(query), block_ids)]).attend_partly(query, cache)
        return output.numpy().tobytes() + lse.numpy().tobytes()

    def _divide(self, span: QuerySpan, by_range: dict[int, list[QuerySpan]]) -> None:
        """Add what a span attends to here, by range: rows inside of it, and those behind it."""
        size, elsewhere = self.range_tokens, 0 if span.elsewhere is None else span.elsewhere.num_tokens
        for begin in range(elsewhere, span.end, size):
            first = (begin - elsewhere) // self.block_size
            blocks = span.block_table[first : first + size // self.block_size]
            spans = by_range.setdefault(begin // size, [])
            inside, behind = max(span.start, begin), max(span.start, begin + size)
            if inside < (end := min(span.end, begin + size)):
                spans.append(QuerySpan(span.row + inside - span.start, end - inside, inside - begin, blocks))
            if behind < span.end:
                spans.append(self._behind(span.row + behind - span.start, span.end - behind, blocks))

    def _behind(self, row: int, num_rows: int, blocks: Sequence[int]) -> QuerySpan:
        """Rows that see a whole range. One alone is as its last token, which is a decode to what computes it."""
        if num_rows == 1:
            return QuerySpan(row, 1, self.range_tokens - 1, blocks)
        return QuerySpan(row, num_rows, self.range_tokens, blocks, num_keys=self.range_tokens)


class _RangedPlan:
    def __init__(
        self, ranges: Sequence[tuple[Tensor, PartialPlan]], asked: Sequence[tuple[slice, KvElsewhere]]
    ) -> None:
        self._ranges = ranges  # those here, in their order, with the rows that see each
        self._asked = asked
        self._layer = 0  # of the next call

    def attend(
        self, query: Tensor, cache: Tensor, *, window: int | None = None, with_lse: bool = False
    ) -> AttentionOutput:
        """Called once for each layer, in their order. The instances elsewhere attend meanwhile."""
        assert window is None, "models with windows are refused"
        assert not with_lse, "models with sinks are refused"
        for asking, elsewhere in self._asked:
            elsewhere.ask(self._layer, query[asking].contiguous().view(torch.uint8).numpy().tobytes())
        self._layer += 1
        here: list[_Part] = []
        for rows, plan in self._ranges:
            output, lse = plan.attend_partly(query, cache)
            here.append(_Part(rows, output[rows], lse[rows]))
        # Ranges elsewhere are the first ones of their rows.
        there = [_part(rows, answer, query, asked) for rows, asked in self._asked for answer in asked.answers()]
        return AttentionOutput(_merged([*there, *here], query), None)


def _rows(spans: Iterable[QuerySpan]) -> Tensor:
    return torch.cat([torch.arange(span.row, span.row + span.num_tokens) for span in spans])


def _part(rows: slice, answer: bytes, query: Tensor, elsewhere: KvElsewhere) -> _Part:
    """Return what `RangedAttention.attend_part` gave. Raises KvElsewhereLost if that is not of these rows."""
    num_heads, head_dim = query.shape[1:]
    num_rows = rows.stop - rows.start
    size = num_rows * num_heads * head_dim
    if len(answer) != 4 * (size + num_rows * num_heads):
        raise KvElsewhereLost(elsewhere, f"an answer of {len(answer)} bytes to {num_rows} query rows")
    values = torch.from_numpy(np.frombuffer(answer, dtype=np.float32).copy())
    return _Part(rows, values[:size].view(num_rows, num_heads, head_dim), values[size:].view(num_rows, num_heads))


def _merged(parts: Sequence[_Part], query: Tensor) -> Tensor:
    """Merge the parts of each row, in their order."""
    peak = query.new_full(query.shape[:2], -torch.inf, dtype=torch.float32)
    for part in parts:
        peak[part.rows] = torch.maximum(peak[part.rows], part.lse)
    total, output = torch.zeros_like(peak), query.new_zeros(query.shape, dtype=torch.float32)
    for part in parts:
        weights = by_value(torch.exp, part.lse - peak[part.rows])
        total[part.rows] += weights
        output[part.rows] += part.output * weights[..., None]
    return (output / total[..., None]).to(query.dtype)
