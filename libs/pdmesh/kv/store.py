"""The seam between an engine's KV cache and what moves it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from pdmesh.model import KvLayout


class KvStore(Protocol):
    """An instance's paged KV cache, seen as bytes.

    One (layer, block) piece is ``layout.block_bytes`` contiguous bytes: keys and values of ``block_size`` tokens,
    shape ``(2, num_kv_heads, block_size, head_dim)``. Both calls are blocking copies, run off the event loop.
    """

    @property
    def layout(self) -> KvLayout: ...

    @property
    def num_blocks(self) -> int: ...

    def gather(self, layer: int, block_ids: Sequence[int], out: memoryview) -> None:
        """Copy the pieces of ``block_ids``, in order, into ``out`` (exactly as many bytes)."""
        ...

    def scatter(self, layer: int, block_ids: Sequence[int], data: memoryview) -> None:
        """Copy ``data`` into the pieces of ``block_ids``, in order."""
        ...
