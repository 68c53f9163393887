"""What one process reads of another, which may close its window, stop or die at any moment."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Protocol

import pytest

from pdmesh.config import TransferConfig
from pdmesh.errors import KvTransferError
from pdmesh.kv import peer_reads as module
from pdmesh.kv.copy_out import FREEZE_LIMIT_S
from pdmesh.kv.peer_reads import CacheOwner, Copies, PeerReads, ReadNote
from pdmesh.kv.sharing import HostCache, HostPeerCache, PeerCache, SharedCache, common_runs
from pdmesh.kv_layout import IndexRange, KvLayout
from pdmesh_testing.cache_owner import NUM_BLOCKS
from pdmesh_testing.kv import SMALL_LAYOUT, SMALL_TRANSFER, ByteStore
from pdmesh_testing.memory_transport import MemoryFabric, MemoryTransport

SEED = 7
OURS = [3, 4, 5, 0, 7, 6, 2, 1]
LAYERS = IndexRange(0, SMALL_LAYOUT.num_layers)


class OwnerProcess(Protocol):
    """`pdmesh_testing.cache_owner`, and how to read from it."""

    process: subprocess.Popen[str]
    owner: CacheOwner
    note: ReadNote


class _Running:
    def __init__(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        self.process = process
        self.owner = CacheOwner(b"its data address", process.pid)
        self.note = ReadNote.unpack(memoryview(bytes.fromhex(process.stdout.readline())))


@contextmanager
def running_owner() -> Iterator[OwnerProcess]:
    command = [sys.executable, "-m", "pdmesh_testing.cache_owner", str(SEED)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield _Running(process)
        finally:
            process.kill()


def reading() -> tuple[ByteStore, PeerReads]:
    store = ByteStore(SMALL_LAYOUT, NUM_BLOCKS)
    return store, PeerReads(store.shared, SMALL_LAYOUT, MemoryTransport(SMALL_TRANSFER, MemoryFabric()))


def read(peer_reads: PeerReads, peer: OwnerProcess) -> bool:
    return peer_reads.read(peer.owner, peer.note, [Copies(LAYERS, peer.note.pages, OURS)])


def assert_copied(store: ByteStore) -> None:
    theirs = ByteStore(SMALL_LAYOUT, NUM_BLOCKS, seed=SEED)
    for layer in range(*LAYERS):
        for block_id, ours in enumerate(OURS):
            assert store.block(layer, ours) == theirs.block(layer, block_id)


def test_what_another_process_has_is_read_until_its_window_is_closed() -> None:
    store, peer_reads = reading()
    with running_owner() as peer:
        assert read(peer_reads, peer)
        assert_copied(store)
        assert peer.process.stdin is not None
        assert peer.process.stdout is not None
        peer.process.stdin.write("over\n")
        peer.process.stdin.flush()
        assert peer.process.stdout.readline() == "over\n"
        assert not read(peer_reads, peer)
    peer_reads.close()


def test_a_peer_that_stopped_is_read_and_one_that_died_is_not() -> None:
    store, peer_reads = reading()
    with running_owner() as peer:
        os.kill(peer.process.pid, signal.SIGSTOP)
        assert read(peer_reads, peer)
        assert_copied(store)
        peer.process.kill()
        peer.process.wait()
        assert not read(peer_reads, peer)
        peer_reads.forget(peer.owner.address)
        assert not read(peer_reads, peer)
    peer_reads.close()


def test_of_a_peer_that_may_not_be_read_pieces_are_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(pid: int, address: int, num_bytes: int, out_address: int) -> None:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(module, "read_memory", refuse)
    _, peer_reads = reading()
    with running_owner() as peer, pytest.raises(KvTransferError, match="the peer's memory cannot be read"):
        read(peer_reads, peer)


@dataclass
class _Dying:
    """A peer's cache whose owner dies as soon as it has been read."""

    cache: PeerCache
    process: subprocess.Popen[str]

    def read(self, layers: IndexRange, theirs: Sequence[int], ours: Sequence[int]) -> None:
        self.cache.read(layers, theirs, ours)
        self.process.kill()
        self.process.wait()

    def close(self) -> None:
        self.cache.close()


@dataclass
class _DyingCache:
    cache: SharedCache
    kind: bytes = HostCache.kind
    max_read_bytes: int = HostCache.max_read_bytes
    copies_inline: bool = HostCache.copies_inline
    process: subprocess.Popen[str] = field(init=False)

    def describe(self) -> bytes:
        return self.cache.describe()

    def open(self, pid: int, described: bytes) -> _Dying:
        return _Dying(self.cache.open(pid, described), self.process)


def test_of_a_peer_that_died_after_the_copy_nothing_is_taken() -> None:
    """A device's memory that is gone reads as anything at all."""
    store = ByteStore(SMALL_LAYOUT, NUM_BLOCKS)
    cache = _DyingCache(store.shared)
    peer_reads = PeerReads(cache, SMALL_LAYOUT, MemoryTransport(SMALL_TRANSFER, MemoryFabric()))
    with running_owner() as peer:
        cache.process = peer.process
        copies = [Copies(IndexRange(0, 1), peer.note.pages, OURS)]
        assert not peer_reads.read(peer.owner, peer.note, copies)


def test_threads_that_read_of_a_peer_at_once_open_its_cache_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device's memory was mapped twice, and then once no more."""
    store, peer_reads = reading()
    both = threading.Barrier(2)
    opened: list[PeerCache] = []
    open_cache = HostCache.open

    def meet_and_open(cache: HostCache, pid: int, described: bytes) -> HostPeerCache:
        with suppress(threading.BrokenBarrierError):
            both.wait(0.1)  # nobody comes: another thread waits until this one has opened it
        opened.append(peer := open_cache(cache, pid, described))
        return peer

    monkeypatch.setattr(HostCache, "open", meet_and_open)
    with running_owner() as peer, ThreadPoolExecutor(2) as threads:
        assert all(threads.map(lambda _: read(peer_reads, peer), range(2)))
    assert len(opened) == 1
    assert_copied(store)


def test_a_cache_of_another_layout_is_not_opened() -> None:
    layout = KvLayout(num_layers=3, num_kv_heads=1, head_dim=8, block_size=4, dtype="float32")
    assert layout.max_page_bytes == SMALL_LAYOUT.max_page_bytes
    store = ByteStore(layout, NUM_BLOCKS)
    peer_reads = PeerReads(store.shared, layout, MemoryTransport(SMALL_TRANSFER, MemoryFabric()))
    with running_owner() as peer, pytest.raises(KvTransferError, match="another layout"):
        read(peer_reads, peer)


@pytest.mark.parametrize(
    ("theirs", "ours", "runs"),
    [
        ([4], [2], [(4, 2, 1)]),
        ([4, 5, 6], [2, 3, 4], [(4, 2, 3)]),
        ([4, 5, 6], [2, 3, 5], [(4, 2, 2), (6, 5, 1)]),
        ([4, 6, 7], [2, 3, 4], [(4, 2, 1), (6, 3, 2)]),
        ([1, 0], [1, 0], [(1, 1, 1), (0, 0, 1)]),
    ],
)
def test_blocks_that_follow_one_another_in_both_caches_are_one_copy(
    theirs: list[int], ours: list[int], runs: list[tuple[int, int, int]]
) -> None:
    assert list(common_runs(theirs, ours)) == runs


def test_what_fills_a_receivers_buffers_with_peer_reads_holds_nobody_up_for_long() -> None:
    """A decode that stands still may have its commit behind them: in host memory some 10 GB/s are copied."""
    _, peer_reads = reading()
    num_buffers = TransferConfig().num_receive_buffers
    assert num_buffers * peer_reads.max_pages * SMALL_LAYOUT.max_page_bytes < 10e9 * FREEZE_LIMIT_S / 8


def test_a_cache_that_is_said_to_lie_beyond_all_memory_is_an_error() -> None:
    """Its owner says where its layers are, and how many blocks they have."""
    store = ByteStore(SMALL_LAYOUT, 4)
    for their_layers in ([(1 << 64) - 1] * SMALL_LAYOUT.num_layers, [8] * SMALL_LAYOUT.num_layers):
        num_pages = [1 << 63] * SMALL_LAYOUT.num_layers
        peer = HostPeerCache(os.getpid(), num_pages, their_layers, store.shared._layer_addresses, SMALL_LAYOUT)
        for block_ids in ([(1 << 32) - 1, 0], [(1 << 62) + 1, 5]):
            with pytest.raises(KvTransferError, match="cannot be read"):
                peer.read(IndexRange(0, SMALL_LAYOUT.num_layers), block_ids, [2, 0])


def test_many_parts_are_read_a_thousand_to_a_call() -> None:
    """Of blocks that are nowhere neighbours."""
    layout = replace(SMALL_LAYOUT, num_layers=1)
    theirs, store = ByteStore(layout, 3000, seed=1), ByteStore(layout, 3000)
    peer = store.shared.open(os.getpid(), theirs.shared.describe())
    block_ids = list(range(0, 3000, 2))
    ours = block_ids[::-1]
    peer.read(IndexRange(0, 1), block_ids, ours)
    for block_id, our_id in zip(block_ids, ours, strict=True):
        assert store.block(0, our_id) == theirs.block(0, block_id)
    assert not any(any(store.block(0, block_id)) for block_id in range(1, 3000, 2))
