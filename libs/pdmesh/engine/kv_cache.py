"""The paged KV cache in host memory: per layer one tensor ``(num_blocks, 2, num_kv_heads, block_size, head_dim)``.

The heads and their width may differ between layers. Layers with a window have frames instead of blocks, if the layout
says so (`pdmesh.kv.frames`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pdmesh.kv.frames import FrameMap
from pdmesh.kv.sharing import HostCache
from pdmesh.kv.store import HostKvStore
from pdmesh.kv_layout import KvLayout, PageShape, cache_bytes

#: Bytes of the number of a block's frame.
_FRAME_BYTES = 8

TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class TorchKvStore(HostKvStore):
    """The cache's memory. The engine computes on `layers`; transfers copy bytes by `gather` and `scatter`."""

    def __init__(
        self, layout: KvLayout, num_blocks: int, memory: Tensor | None = None, num_frames: int | None = None
    ) -> None:
        """``memory`` has the `memory_bytes` of the cache, zeros, if other processes compute on it, too.

        ``num_frames`` is the number of frames of layers with a window; None means one for each block.
        """
        self._layout = layout
        self._num_blocks = num_blocks
        self._frames: FrameMap | None = None
        self._windowed = frozenset(layout.windowed_layers)
        if self._windowed:
            shared = None if memory is None else memory[-_FRAME_BYTES * num_blocks :].view(torch.int64).numpy()
            self._frames = FrameMap.shared_out(num_blocks, num_blocks if num_frames is None else num_frames, shared)
        dtype = TORCH_DTYPES[layout.dtype]
        shapes = [(self._num_pages(n), *page_shape(layout, n)) for n in range(layout.num_layers)]
        if memory is None:
            self.layers = [_zeros(shape, dtype) for shape in shapes]
        else:
            sizes = [self._num_pages(n) * layout.page_bytes(n) for n in range(layout.num_layers)]
            parts: Sequence[Tensor] = memory[: sum(sizes)].split(sizes)  # type: ignore[no-untyped-call]
            self.layers = [part.view(dtype).view(shape) for part, shape in zip(parts, shapes, strict=True)]
        self._bytes = [layer.view(len(layer), -1).view(torch.uint8).numpy() for layer in self.layers]

    @property
    def layout(self) -> KvLayout:
        return self._layout

    @property
    def num_blocks(self) -> int:
        return self._num_blocks

    @property
    def frames(self) -> FrameMap | None:
        return self._frames

    @property
    def shared(self) -> HostCache:
        num_frames = 0 if self._frames is None else self._frames.num_frames
        addresses = [layer.data_ptr() for layer in self.layers]
        return HostCache(self._layout, self._num_blocks, addresses, num_frames=num_frames)

    def gather(self, layer: int, block_ids: Sequence[int], out: memoryview) -> None:
        pieces = np.frombuffer(out, dtype=np.uint8).reshape(len(block_ids), self._layout.page_bytes(layer))
        # "clip": other modes use a second buffer, and the index was checked
        self._bytes[layer].take(self._index(layer, block_ids), axis=0, out=pieces, mode="clip")

    def scatter(self, layer: int, block_ids: Sequence[int], data: memoryview) -> None:
        pieces = np.frombuffer(data, dtype=np.uint8).reshape(len(block_ids), self._layout.page_bytes(layer))
        index = self._index(layer, block_ids)
        if layer in self._windowed and self._frames is not None:
            is_seen = index != self._frames.zeros  # pieces may include blocks outside the window
            index, pieces = index[is_seen], pieces[is_seen]
        self._bytes[layer][index] = pieces

    def _num_pages(self, layer: int) -> int:
        return self._num_blocks if self._frames is None or layer not in self._windowed else self._frames.num_frames + 1

    def _index(self, layer: int, block_ids: Sequence[int]) -> npt.NDArray[np.int64]:
        if block_ids and not 0 <= min(block_ids) <= max(block_ids) < self._num_blocks:
            raise IndexError(f"block ids {list(block_ids)} reach outside the cache's {self._num_blocks} blocks")
        index = np.asarray(block_ids, dtype=np.int64)
        return index if self._frames is None or layer not in self._windowed else self._frames.of_block[index]


def memory_bytes(layout: KvLayout, num_blocks: int, num_frames: int | None) -> int:
    """Return the bytes of a cache that several processes compute on: all pages, then the frame of each block."""
    if not layout.windowed_layers:
        return num_blocks * layout.bytes_per_block
    num_frames = num_blocks if num_frames is None else num_frames
    num_bytes = cache_bytes(layout, num_blocks, num_frames)
    return _FRAME_BYTES * (-(-num_bytes // _FRAME_BYTES) + num_blocks)


def with_pages(layout: KvLayout, page: PageShape) -> KvLayout:
    """Return the layout of layers whose pages all have one shape."""
    return replace(layout, num_kv_heads=page.num_kv_heads, head_dim=page.head_dim, pages=())


def page_shape(layout: KvLayout, layer: int) -> tuple[int, int, int, int]:
    """Return the shape of a layer's pages: keys or values, heads, tokens, width."""
    num_kv_heads, head_dim = layout.page(layer)
    return 2, num_kv_heads, layout.block_size, head_dim


def num_cache_heads(cache: Tensor) -> int:
    """Return the number of key-value heads in a layer's cache, given the cache or a view of some heads."""
    return cache.stride(1) // cache.stride(2)


def _zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return zeros, because memory that was never written must not hold a NaN.

    numpy's large zero arrays are pages that the system commits at the first write. torch would write them all at start.
    """
    num_bytes = int(np.prod(shape)) * dtype.itemsize
    raw = np.zeros(num_bytes + 63, dtype=np.uint8)
    aligned = -raw.ctypes.data % 64
    return torch.from_numpy(raw[aligned : aligned + num_bytes]).view(dtype).view(shape)
