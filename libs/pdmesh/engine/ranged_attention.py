"""Attention over a context in ranges of a fixed number of tokens, whichever instance has them.

Each range is attended to separately, in fp32. The results are merged by their log-sum-exps in the order of the context.
Positions alone determine where ranges end. Results therefore have the same bits whether one instance has all ranges or
others have some. A context of one range is computed without merging. In a layer with a window, a row attends to the
ranges that overlap its window.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pdmesh.engine.attention import AttentionOutput, AttentionPlan, PartialBackend, PartialPlan, QuerySpan
from pdmesh.engine.merging import Merge, RangeResult, merge_by_torch
from pdmesh.kv.remote_kv import RangeQuestion, RemoteKv, RemoteKvLost

_Rows = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class RangedAttention:
    """An `AttentionBackend` on top of another one. ``range_tokens`` is a multiple of ``block_size``."""

    whole: PartialBackend
    range_tokens: int
    block_size: int
    merge: Merge = merge_by_torch

    def plan(self, spans: Sequence[QuerySpan]) -> AttentionPlan:
        if all(span.end <= self.range_tokens for span in spans):
            return self.whole.plan(spans)
        return _RangedPlan(self, spans)

    def attend_part(
        self, query: Tensor, start: int, cache: Tensor, block_ids: Sequence[int], window: int | None
    ) -> bytes:
        """Return the attention of rows (num_rows, num_heads, head_dim) after a range to this range.

        The result has outputs, then log-sum-exps, as bytes. The first row is ``start`` tokens after the range's begin.
        Rows that see nothing of the range have zeros, and a log-sum-exp of -inf.
        """
        num_seeing = self._end_of_sight(window, start + len(query)) - start
        if num_seeing == len(query):
            plan = self.whole.plan([self._behind(0, num_seeing, start, block_ids)])
            return _as_bytes(*_attended(plan, query, cache, window))
        output = query.new_zeros(query.shape, dtype=torch.float32)
        lse = query.new_full(query.shape[:2], -torch.inf, dtype=torch.float32)
        if num_seeing > 0:
            plan = self.whole.plan([self._behind(0, num_seeing, start, block_ids)])
            output[:num_seeing], lse[:num_seeing] = _attended(plan, query[:num_seeing], cache, window)
        return _as_bytes(output, lse)

    def by_range(self, spans: Sequence[QuerySpan], window: int | None) -> list[tuple[_Rows, PartialPlan]]:
        """Return a plan for each range with blocks here, in order, and the rows that see any of the range."""
        by_range: dict[int, list[QuerySpan]] = {}
        for span in spans:
            self._divide(span, window, by_range)
        return [(_rows(by_range[number]), self.whole.plan(by_range[number])) for number in sorted(by_range)]

    def first_range(self, start: int, window: int | None) -> int:
        """Return the first range that a token sees, in whole or in part: 0 without a window (None)."""
        return 0 if window is None else max(0, start + 1 - window) // self.range_tokens

    def _divide(self, span: QuerySpan, window: int | None, by_range: dict[int, list[QuerySpan]]) -> None:
        """Add the parts of a span that attend to ranges here: rows inside a range, and later rows that see it."""
        size, elsewhere = self.range_tokens, 0 if span.elsewhere is None else span.elsewhere.num_tokens
        seen = self.first_range(span.start, window) * size
        for begin in range(max(elsewhere, seen), span.end, size):
            first = (begin - elsewhere) // self.block_size
            blocks = span.block_table[first : first + size // self.block_size]
            spans = by_range.setdefault(begin // size, [])
            inside, behind = max(span.start, begin), max(span.start, begin + size)
            if inside < (end := min(span.end, begin + size)):
                spans.append(QuerySpan(span.row + inside - span.start, end - inside, inside - begin, blocks))
            if behind < (end := begin + self._end_of_sight(window, span.end - begin)):
                spans.append(self._behind(span.row + behind - span.start, end - behind, behind - begin, blocks))

    def _end_of_sight(self, window: int | None, end: int) -> int:
        """Return the first token that sees nothing of a range, at most ``end``. Tokens count from its begin."""
        return end if window is None else min(end, self.range_tokens + window - 1)

    def _behind(self, row: int, num_rows: int, start: int, blocks: Sequence[int]) -> QuerySpan:
        """Return rows after a range. The first row is ``start`` tokens after the range's begin."""
        return QuerySpan(row, num_rows, start, blocks, num_keys=self.range_tokens)


class _RangedPlan:
    def __init__(self, ranged: RangedAttention, spans: Sequence[QuerySpan]) -> None:
        self._ranged = ranged
        self._spans = spans
        self._here: dict[int | None, list[tuple[_Rows, PartialPlan]]] = {}
        self._asking = [(span, span.elsewhere) for span in spans if span.elsewhere is not None]
        self._layer = 0

    def attend(
        self, query: Tensor, cache: Tensor, *, window: int | None = None, with_lse: bool = False
    ) -> AttentionOutput:
        """Attend to the next layer: call once for each, in order. Other instances attend to their ranges meanwhile."""
        asked: list[tuple[slice, RemoteKv]] = []
        questions: list[RangeQuestion] = []
        for span, elsewhere in self._asking:
            first = self._ranged.first_range(span.start, window)
            if first * self._ranged.range_tokens >= elsewhere.num_tokens:
                continue  # all of it is outside the window
            rows = slice(span.row, span.row + span.num_tokens)
            values = query[rows].contiguous().view(torch.uint8).numpy().tobytes()
            questions.append(RangeQuestion(self._layer, span.start, values, first))
            asked.append((rows, elsewhere))
        for number, (question, (_, elsewhere)) in enumerate(zip(questions, asked, strict=True), 1):
            elsewhere.ask(question, more=number < len(asked))
        self._layer += 1
        if window not in self._here:
            self._here[window] = self._ranged.by_range(self._spans, window)
        here = [RangeResult(rows, 0, *_attended(plan, query, cache, window)) for rows, plan in self._here[window]]
        # Other instances have the first ranges of a context.
        there = [_part(rows, answer, query, each) for rows, each in asked for answer in each.answers()]
        return self._ranged.merge([*there, *here], query, with_lse=with_lse)


def _attended(plan: PartialPlan, query: Tensor, cache: Tensor, window: int | None) -> tuple[Tensor, Tensor]:
    """Return output and log-sum-exp, both in fp32."""
    output, lse = plan.attend(query, cache, window=window, with_lse=True, wide=True)
    assert lse is not None
    return output, lse


def _as_bytes(output: Tensor, lse: Tensor) -> bytes:
    return output.numpy().tobytes() + lse.numpy().tobytes()


def _rows(spans: Iterable[QuerySpan]) -> _Rows:
    return np.concatenate([np.arange(span.row, span.row + span.num_tokens) for span in spans])


def _part(rows: slice, answer: bytes, query: Tensor, elsewhere: RemoteKv) -> RangeResult:
    """Return the parsed result of `RangedAttention.attend_part`. Raise RemoteKvLost if its size is wrong."""
    num_heads, head_dim = query.shape[1:]
    num_rows = rows.stop - rows.start
    size = num_rows * num_heads * head_dim
    if len(answer) != 4 * (size + num_rows * num_heads):
        raise RemoteKvLost(elsewhere, f"a shard holder's answer has {len(answer)} bytes for {num_rows} query rows")
    values = torch.frombuffer(bytearray(answer), dtype=torch.float32)
    output, lse = values[:size].view(num_rows, num_heads, head_dim), values[size:].view(num_rows, num_heads)
    return RangeResult(np.arange(rows.start, rows.stop), rows.start, output, lse)
