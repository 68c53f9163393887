"""Units and shapes of KV: blocks, granules, pages, and parts of a request's KV."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, NamedTuple

from pdmesh.ranges import ANY_COUNT, COUNT

#: Tokens of a *granule*, the unit in which a prompt's KV is cached and reused.
GRANULE_TOKENS = 128

#: Window of layers with a state: a token needs the state behind the token before.
STATE_WINDOW = 2


def blocks_of_granule(block_size: int) -> int:
    """Return the number of blocks in a granule; 0 if ``block_size`` does not divide it, so that nothing is cached."""
    return 0 if GRANULE_TOKENS % block_size else GRANULE_TOKENS // block_size


class IndexRange(NamedTuple):
    """The numbers from ``start`` to ``stop - 1``."""

    start: int
    stop: int

    @property
    def size(self) -> int:
        return self.stop - self.start

    def moved(self, distance: int) -> IndexRange:
        """Return the range moved up by ``distance``."""
        return IndexRange(self.start + distance, self.stop + distance)

    def scaled(self, size: int) -> IndexRange:
        """Return the range of smaller units if each number stands for ``size`` of them."""
        return IndexRange(self.start * size, self.stop * size)

    def holds(self, other: IndexRange) -> bool:
        """Return whether all of ``other``, which is not empty, is in the range."""
        return self.start <= other.start < other.stop <= self.stop

    def common(self, other: IndexRange) -> IndexRange:
        """Return the intersection; of size 0 if it is empty."""
        start = max(self.start, other.start)
        return IndexRange(start, max(start, min(self.stop, other.stop)))


class KvPart(NamedTuple):
    """A part of a request's KV: blocks of its block table, in some layers, of some KV heads.

    Blocks are counted from the request's first token, so they have the same numbers on every instance.
    """

    blocks: IndexRange
    layers: IndexRange
    heads: IndexRange

    @property
    def num_pages(self) -> int:
        """Number of pages: blocks times layers."""
        return self.blocks.size * self.layers.size

    def common(self, other: KvPart) -> KvPart:
        """Return the intersection with another part."""
        return KvPart(*(mine.common(theirs) for mine, theirs in zip(self, other, strict=True)))


def num_blocks_for(num_tokens: int, block_size: int) -> int:
    """Return the number of blocks that hold ``num_tokens`` tokens."""
    return -(-num_tokens // block_size)


class PageShape(NamedTuple):
    """Number of key-value heads of a layer's KV, and width of each key and value."""

    num_kv_heads: Annotated[int, COUNT]
    head_dim: Annotated[int, COUNT]


@dataclass(frozen=True, slots=True, kw_only=True)
class KvLayout:
    """Shape of an instance's KV cache. A transfer needs equal layouts at both ends.

    `dtype` is "float32", "bfloat16" or "float16". The KV of `windowed_layers` (ascending) is freed behind the window: a
    token attends to the latest `window` tokens, including itself. `pages` has the shape of each layer's pages; empty if
    all layers have `num_kv_heads` heads of `head_dim`. Layers that read another layer's KV are not counted.

    With `has_states`, the pages of `windowed_layers` hold states, at the ends of some blocks only.
    """

    num_layers: Annotated[int, COUNT]
    num_kv_heads: Annotated[int, COUNT]
    head_dim: Annotated[int, COUNT]
    block_size: Annotated[int, COUNT]
    dtype: str
    window: Annotated[int, ANY_COUNT] = 0
    windowed_layers: tuple[int, ...] = ()
    pages: tuple[PageShape, ...] = ()
    has_states: bool = False

    def __post_init__(self) -> None:
        if self.pages and len(self.pages) != self.num_layers:
            raise ValueError(f"a layout of {self.num_layers} layers has {len(self.pages)} shapes of pages")
        if self.has_states and self.window != STATE_WINDOW:
            raise ValueError(f"layers with states have a window of {STATE_WINDOW} tokens, not {self.window}")

    def page(self, layer: int) -> PageShape:
        """Return the shape of a layer's pages."""
        return self.pages[layer] if self.pages else PageShape(self.num_kv_heads, self.head_dim)

    @property
    def distinct_pages(self) -> tuple[PageShape, ...]:
        """Different shapes of pages, in the order of their first layers."""
        return tuple(dict.fromkeys(self.pages)) or (self.page(0),)

    def page_bytes(self, layer: int) -> int:
        """Return the bytes of one block in one layer: a page of keys and values."""
        return self._bytes_of(self.page(layer))

    @property
    def max_page_bytes(self) -> int:
        """Bytes of a page in the layer with the largest pages."""
        return max(map(self._bytes_of, self.distinct_pages))

    def bytes_of(self, layers: IndexRange) -> int:
        """Return the bytes of one block in some layers."""
        if not self.pages:
            return layers.size * self.page_bytes(0)
        return sum(map(self._bytes_of, self.pages[slice(*layers)]))

    @property
    def bytes_per_block(self) -> int:
        """Bytes of one block in all layers."""
        return self.bytes_of(IndexRange(0, self.num_layers))

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's keys and values in all layers."""
        return self.bytes_per_block // self.block_size

    @property
    def bytes_per_frame(self) -> int:
        """Bytes of one block in all windowed layers."""
        return sum(map(self.page_bytes, self.windowed_layers))

    def _bytes_of(self, page: PageShape) -> int:
        itemsize = {"float32": 4, "bfloat16": 2, "float16": 2}[self.dtype]
        return 2 * page.num_kv_heads * self.block_size * page.head_dim * itemsize

    def first_seen_block(self, num_tokens: int) -> int:
        """Return the first block that the token behind ``num_tokens`` sees in layers with a window."""
        return max(0, num_tokens + 1 - self.window) // self.block_size if self.window else 0

    def first_held_block(self, num_tokens: int) -> int:
        """Return the first block that windowed layers keep of a sequence of ``num_tokens``, and that moves with it.

        The block is the first one seen from the end of the last full granule: another request may continue there.
        """
        return self.first_seen_block(num_tokens // GRANULE_TOKENS * GRANULE_TOKENS)


def cache_bytes(layout: KvLayout, num_blocks: int, num_frames: int) -> int:
    """Return the bytes of a cache of ``num_blocks``, and ``num_frames`` of windowed layers (`pdmesh.kv.frames`)."""
    return num_blocks * layout.bytes_per_block + (num_frames + 1 - num_blocks) * layout.bytes_per_frame
