"""The paged KV cache in device memory, and what moves it to and from host memory beside the computation."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from queue import SimpleQueue

import torch
from torch import Tensor

from pdmesh.engine.cuda.streams import Event, Streams
from pdmesh.engine.kv_cache import TORCH_DTYPES
from pdmesh.model import KvLayout


class DeviceKvStore:
    """`pdmesh.kv.store.KvStore` on a device.

    Transfers copy blocks as they lie, a run of neighbours at a time, by the device's copy engines: no kernel competes
    with the computation. Behind the blocks that requests use lies one more, ``scratch_block``, for rows that pad a
    step; its content means nothing.
    """

    def __init__(self, layout: KvLayout, num_blocks: int, streams: Streams) -> None:
        self._layout = layout
        self._num_blocks = num_blocks
        self._streams = streams
        shape = (num_blocks + 1, 2, layout.num_kv_heads, layout.block_size, layout.head_dim)
        dtype = TORCH_DTYPES[layout.dtype]
        # zeros: memory that was never written must not hold a NaN
        self.layers = [torch.zeros(shape, dtype=dtype, device=streams.device) for _ in range(layout.num_layers)]
        self._bytes = [layer.view(num_blocks + 1, -1).view(torch.uint8) for layer in self.layers]
        self._written: SimpleQueue[tuple[Event, Callable[[], object]] | None] = SimpleQueue()

    @property
    def layout(self) -> KvLayout:
        return self._layout

    @property
    def num_blocks(self) -> int:
        return self._num_blocks

    @property
    def inline_copy_bytes(self) -> int:
        return 64 * 1024  # a copy waits for the device; the hop to a thread and back takes 60 µs

    @property
    def scratch_block(self) -> int:
        return self._num_blocks

    def gather(self, layer: int, block_ids: Sequence[int], out: memoryview) -> None:
        self._check(block_ids, out)
        with self._streams.copying():
            for blocks, pieces in self._runs(layer, block_ids, out):
                pieces.copy_(blocks, non_blocking=True)

    def scatter(self, layer: int, block_ids: Sequence[int], data: memoryview) -> None:
        self._check(block_ids, data)
        with self._streams.copying():
            for blocks, pieces in self._runs(layer, block_ids, data):
                blocks.copy_(pieces, non_blocking=True)

    def when_written(self, callback: Callable[[], object]) -> None:
        self._written.put((self._streams.record(), callback))

    @contextlib.contextmanager
    def serving(self, memory: Sequence[memoryview]) -> Iterator[None]:
        watcher = threading.Thread(target=self._watch, name="kv-written", daemon=True)
        with self._streams.pinned(memory):
            watcher.start()
            try:
                yield
            finally:
                self._written.put(None)
                watcher.join()

    def _watch(self) -> None:
        """Events are those of one stream, so they come about in their order."""
        while (entry := self._written.get()) is not None:
            event, callback = entry
            event.synchronize()
            callback()

    def _runs(self, layer: int, block_ids: Sequence[int], memory: memoryview) -> Iterator[tuple[Tensor, Tensor]]:
        """(blocks, pieces) that are neighbours in the cache and in ``memory``, as rows of bytes."""
        if not block_ids:
            return
        pieces = torch.frombuffer(memory, dtype=torch.uint8).view(len(block_ids), self._layout.block_bytes)
        cache = self._bytes[layer]
        for first, count in block_runs(block_ids):
            block = block_ids[first]
            yield cache[block : block + count], pieces[first : first + count]

    def _check(self, block_ids: Sequence[int], memory: memoryview) -> None:
        if block_ids and not 0 <= min(block_ids) <= max(block_ids) < self._num_blocks:
            raise IndexError(f"block ids {list(block_ids)} reach outside the cache's {self._num_blocks} blocks")
        if memory.nbytes != len(block_ids) * self._layout.block_bytes:
            raise ValueError(f"{len(block_ids)} blocks of {self._layout.block_bytes} bytes are not {memory.nbytes}")


def block_runs(block_ids: Sequence[int]) -> Iterator[tuple[int, int]]:
    """(first, count) of the positions at which ids follow one another."""
    first = 0
    for position in range(1, len(block_ids) + 1):
        if position == len(block_ids) or block_ids[position] != block_ids[position - 1] + 1:
            yield first, position - first
            first = position
