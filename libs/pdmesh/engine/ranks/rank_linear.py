"""Linear layers and heads that are divided among ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pdmesh.engine.linear import Linear, Vocabulary
from pdmesh.engine.ranks.group import RankGroup
from pdmesh.kv_layout import IndexRange


@dataclass(frozen=True, slots=True)
class GatheredLinear:
    """A layer that takes a rank's columns, and returns the whole result on every rank. Each call is two exchanges.

    All inputs are gathered first, so that each output is summed as on one rank. Adding partial sums instead, with one
    exchange, would change the last bits, and differently for each number of ranks. ``inputs`` and ``outputs`` are by
    rank. Each rank has an equal part of each of ``num_input_groups`` groups of inputs, if there are several.
    """

    own: Linear
    group: RankGroup
    inputs: Sequence[int]
    outputs: Sequence[int]
    num_input_groups: int = 1

    @property
    def row_by_row(self) -> bool:
        return self.own.row_by_row

    def __call__(self, rows: Tensor, *, wide: bool = False) -> Tensor:
        gathered = self.group.gather(rows, self.inputs)
        if self.num_input_groups > 1:
            by_rank = gathered.view(len(gathered), len(self.inputs), self.num_input_groups, -1)
            gathered = by_rank.transpose(1, 2).flatten(1)
        return self.group.gather(self.own(gathered, wide=wide), self.outputs)


@dataclass(frozen=True, slots=True)
class GatheredVocabulary:
    """A vocabulary whose tokens are divided among ranks, ``num_tokens`` on each. Only the leader gets all outputs."""

    own: Vocabulary
    group: RankGroup
    num_tokens: Sequence[int]

    @property
    def row_by_row(self) -> bool:
        return self.own.row_by_row

    def __call__(self, rows: Tensor, *, wide: bool = False) -> Tensor:
        return self.group.gather(self.own(rows, wide=wide), self.num_tokens, to_all=False)

    def embed(self, token_ids: Tensor) -> Tensor:
        lowest, highest = token_ids.aminmax()
        if lowest < 0 or highest >= sum(self.num_tokens):
            raise IndexError(f"token ids {int(lowest)} … {int(highest)} in a vocabulary of {sum(self.num_tokens)}")
        ends = torch.tensor(self.num_tokens).cumsum(0)
        owners = torch.searchsorted(ends, token_ids, right=True)
        rank = self.group.share.rank
        first = int(ends[rank]) - self.num_tokens[rank]
        own = self.own.embed(torch.where(owners == rank, token_ids - first, 0))
        size = own.shape[1]
        by_owner = self.group.gather(own, [size] * len(self.num_tokens)).view(len(token_ids), -1, size)
        return by_owner[torch.arange(len(token_ids)), owners]


@dataclass(frozen=True, slots=True)
class GatheredHeads:
    """Exchange of queries or keys whose heads are divided among ranks, for norms over all heads of a token.

    ``heads`` are by rank; several ranks may have the same one.
    """

    group: RankGroup
    heads: Sequence[IndexRange]

    def all_of(self, own: Tensor) -> Tensor:
        """Return (num_tokens, all heads, head_dim) from the own heads of all ranks, with one exchange."""
        head_dim = own.shape[-1]
        widths = [heads.size * head_dim for heads in self.heads]
        gathered = self.group.gather(own.flatten(1), widths).view(len(own), -1, head_dim)
        number_of = [head for heads in self.heads for head in range(*heads)]
        if len(set(number_of)) == len(number_of):
            return gathered
        return gathered[:, [number_of.index(head) for head in range(number_of[-1] + 1)]]

    def own_of(self, heads: Tensor) -> Tensor:
        """Return this rank's heads (num_tokens, own heads, head_dim) of all heads."""
        return heads[:, slice(*self.heads[self.group.share.rank])]


def own_of_halves(channels: Tensor, own: IndexRange) -> Tensor:
    """Return the ``own`` part of each half of channels (..., channels), one behind the other."""
    return channels.view(*channels.shape[:-1], 2, -1)[..., slice(*own)].flatten(-2)
