"""Sizes of layers with states. Torch-free."""

from __future__ import annotations

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

    def order_by_key_head(self) -> list[int]:
        """Return the source of each row of gates, channels, updates and decays in files with rows by key head.

        Such files have, for each key head, a query, a key, values and gates, and behind all, updates and decays.
        """
        repeats = self.num_value_heads // self.num_key_heads
        values = repeats * self.value_dim
        parts = (("query", self.key_dim), ("key", self.key_dim), ("value", values), ("gate", values))
        rows: dict[str, list[int]] = {name: [] for name in ("gate", "query", "key", "value", "update", "decay")}
        row = 0
        for parts_of_head in (parts, (("update", repeats), ("decay", repeats))):
            for name, size in parts_of_head * self.num_key_heads:
                rows[name] += range(row, row + size)
                row += size
        return [row for own in rows.values() for row in own]

    def additive_orders(self) -> tuple[list[int], list[int]]:
        """Return the source of each row of an additive layer's projection, and of each channel of its convolution.

        Files have gates, values, keys, queries and one input of updates and decays.
        """
        size, first = self.num_key_heads * self.key_dim, self.num_values
        keys = range(first, first + size)
        channels = [*range(keys.stop, keys.stop + size), *keys, *range(first)]
        steps = range(first + self.num_channels, first + self.num_channels + self.num_value_heads)
        return [*range(first), *(first + channel for channel in channels), *steps], channels

    def page(self, block_size: int, dtype: str) -> PageShape:
        """Return the shape of pages that hold two states: one in place of keys, one in place of values."""
        row_bytes = block_size * (4 if dtype == "float32" else 2)
        return PageShape(1, -(-self.num_bytes // (8 * row_bytes)) * 8)
