"""The paged KV cache in device memory, and copies to and from host memory concurrent with the computation."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from queue import SimpleQueue

import structlog
import torch
from torch import Tensor

from pdmesh.engine.cuda.shared_cache import CudaSharedCache, DeviceMemory
from pdmesh.engine.cuda.streams import Event, Streams
from pdmesh.engine.kv_cache import TORCH_DTYPES
from pdmesh.errors import KvTransferError
from pdmesh.host import num_usable_cores
from pdmesh.kv.sharing import common_runs
from pdmesh.kv_layout import KvLayout

log = structlog.get_logger()

#: Largest number of copies per piece. Each costs the host some 10 µs. A gathering kernel and its index together cost
#: three times as much.
_MAX_RUNS = 4


class DeviceKvStore:
    """`pdmesh.kv.store.KvStore` on a device.

    The piece of a transfer is one copy by the device's copy engines, or a few, if its blocks are neighbours. Scattered
    blocks go through a contiguous tensor on the device, gathered or scattered by one kernel at the memory's speed. One
    more block, ``scratch_block``, follows the blocks of requests. Rows that pad a step use it, and its content has no
    meaning.
    """

    def __init__(self, layout: KvLayout, num_blocks: int, streams: Streams, memory: DeviceMemory | None = None) -> None:
        """``memory`` describes the cache to other processes. Without it, they cannot read the cache."""
        self._memory = memory
        self._layout = layout
        self._num_blocks = num_blocks
        self._streams = streams
        shape = (layout.num_layers, num_blocks + 1, 2, layout.num_kv_heads, layout.block_size, layout.head_dim)
        # Zeros, because memory that was never written must not hold a NaN.
        self._cache = torch.zeros(shape, dtype=TORCH_DTYPES[layout.dtype], device=streams.device)
        self.layers = list(self._cache)
        # A block has a multiple of 8 bytes: keys and values, each of an even number of lanes of at least two bytes.
        self._words = [layer.view(num_blocks + 1, -1).view(torch.int64) for layer in self.layers]
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
    def num_copy_threads(self) -> int:
        # More threads wait for each other's turns with the interpreter: 8K tokens' KV was exposed for 7 ms with 4
        # threads, for 11 ms with 6 (one H200 and 16 cores, 2026-11-27).
        return max(2, min(4, num_usable_cores() // 2))

    @property
    def scratch_block(self) -> int:
        return self._num_blocks

    @property
    def frames(self) -> None:
        """Always None: a device frees no blocks outside windows."""

    @property
    def shared(self) -> CudaSharedCache | None:
        if self._memory is None:
            return None
        addresses = [layer.data_ptr() for layer in self.layers]
        try:
            return CudaSharedCache(
                self._layout, self._num_blocks, addresses, memory=self._memory, streams=self._streams
            )
        except KvTransferError as error:
            log.warning("other processes cannot read this device's cache", reason=str(error))
            return None

    def wipe(self, rows: Tensor) -> None:
        """Write zeros to these rows of ``head_dim`` values, in all layers, on the current stream."""
        self._cache.view(self._layout.num_layers, -1, self._layout.head_dim).index_fill_(1, rows, 0)

    def gather(self, layer: int, block_ids: Sequence[int], out: memoryview) -> None:
        if not self._check(block_ids, out):
            return
        cache, pieces = self._words[layer], self._pieces(block_ids, out)
        runs = list(common_runs(block_ids, range(len(block_ids))))
        with self._streams.copying():
            if len(runs) <= _MAX_RUNS:
                for block_id, first, count in runs:
                    blocks = cache[block_id : block_id + count]
                    pieces[first : first + count].copy_(blocks.view(torch.uint8), non_blocking=True)
            else:
                gathered = cache.index_select(0, self._index(block_ids))
                pieces.copy_(gathered.view(torch.uint8), non_blocking=True)

    def scatter(self, layer: int, block_ids: Sequence[int], data: memoryview) -> None:
        if not self._check(block_ids, data):
            return
        cache, pieces = self._words[layer], self._pieces(block_ids, data)
        runs = list(common_runs(block_ids, range(len(block_ids))))
        with self._streams.copying():
            if len(runs) <= _MAX_RUNS:
                for block_id, first, count in runs:
                    blocks = cache[block_id : block_id + count]
                    blocks.view(torch.uint8).copy_(pieces[first : first + count], non_blocking=True)
            else:
                received = pieces.to(self._streams.device, non_blocking=True).view(torch.int64)
                cache.index_copy_(0, self._index(block_ids), received)

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
        """Call each callback when its event is complete. All events are of one stream, so they complete in order."""
        while (entry := self._written.get()) is not None:
            event, callback = entry
            event.synchronize()
            callback()

    def _pieces(self, block_ids: Sequence[int], memory: memoryview) -> Tensor:
        """Return ``memory`` as a row of bytes for each block. A tensor of words would have to be aligned."""
        return torch.frombuffer(memory, dtype=torch.uint8).view(len(block_ids), self._layout.max_page_bytes)

    def _index(self, block_ids: Sequence[int]) -> Tensor:
        return torch.tensor(block_ids).to(self._streams.device, non_blocking=True)

    def _check(self, block_ids: Sequence[int], memory: memoryview) -> bool:
        """Return whether there is anything to copy. Raise IndexError or ValueError for wrong ids or a wrong size."""
        if block_ids and not 0 <= min(block_ids) <= max(block_ids) < self._num_blocks:
            raise IndexError(f"block ids {list(block_ids)} reach outside the cache's {self._num_blocks} blocks")
        if memory.nbytes != len(block_ids) * self._layout.max_page_bytes:
            raise ValueError(f"{len(block_ids)} blocks of {self._layout.max_page_bytes} bytes are not {memory.nbytes}")
        return bool(block_ids)
