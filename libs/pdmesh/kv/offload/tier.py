"""An instance's offload tier: its granules, where each is, and the copies that bring them there and back.

A granule that is *offloaded* is copied into host memory at once. Until its copy has ended no request writes into its
blocks, even if they are allocated again (`pdmesh.kv.blocks.BlockPool.guard`). If there is a disk, the longest unused
granules move from host memory to it. A tier without host memory of its own has a little, through which granules pass. A
granule that is *loaded* comes layer by layer, from memory or disk, and stays in the tier.

The scheduling core decides which granules are offloaded, loaded and evicted. The tier reports granules that it loses
(the disk is full or too slow, or a granule is damaged), and aborts the loads that wait for them. A disk that does not
answer at all (a file server that is gone) holds a step for a while. Then all granules of the tier are lost, and it
takes none until the disk answers.
"""

from __future__ import annotations

import mmap
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from contextlib import AsyncExitStack
from functools import partial
from itertools import accumulate, pairwise
from math import inf
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self

import structlog

from pdmesh.kv.blocks import BlockPool
from pdmesh.kv.gate import Progress, Wakeup
from pdmesh.kv.offload.copies import CopyThread, KvLoad, TierCopy
from pdmesh.kv.offload.disk import DiskSlots
from pdmesh.kv.store import KvStore
from pdmesh.kv_layout import blocks_of_granule
from pdmesh.model import PrefixHash, PrefixHashes

log = structlog.get_logger()

#: Host memory through which granules pass on their way to a disk, beside the tier's own host memory.
PASSING_BYTES = 256 << 20

#: Minimum number of extra slots in host memory: granules may be evicted while they are being read.
_MIN_SPARE_SLOTS = 8

#: Number of granules that are copied to measure the speed of loads.
_MEASURED_GRANULES = 4

#: Speed of loads that is assumed if it cannot be measured.
UNMEASURED_BYTES_PER_S = 1e9

#: Time limit for a step's wait without progress. Then the tier is stuck until its disk answers.
NO_PROGRESS_S = 5.0


class OffloadCounters(NamedTuple):
    """Totals since the start, and the numbers of granules now in host memory and on the disk."""

    num_host_granules: int
    num_disk_granules: int
    num_bytes_offloaded: int
    num_bytes_loaded: int
    num_lost_granules: int


class _Entry:
    """A granule of the tier: its slot in host memory, on the disk, or for a while both.

    ``is_on_disk`` is set once the whole granule is written. ``stored`` is the copy into host memory, while it runs.
    ``num_copies`` counts the copies that use the slots, which are freed after the last one if the granule ``is_gone``.
    """

    def __init__(self, granule: PrefixHash, host: int) -> None:
        self.granule = granule
        self.host: int | None = host
        self.disk: int | None = None
        self.is_on_disk = False
        self.stored: TierCopy | None = None
        self.num_copies = 0
        self.is_gone = False


class OffloadTier:
    """The offload tier of one instance. Event loop only; `async with` runs its threads.

    ``is_stuck`` is set while the disk does not answer.
    """

    def __init__(
        self,
        store: KvStore,
        pool: BlockPool,
        wakeup: Wakeup,
        *,
        host_bytes: int,
        disk_bytes: int,
        directory: Path | None,
        on_lost: Callable[[PrefixHashes], object],
        call_soon: Callable[[Callable[[], object]], object],
        no_progress_s: float = NO_PROGRESS_S,
    ) -> None:
        """``on_lost`` is called with granules that the tier loses. Raises ConfigError if its file cannot be made."""
        layout = store.layout
        self._store, self._pool, self._wakeup = store, pool, wakeup
        self._on_lost = on_lost
        self._call_soon = call_soon
        self._no_progress_s = no_progress_s
        self._num_blocks = blocks_of_granule(layout.block_size)
        self._layer_bytes = [self._num_blocks * layout.page_bytes(layer) for layer in range(layout.num_layers)]
        self._offsets = list(accumulate(self._layer_bytes, initial=0))
        self.granule_bytes = self._offsets[-1]
        on_disk = DiskSlots.granule_bytes(self._layer_bytes)
        self._num_host = host_bytes // self.granule_bytes if self.granule_bytes else 0
        num_disk = disk_bytes // on_disk if self.granule_bytes and directory is not None else 0
        self._disk = None
        if num_disk and directory is not None:
            self._disk = DiskSlots(directory, num_disk, self._layer_bytes)
        self.num_granules = self._num_host + num_disk
        num_spare = max(_MIN_SPARE_SLOTS, PASSING_BYTES // self.granule_bytes if num_disk else 0)
        num_slots = self._num_host + min(num_spare, self.num_granules) if self.num_granules else 0
        self._arena = mmap.mmap(-1, max(1, num_slots * self.granule_bytes))
        self._free_host = list(range(num_slots - 1, -1, -1))
        self._free_disk = list(range(num_disk - 1, -1, -1))
        self._entries: OrderedDict[PrefixHash, _Entry] = OrderedDict()
        self._in_host: OrderedDict[PrefixHash, _Entry] = OrderedDict()  # granules in host memory only
        self._stores = CopyThread("kv-offload", call_soon)
        self._loads = CopyThread("kv-load", call_soon)
        self._writes = CopyThread("kv-disk", call_soon)
        self._num_bytes_offloaded = self._num_bytes_loaded = self._num_lost = 0
        self._has_failed = False
        self._progress = Progress(time.monotonic)
        self._loading: dict[KvLoad, Callable[[KvLoad], object]] = {}
        self.is_stuck = False

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as stack:
            stack.callback(self._close_disk)
            for thread in (self._writes, self._loads, self._stores):
                await stack.enter_async_context(thread)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stack.__aexit__(kind, error, trace)

    def _close_disk(self) -> None:
        if self._disk is not None and self._loads.has_ended and self._writes.has_ended:
            self._disk.close()

    @property
    def memory(self) -> memoryview:
        """Host memory that a device copies from and to."""
        return memoryview(self._arena)

    @property
    def hashes(self) -> PrefixHashes:
        """All granules that are here or being offloaded, longest unused first."""
        return tuple(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, granule: object) -> bool:
        return granule in self._entries

    def counters(self) -> OffloadCounters:
        num_disk = sum([entry.is_on_disk for entry in self._entries.values()])
        return OffloadCounters(
            len(self._entries) - num_disk,
            num_disk,
            self._num_bytes_offloaded,
            self._num_bytes_loaded,
            self._num_lost,
        )

    def measure(self) -> float:
        """Measure and return the bytes per second of loads. Blocking. Call before any other use of tier and cache.

        `UNMEASURED_BYTES_PER_S`, if nothing can be written to the disk (with a warning), or the cache is too small.
        """
        block_ids = range(self._num_blocks)
        if len(block_ids) > self._store.num_blocks:
            return UNMEASURED_BYTES_PER_S
        entry = _Entry(PrefixHash(bytes(16)), 0)
        layers = self._layers(entry)
        self._gather(block_ids, layers)
        source = _Source(entry, layers, 0, block_ids)
        if self._disk is not None and not self._num_host:
            source.host, source.disk, source.number = None, 0, self._disk.number_write(0)
            try:
                self._disk.write(0, source.number, entry.granule, layers)
            except OSError as error:
                log.warning("cannot write to the offload tier's disk", reason=str(error))
                return UNMEASURED_BYTES_PER_S
        began_s = 0.0
        for number in range(1 + _MEASURED_GRANULES):
            if number == 1:
                began_s = time.perf_counter()
            load = KvLoad(self._wakeup, self._progress, partial(self._scatter, [source]), no_progress_s=inf)
            load.copy.execute()
            if load.copy.error is not None:
                log.warning("cannot read from the offload tier's disk", reason=str(load.copy.error))
                return UNMEASURED_BYTES_PER_S
        took_s = time.perf_counter() - began_s
        return _MEASURED_GRANULES * self.granule_bytes / took_s if took_s else UNMEASURED_BYTES_PER_S

    # --- what the scheduler asks for ----------------------------------------------------------------------------------

    def offload(self, granule: PrefixHash, block_ids: Sequence[int]) -> bool:
        """Copy a granule from ``block_ids``, which will be freed, into the tier. False if stuck, or no slot is free.

        A full tier evicts its longest unused granule and reports it as lost.
        """
        if granule in self._entries:
            self.touch([granule])
            return True
        if len(self._entries) >= self.num_granules:
            # The scheduler learned of a loss after it had the granule offloaded again, and no longer counts it.
            oldest = next(iter(self._entries))
            self.evict([oldest])
            self._on_lost((oldest,))
        if self.is_stuck or not self._free_host:
            self._num_lost += 1
            return False
        entry = self._entries[granule] = _Entry(granule, self._free_host.pop())
        layers = self._layers(entry)
        entry.num_copies += 1
        entry.stored = copy = TierCopy(
            partial(self._gather, block_ids, layers), self._pool.guards_of(block_ids), self._wakeup
        )
        self._pool.guard(block_ids, copy)
        self._stores.make(copy, partial(self._offloaded, entry, block_ids, copy))
        return True

    def evict(self, granules: Iterable[PrefixHash]) -> None:
        """Evict granules; absent ones are ignored."""
        for granule in granules:
            entry = self._entries.pop(granule, None)
            if entry is not None:
                self._in_host.pop(granule, None)
                entry.is_gone = True
                self._settle(entry)

    def touch(self, granules: Iterable[PrefixHash]) -> None:
        """Note that granules were used just now."""
        for granule in granules:
            if granule in self._entries:
                self._entries.move_to_end(granule)
                if granule in self._in_host:
                    self._in_host.move_to_end(granule)

    def load(
        self, granules: Sequence[PrefixHash], block_ids: Sequence[int], on_ended: Callable[[KvLoad], object]
    ) -> KvLoad:
        """Start to copy granules into blocks of a request, and return the load. All granules must be here.

        ``on_ended`` is called on the event loop when the load has ended or failed.
        """
        entries = [self._entries[granule] for granule in granules]
        self.touch(reversed(granules))
        size = len(block_ids) // len(granules)
        sources: list[_Source] = []
        after = self._pool.guards_of(block_ids)
        for index, entry in enumerate(entries):
            entry.num_copies += 1
            if entry.stored is not None:
                after.append(entry.stored)
            host, number = None, 0
            if entry.host is not None:
                host = self._layers(entry)
            elif self._disk is not None and entry.disk is not None:
                number = self._disk.number_of(entry.disk)
            sources.append(_Source(entry, host, number, block_ids[index * size : (index + 1) * size]))
        load = KvLoad(
            self._wakeup,
            self._progress,
            partial(self._scatter, sources),
            after,
            no_progress_s=self._no_progress_s,
            on_stuck=lambda reason: self._call_soon(partial(self._stuck, reason)),
        )
        self._loading[load] = on_ended
        self._pool.guard(block_ids, load.copy)
        self._loads.make(load.copy, partial(self._loaded, sources, block_ids, load))
        return load

    def check_integrity(self) -> None:
        """Raise AssertionError for too many granules, or a slot in memory or on disk used twice, or used and free."""
        assert len(self._entries) <= self.num_granules, f"{len(self._entries)} of {self.num_granules} granules"
        places = [entry.host for entry in self._entries.values() if entry.host is not None]
        assert len(set(places)) == len(places), "two granules are in one place"
        assert not set(places) & set(self._free_host), "a granule's place is free"
        on_disk = [entry.disk for entry in self._entries.values() if entry.disk is not None]
        assert len(set(on_disk)) == len(on_disk), "two granules are in one place of the disk"
        assert not set(on_disk) & set(self._free_disk), "a granule's place on the disk is free"

    # --- inside: places -----------------------------------------------------------------------------------------------

    def _layers(self, entry: _Entry) -> list[memoryview]:
        """Return a granule's slot in host memory, layer by layer."""
        assert entry.host is not None
        start, memory = entry.host * self.granule_bytes, memoryview(self._arena)
        return [memory[start + first : start + end] for first, end in pairwise(self._offsets)]

    def _settle(self, entry: _Entry) -> None:
        """Free the slots that a granule no longer needs, unless a copy uses them."""
        if entry.num_copies:
            return
        if entry.host is not None and (entry.is_gone or entry.is_on_disk):
            self._free_host.append(entry.host)
            entry.host = None
        if entry.disk is not None and entry.is_gone:
            self._free_disk.append(entry.disk)
            entry.disk = None

    def _lose(self, entries: Iterable[_Entry], reason: Exception | str) -> None:
        """Evict granules that the tier cannot keep, and report them. The first loss is logged."""
        lost = tuple([entry.granule for entry in entries if not entry.is_gone])
        if lost:
            if not self._has_failed:
                self._has_failed = True
                log.warning("offload tier lost KV; later requests compute this KV again", reason=str(reason))
            self._num_lost += len(lost)
            self.evict(lost)
            self._on_lost(lost)

    # --- inside: copies -----------------------------------------------------------------------------------------------

    def _gather(self, block_ids: Sequence[int], layers: Sequence[memoryview]) -> None:
        for layer, out in enumerate(layers):
            self._store.gather(layer, block_ids, out)

    def _offloaded(self, entry: _Entry, block_ids: Sequence[int], copy: TierCopy) -> None:
        self._pool.unguard(block_ids, copy)
        entry.stored = None
        entry.num_copies -= 1
        self._settle(entry)
        if copy.error is not None:
            self._lose([entry], copy.error)
        elif not entry.is_gone:
            self._num_bytes_offloaded += self.granule_bytes
            self._in_host[entry.granule] = entry
        self._pass_on()

    def _pass_on(self) -> None:
        """Copy the longest unused granules to the disk, as long as host memory has too many."""
        while self._disk is not None and len(self._in_host) > self._num_host and self._free_disk:
            _, entry = self._in_host.popitem(last=False)
            entry.disk = slot = self._free_disk.pop()
            entry.num_copies += 1
            number, layers = self._disk.number_write(slot), self._layers(entry)
            copy = TierCopy(partial(self._disk.write, slot, number, entry.granule, layers), (), self._wakeup)
            self._writes.make(copy, partial(self._passed_on, entry, copy))

    def _passed_on(self, entry: _Entry, copy: TierCopy) -> None:
        entry.num_copies -= 1
        entry.is_on_disk = copy.error is None
        self._settle(entry)
        if copy.error is not None:
            self._lose([entry], copy.error)
        else:
            self._has_failed = False
        self._pass_on()

    def _scatter(self, sources: Sequence[_Source], load: KvLoad) -> None:
        buffer = memoryview(bytearray(max(self._layer_bytes)))
        for layer, size in enumerate(self._layer_bytes):
            for source in sources:
                data = self._read(source, layer, buffer[:size]) if source.host is None else source.host[layer]
                if not load.write(partial(self._store.scatter, layer, source.block_ids, data)):
                    return
            load.loaded(layer + 1)

    def _read(self, source: _Source, layer: int, buffer: memoryview) -> memoryview:
        assert self._disk is not None, "it was written to a disk"
        assert source.disk is not None, "it is in host memory, or on the disk"
        source.has_failed = True
        self._disk.read(source.disk, source.number, source.entry.granule, layer, buffer)
        source.has_failed = False
        return buffer

    def _loaded(self, sources: Sequence[_Source], block_ids: Sequence[int], load: KvLoad) -> None:
        self.is_stuck = False
        self._pool.unguard(block_ids, load.copy)
        for source in sources:
            source.entry.num_copies -= 1
            self._settle(source.entry)
        if (error := load.copy.error) is not None:
            self._lose([source.entry for source in sources if source.has_failed], error)
            load.abort(f"loading KV from the offload tier failed: {error}")
        elif load.aborted is None:
            self._num_bytes_loaded += len(sources) * self.granule_bytes
        self._end(load)

    def _stuck(self, reason: str) -> None:
        """Lose all granules and abort all loads, because the thread that loads does not return from the disk."""
        if not self._loading or self.is_stuck:
            return  # the thread has returned meanwhile
        self.is_stuck = True
        self._lose(list(self._entries.values()), reason)
        for load in list(self._loading):
            load.abort(reason)
            self._end(load)

    def _end(self, load: KvLoad) -> None:
        """Call a load's ``on_ended``, once."""
        on_ended = self._loading.pop(load, None)
        if on_ended is not None:
            on_ended(load)


class _Source:
    """The slot that a granule is loaded from, and its destination ``block_ids``.

    ``host`` holds the layers in host memory; None if the granule is only in slot ``disk``, by write ``number``.
    """

    def __init__(self, entry: _Entry, host: Sequence[memoryview] | None, number: int, block_ids: Sequence[int]) -> None:
        self.entry = entry
        self.host = host
        self.disk = entry.disk
        self.number = number
        self.block_ids = block_ids
        self.has_failed = False
