"""The paged KV cache in host memory: per layer one tensor ``(num_blocks, 2, num_kv_heads, block_size, head_dim)``."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from pdmesh.kv.sharing import HostCache
from pdmesh.kv.store import HostKvStore
from pdmesh.model import KvLayout

TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class TorchKvStore(HostKvStore):
    """The cache's memory; the engine computes on `layers`, transfers copy bytes by `gather` and `scatter`."""

    def __init__(self, layout: KvLayout, num_blocks: int, memory: Tensor | None = None) -> None:
        """``memory`` are the bytes of the cache, zeros, where others compute on it too."""
        self._layout = layout
        self._num_blocks = num_blocks
        shape = (num_blocks, 2, layout.num_kv_heads, layout.block_size, layout.head_dim)
        dtype = TORCH_DTYPES[layout.dtype]
        if memory is None:
            self.layers = [_zeros(shape, dtype) for _ in range(layout.num_layers)]
        else:
            self.layers = [layer.view(dtype).view(shape) for layer in memory.chunk(layout.num_layers)]
        self._bytes = [layer.view(num_blocks, -1).view(torch.uint8).numpy() for layer in self.layers]

    @property
    def layout(self) -> KvLayout:
        return self._layout

    @property
    def num_blocks(self) -> int:
        return self._num_blocks

    @property
    def shared(self) -> HostCache:
        return HostCache(self._layout, self._num_blocks, [layer.data_ptr() for layer in self.layers])

    def gather(self, layer: int, block_ids: Sequence[int], out: memoryview) -> None:
        pieces = np.frombuffer(out, dtype=np.uint8).reshape(len(block_ids), self._layout.block_bytes)
        # "clip": other modes go through a second buffer; the index was checked
        self._bytes[layer].take(self._index(block_ids), axis=0, out=pieces, mode="clip")

    def scatter(self, layer: int, block_ids: Sequence[int], data: memoryview) -> None:
        pieces = np.frombuffer(data, dtype=np.uint8).reshape(len(block_ids), self._layout.block_bytes)
        self._bytes[layer][self._index(block_ids)] = pieces

    def _index(self, block_ids: Sequence[int]) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        if block_ids and not 0 <= min(block_ids) <= max(block_ids) < self._num_blocks:
            raise IndexError(f"block ids {list(block_ids)} reach outside the cache's {self._num_blocks} blocks")
        return np.asarray(block_ids, dtype=np.int64)


def num_cache_heads(cache: Tensor) -> int:
    """Return how many key-value heads a layer's cache has, given it or some of its heads."""
    return cache.stride(1) // cache.stride(2)


def _zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Zeros: memory that was never written must not hold a NaN.

    From numpy, whose large zero arrays are pages that the system commits when they are first written; torch would
    write them all at start.
    """
    num_bytes = int(np.prod(shape)) * dtype.itemsize
    raw = np.zeros(num_bytes + 63, dtype=np.uint8)
    aligned = -raw.ctypes.data % 64
    return torch.from_numpy(raw[aligned : aligned + num_bytes]).view(dtype).view(shape)
