"""Sizes of latent attention. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass

from pdmesh.kv_layout import PageShape


@dataclass(frozen=True, slots=True, kw_only=True)
class Latent:
    """Sizes of attention whose keys and values are products of one vector per token, the latent of ``rank`` values.

    A key of a head has ``plain_dim`` values from the latent, and ``rotated_dim`` that all heads share. ``query_rank``
    is the size of the vector that queries are products of; 0 means that they are products of hidden states.
    """

    rank: int
    query_rank: int
    plain_dim: int
    rotated_dim: int
    value_dim: int

    @property
    def width(self) -> int:
        """Number of stored values of a token: the latent, and the shared part of keys."""
        return self.rank + self.rotated_dim

    @property
    def query_dim(self) -> int:
        """Width of a head's query."""
        return self.plain_dim + self.rotated_dim

    @property
    def page(self) -> PageShape:
        """Shape of pages. The first half of a token's values is stored as a key, the other half as a value."""
        return PageShape(1, self.width // 2)

    def num_weights(self, hidden_size: int, num_heads: int) -> int:
        """Return the number of weights of a layer's projections."""
        query_inputs = self.query_rank or hidden_size
        num_queries = query_inputs * num_heads * self.query_dim + hidden_size * self.query_rank
        num_keys_and_values = self.rank * num_heads * (self.plain_dim + self.value_dim)
        return num_queries + num_keys_and_values + hidden_size * (self.width + num_heads * self.value_dim)

    def orders(self, num_heads: int, turned: list[int]) -> tuple[list[int], list[int]]:
        """Return two orders of weight rows: of the queries, and of the fused projection of hidden states.

        Row ``i`` of the reordered matrix is row ``order[i]`` of the stored one. ``turned`` is the order of the rotated
        values of a head.
        """
        head = [*range(self.plain_dim), *(self.plain_dim + dim for dim in turned)]
        queries = [number * self.query_dim + dim for number in range(num_heads) for dim in head]
        first = [*range(self.query_rank)] if self.query_rank else queries
        latent = [*range(self.rank), *(self.rank + dim for dim in turned)]
        return queries, [*first, *(len(first) + row for row in latent)]
