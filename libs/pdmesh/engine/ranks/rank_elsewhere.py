"""Questions of an instance's ranks about the first part of a sequence's KV, which other instances have.

A rank has the query rows of its own heads. The rows of all heads are gathered for the question, and each rank takes its
own heads from the answers.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from pdmesh.engine.kv_cache import TORCH_DTYPES
from pdmesh.engine.model_config import DecoderShape
from pdmesh.engine.ranks.group import RankGroup
from pdmesh.engine.ranks.share import RankShare
from pdmesh.kv.remote_kv import RangeQuestion, RemoteKv, RemoteKvLost
from pdmesh.kv_layout import KvLayout


class AskedRows(NamedTuple):
    """Shape of query rows and answers for all heads of a model. Ranges of contexts have ``range_tokens``."""

    num_heads: int
    head_dim: int
    query_dtype: torch.dtype
    range_tokens: int

    @classmethod
    def of(cls, model: DecoderShape, layout: KvLayout, range_tokens: int) -> AskedRows:
        return cls(model.num_heads, layout.head_dim, TORCH_DTYPES[layout.dtype], range_tokens)

    @property
    def answer_values(self) -> int:
        """Number of fp32 values per row of an answer: outputs and log-sum-exps."""
        return self.num_heads * (self.head_dim + 1)

    def query_rows(self, query: bytes, num_ranks: int = 1) -> Tensor:
        """Return a query's rows (num_rows, values), of all heads or of one of ``num_ranks`` ranks."""
        num_values = self.num_heads // num_ranks * self.head_dim
        return torch.frombuffer(bytearray(query), dtype=self.query_dtype).view(-1, num_values)

    def answer_rows(self, answers: Sequence[bytes], num_rows: int, elsewhere: RemoteKv) -> Tensor:
        """Return (answers * num_rows, answer_values). Raise RemoteKvLost for an answer of another size."""
        num_outputs = num_rows * self.num_heads * self.head_dim
        rows: list[Tensor] = []
        for answer in answers:
            if len(answer) != 4 * num_rows * self.answer_values:
                raise RemoteKvLost(
                    elsewhere, f"a shard holder's answer has {len(answer)} bytes for {num_rows} query rows"
                )
            values = torch.frombuffer(bytearray(answer), dtype=torch.float32)
            outputs, lse = values[:num_outputs].view(num_rows, -1), values[num_outputs:].view(num_rows, -1)
            rows.append(torch.cat((outputs, lse), dim=1))
        return torch.cat(rows)

    def own_answers(self, rows: Tensor, num_rows: int, share: RankShare) -> list[bytes]:
        """Return each answer as bytes, cut to the heads of rank ``share.rank``: outputs, then log-sum-exps.

        ``rows`` are the result of `answer_rows`, with ``num_rows`` rows per answer.
        """
        outputs, lse = rows.split((self.num_heads * self.head_dim, self.num_heads), dim=1)  # type: ignore[no-untyped-call]
        own_outputs, own_lse = (values.chunk(share.num_ranks, dim=1)[share.rank] for values in (outputs, lse))
        return [
            output.numpy().tobytes() + sums.numpy().tobytes()
            for output, sums in zip(own_outputs.split(num_rows), own_lse.split(num_rows), strict=True)
        ]


class _OfRanks(ABC):
    """`RemoteKv` on each rank that computes a layer. It remembers the last question's size and range."""

    def __init__(self, num_tokens: int, group: RankGroup, asked: AskedRows) -> None:
        self.num_tokens = num_tokens
        self._group = group
        self._asked = asked
        self._num_rows = 0
        self._first_range = 0

    def ask(self, question: RangeQuestion, *, more: bool = False) -> None:
        share = self._group.share
        rows = self._asked.query_rows(question.query, share.num_ranks)
        self._num_rows, self._first_range = len(rows), question.first_range
        if not share.is_whole:
            rows = self._group.gather(rows, [rows.shape[1]] * share.num_ranks, to_all=False)
        if share.rank == 0:
            self._ask(question._replace(query=rows.view(torch.uint8).numpy().tobytes()), more=more)

    def answers(self) -> Sequence[bytes]:
        return self._asked.own_answers(self._answer_rows(), self._num_rows, self._group.share)

    @abstractmethod
    def _ask(self, question: RangeQuestion, *, more: bool) -> None:
        """Ask with rows of all heads. Called on the first rank only."""

    @abstractmethod
    def _answer_rows(self) -> Tensor:
        """Return `AskedRows.answer_rows` on all ranks. Raise RemoteKvLost on all ranks alike."""


class ElsewhereOfRanks(_OfRanks):
    """`RemoteKv` on each rank of an instance of one stage. The leader asks, and shares the answers."""

    def __init__(self, num_tokens: int, group: RankGroup, asked: AskedRows, leaders: RemoteKv | None = None) -> None:
        """``leaders`` is the sequence's own `RemoteKv`, on the leader. The leader is the first rank."""
        super().__init__(num_tokens, group, asked)
        self._leaders = leaders

    def _ask(self, question: RangeQuestion, *, more: bool) -> None:
        assert self._leaders is not None, "the leader alone asks"
        self._leaders.ask(question, more=more)

    def _answer_rows(self) -> Tensor:
        share, num_values = self._group.share, self._asked.answer_values
        num_rows = (self.num_tokens // self._asked.range_tokens - self._first_range) * self._num_rows
        given = torch.zeros(1 + num_rows, num_values if share.rank == 0 else 0)  # row 0: whether all answered
        lost = RemoteKvLost(self, "the instance's leader got no answers from shard holders")
        if self._leaders is not None:
            try:
                given[1:] = self._asked.answer_rows(self._leaders.answers(), self._num_rows, self._leaders)
                given[0] = 1
            except RemoteKvLost as error:
                lost = error
        rows = self._group.gather(given, [num_values] + [0] * (share.num_ranks - 1))
        if not rows[0].all():
            raise lost
        return rows[1:]


class ElsewhereOfStage(_OfRanks):
    """`RemoteKv` on each rank of a stage. The first rank asks the leader, which answers all ranks."""

    def __init__(
        self,
        num_tokens: int,
        group: RankGroup,
        asked: AskedRows,
        *,
        ask: Callable[[RangeQuestion], object],
        answer: Callable[[], bytes | None],
    ) -> None:
        """``answer`` waits for `AskedRows.answer_rows` as bytes, or None if there are none."""
        super().__init__(num_tokens, group, asked)
        self._ask_leader = ask
        self._answer = answer

    def _ask(self, question: RangeQuestion, *, more: bool) -> None:
        del more  # the leader sends each question alone
        self._ask_leader(question)

    def _answer_rows(self) -> Tensor:
        if (answer := self._answer()) is None:
            raise RemoteKvLost(self, "the instance's leader got no answers from shard holders")
        return torch.frombuffer(bytearray(answer), dtype=torch.float32).view(-1, self._asked.answer_values)
