"""Sizes of layers with states. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pdmesh.kv_layout import PageShape


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaNet:
    """Sizes of a gated delta net (`pdmesh.engine.delta_net`). Each key head serves as many neighbouring value heads.

    ``tiles_heads``: a key head serves every n-th value head instead, with n key heads.
    ``is_additive``: a token's values are added to a state whatever its key already gives, as in Mamba-2.
    """

    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    num_taps: int
    is_additive: bool = False
    has_conv_bias: bool = False
    tiles_heads: bool = False

    @property
    def num_values(self) -> int:
        """Number of values of a token in all value heads."""
        return self.num_value_heads * self.value_dim

    @property
    def num_channels(self) -> int:
        """Number of channels of the convolution: queries, keys and values."""
        return 2 * self.num_key_heads * self.key_dim + self.num_values

    @property
    def num_matrix_values(self) -> int:
        """Number of values in the matrices of all heads."""
        return self.num_values * self.key_dim

    @property
    def num_input_values(self) -> int:
        """Number of values in the kept inputs of the convolution."""
        return (self.num_taps - 1) * self.num_channels

    @property
    def num_bytes(self) -> int:
        """Bytes of a state and its position."""
        return 8 + 4 * (self.num_matrix_values + self.num_input_values)

    def projections(self, number: int) -> tuple[list[int], list[int] | None]:
        """Return sizes of this number of projections in a file, and the source of each row here, None if in order.

        The rows are of gates, channels, updates and decays. A single projection has gates, channels, and one input of
        updates and decays.
        """
        sizes = [self.num_values, self.num_channels, self.num_value_heads, self.num_value_heads]
        first, steps = sum(sizes[:2]), sum(sizes[2:])
        match number:
            case 1:
                channels = (self.num_values + channel for channel in self.channel_order())
                order = [*range(self.num_values), *channels, *range(first, first + self.num_value_heads)]
                return [first + self.num_value_heads], order
            case 2:
                return [first, steps], self._order_by_key_head(of_all=True)
            case 3:
                return [*sizes[:2], steps], self._order_by_key_head(of_all=False)
            case _:
                return sizes, None

    def channel_order(self) -> Sequence[int]:
        """Return the source of each channel of the convolution. An additive layer's have values, keys and queries."""
        if not self.is_additive:
            return range(self.num_channels)
        size, first = self.num_key_heads * self.key_dim, self.num_values
        return [*range(first + size, first + 2 * size), *range(first, first + size), *range(first)]

    def _order_by_key_head(self, *, of_all: bool) -> list[int]:
        """Return the source of each row in files with rows by key head.

        Such files have, for each key head, a query, a key, values and gates, and behind all, updates and decays.
        Without ``of_all``, the updates and decays alone are by key head.
        """
        repeats = self.num_value_heads // self.num_key_heads
        values = repeats * self.value_dim
        parts = (("query", self.key_dim), ("key", self.key_dim), ("value", values), ("gate", values))
        rows: dict[str, list[int]] = {name: [] for name in ("gate", "query", "key", "value", "update", "decay")}
        row = first = 0 if of_all else self.num_values + self.num_channels
        for parts_of_head in (parts if of_all else (), (("update", repeats), ("decay", repeats))):
            for name, size in parts_of_head * self.num_key_heads:
                rows[name] += range(row, row + size)
                row += size
        return [*range(first), *(row for own in rows.values() for row in own)]

    def page(self, block_size: int, dtype: str) -> PageShape:
        """Return the shape of pages that hold two states: one in place of keys, one in place of values."""
        row_bytes = block_size * (4 if dtype == "float32" else 2)
        return PageShape(1, -(-self.num_bytes // (8 * row_bytes)) * 8)
