"""Linear layers of which each rank has some outputs, and heads of which each has some."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pdmesh.engine.linear import Linear, Vocabulary
from pdmesh.engine.ranks.group import RankGroup
from pdmesh.model import IndexRange


@dataclass(frozen=True, slots=True)
class GatheredLinear:
    """A layer that is given a rank's columns, and whose whole result every rank gets: two exchanges.

    All inputs are gathered first, so that each output is summed as on one rank. Sums of parts, which one exchange would
    add up, have other last bits, and other ones for each number of ranks.
    """

    own: Linear
    group: RankGroup
    inputs: Sequence[int]  # of each rank
    outputs: Sequence[int]

    @property
    def row_by_row(self) -> bool:
        return self.own.row_by_row

    def __call__(self, rows: Tensor, *, wide: bool = False) -> Tensor:
        return self.group.gather(self.own(self.group.gather(rows, self.inputs), wide=wide), self.outputs)


@dataclass(frozen=True, slots=True)
class GatheredVocabulary:
    """A vocabulary of which each rank has some tokens. Only the leader gets all outputs."""

    own: Vocabulary
    group: RankGroup
    num_tokens: Sequence[int]  # of each rank

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
    """Queries, or keys, of tokens, of which each rank has some heads: for what needs all of a token's. One exchange."""

    group: RankGroup
    heads: Sequence[IndexRange]  # of each rank; several may have the same one

    def all_of(self, own: Tensor) -> Tensor:
        """Return (num_tokens, all heads, head_dim) from each rank's (num_tokens, own heads, head_dim)."""
        head_dim = own.shape[-1]
        widths = [heads.size * head_dim for heads in self.heads]
        gathered = self.group.gather(own.flatten(1), widths).view(len(own), -1, head_dim)
        number_of = [head for heads in self.heads for head in range(*heads)]
        if len(set(number_of)) == len(number_of):
            return gathered
        return gathered[:, [number_of.index(head) for head in range(number_of[-1] + 1)]]

    def own_of(self, heads: Tensor) -> Tensor:
        """Return (num_tokens, own heads, head_dim) of all of them."""
        return heads[:, slice(*self.heads[self.group.share.rank])]
