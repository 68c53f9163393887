"""A device's KV cache that other processes read: the calls of CUDA's driver, with stand-ins for what it does."""

from __future__ import annotations

import importlib
import inspect
import os
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import anyio
import anyio.lowlevel
import pytest
import torch
from torch import Tensor

from pdmesh.engine.cuda import shared_cache
from pdmesh.engine.cuda.kv_store import DeviceKvStore
from pdmesh.engine.cuda.shared_cache import HANDLE_BYTES, CudaDriver, CudaSharedCache
from pdmesh.errors import KvTransferError
from pdmesh.kv.blocks import BlockPool
from pdmesh.kv.gate import Wakeup
from pdmesh.kv.mover import KvMover
from pdmesh.kv.pages import Blocks
from pdmesh.kv_layout import IndexRange, KvLayout
from pdmesh.model import Epoch, RequestId
from pdmesh_testing.cuda import FakeDriver, FakeHost, FakeStreams
from pdmesh_testing.kv import SMALL_TRANSFER, TransportMaker

LAYOUT = KvLayout(num_layers=3, num_kv_heads=2, head_dim=8, block_size=4, dtype="bfloat16")
NUM_BLOCKS = 12
SHUFFLED = [3, 4, 5, 9, 0, 11, 1, 2]
ANOTHER_PROCESS = os.getpid() + 1


@dataclass
class Process:
    """What one has on a device."""

    driver: FakeDriver
    streams: FakeStreams
    store: DeviceKvStore

    @property
    def shared(self) -> CudaSharedCache:
        shared = self.store.shared
        assert shared is not None
        return shared


def a_process(host: FakeHost, seed: int, num_blocks: int = NUM_BLOCKS) -> Process:
    streams = FakeStreams()
    driver = FakeDriver(host, streams)
    store = DeviceKvStore(LAYOUT, num_blocks, streams, driver)
    driver.own(store.layers)
    generator = torch.Generator().manual_seed(seed)
    for layer in store.layers:
        layer.copy_(torch.randn(layer.shape, generator=generator))
    return Process(driver, streams, store)


@pytest.mark.parametrize("pid", [ANOTHER_PROCESS, os.getpid()], ids=["another process", "the same process"])
def test_blocks_come_from_device_to_device(pid: int) -> None:
    host = FakeHost()
    reader, owner = a_process(host, 0), a_process(host, 1, NUM_BLOCKS + 7)
    if pid == os.getpid():  # what one instance has allocated, the other one may use
        reader.driver.own(owner.store.layers)
    before = [layer.clone() for layer in reader.store.layers]
    peer = reader.shared.open(pid, owner.shared.describe())
    assert len(reader.driver.mapped) == (LAYOUT.num_layers if pid == ANOTHER_PROCESS else 0)
    theirs = [18, 2, 3, 4, 10, 0, 7, 8]
    peer.read(IndexRange(1, 2), theirs, SHUFFLED)
    for number, layer in enumerate(reader.store.layers):
        if number != 1:
            assert torch.equal(layer, before[number])
    assert torch.equal(reader.store.layers[1][SHUFFLED], owner.store.layers[1][theirs])
    others = [block for block in range(NUM_BLOCKS + 1) if block not in SHUFFLED]
    assert torch.equal(reader.store.layers[1][others], before[1][others])
    assert reader.driver.num_copies == 6, "blocks that follow one another are copied together"
    peer.close()
    assert reader.driver.mapped == {}


@pytest.mark.parametrize(("has_one_device", "num_copies"), [(True, 1), (False, 6)])
def test_scattered_blocks_are_copied_at_once_within_a_device(
    monkeypatch: pytest.MonkeyPatch, has_one_device: bool, num_copies: int
) -> None:
    monkeypatch.setattr(shared_cache, "_MAX_RUNS", 5)
    host = FakeHost()
    reader, owner = a_process(host, 0), a_process(host, 1, NUM_BLOCKS + 7)
    reader.driver.has_one_device = has_one_device
    peer = reader.shared.open(ANOTHER_PROCESS, owner.shared.describe())
    theirs = [18, 2, 3, 4, 10, 0, 7, 8]
    peer.read(IndexRange(1, 2), theirs, SHUFFLED)
    assert torch.equal(reader.store.layers[1][SHUFFLED], owner.store.layers[1][theirs])
    assert reader.driver.num_copies == num_copies
    peer.close()


def test_layers_of_one_allocation_are_opened_once() -> None:
    host, reader = FakeHost(), a_process(FakeHost(), 0)
    reader = a_process(host, 0)
    streams = FakeStreams()
    driver, whole = FakeDriver(host, streams), torch.randn(3, NUM_BLOCKS, LAYOUT.max_page_bytes // 4)
    driver.own([whole])
    owner = CudaSharedCache(LAYOUT, NUM_BLOCKS, [layer.data_ptr() for layer in whole], memory=driver, streams=streams)
    peer = reader.shared.open(ANOTHER_PROCESS, owner.describe())
    assert len(reader.driver.mapped) == 1
    peer.read(IndexRange(0, LAYOUT.num_layers), range(NUM_BLOCKS), range(NUM_BLOCKS))
    for layer in range(LAYOUT.num_layers):
        copied = reader.store.layers[layer][:NUM_BLOCKS].reshape(NUM_BLOCKS, -1).view(torch.float32)
        assert torch.equal(copied, whole[layer])


def test_a_cache_that_is_not_there_is_not_read() -> None:
    """A wrong address would end all that the process computes, so what the peer says is held against the driver."""
    host = FakeHost()
    reader, owner = a_process(host, 0), a_process(host, 1)
    good = owner.shared.describe()
    for more_blocks in (1, 1 << 40):
        lie = (NUM_BLOCKS + 1 + more_blocks).to_bytes(8, "little") + good[8:]
        with pytest.raises(KvTransferError, match="not at the address that it sent"):
            reader.shared.open(ANOTHER_PROCESS, lie)
    for offset in (1 << 40, 4):  # beyond it, and in the middle of a word
        lie = good[: 8 + HANDLE_BYTES] + offset.to_bytes(8, "little") + good[16 + HANDLE_BYTES :]
        with pytest.raises(KvTransferError, match="not at the address that it sent"):
            reader.shared.open(ANOTHER_PROCESS, lie)
    with pytest.raises(KvTransferError, match="cuIpcOpenMemHandle"):
        reader.shared.open(ANOTHER_PROCESS, good[:8] + bytes(len(good) - 8))
    assert reader.driver.mapped == {}, "what was opened in vain is closed"
    peer = reader.shared.open(ANOTHER_PROCESS, good)
    with pytest.raises(KvTransferError, match="a block outside the peer's 12"):
        peer.read(IndexRange(0, 1), [NUM_BLOCKS], [0])
    host.dead.add(owner.driver)
    with pytest.raises(KvTransferError, match="cuIpcOpenMemHandle"):
        a_process(host, 2).shared.open(ANOTHER_PROCESS, good)


def test_memory_that_has_no_handles_is_not_shared() -> None:
    """As torch's expandable segments: its KV travels in pieces."""
    store = DeviceKvStore(LAYOUT, 1, FakeStreams(), FakeDriver(FakeHost(), FakeStreams()))
    assert store.shared is None
    assert DeviceKvStore(LAYOUT, 1, FakeStreams()).shared is None


@pytest.mark.anyio
@pytest.mark.parametrize("same_process", [False, True])
async def test_members_pass_each_other_kv_from_device_to_device(
    monkeypatch: pytest.MonkeyPatch, same_process: bool
) -> None:
    """As soon as the device has written it, and not before; nothing goes through host memory."""
    host, maker = FakeHost(), TransportMaker("memory", peer_reads=True)
    processes = [a_process(host, seed) for seed in range(2)]
    for process in processes:
        monkeypatch.setattr(process.store, "gather", None)
        monkeypatch.setattr(process.store, "scatter", None)
    if same_process:
        for one, other in (processes, processes[::-1]):
            one.driver.own(other.store.layers)
    else:
        monkeypatch.setattr(shared_cache, "os", SimpleNamespace(getpid=lambda: ANOTHER_PROCESS))
    async with AsyncExitStack() as stack:
        exchanges = []
        config = replace(maker.config(SMALL_TRANSFER), no_progress_s=20.0)
        transports = [await stack.enter_async_context(maker.open(config)) for _ in processes]
        tables = [SHUFFLED, list(range(8))]
        for number, process in enumerate(processes):
            pool = BlockPool(NUM_BLOCKS)
            pool.allocate(NUM_BLOCKS)
            mover = KvMover(
                transport=transports[number], store=process.store, pool=pool, config=config, on_outcome=print
            )
            await stack.enter_async_context(mover)
            exchanges.append(
                mover.groups.open(RequestId("r"), Epoch(0), capability=1, block_ids=tables[number], wakeup=Wakeup())
            )
            mover.groups.set_members(RequestId("r"), Epoch(0), number, [peer.address for peer in transports])
        leader, helper = exchanges
        assert helper.begin(0, 8)
        processes[1].streams.held = True
        for layer in range(LAYOUT.num_layers):
            helper.publish(Blocks(0, layer, 0, 8))
        await anyio.sleep(0.02)
        assert not leader.ledger.has_first(0, 1)
        for written in processes[1].store.layers:
            written[:8] += 1  # the device writes it only now
        for event in processes[1].streams.events:
            event.complete()
        with anyio.fail_after(20):
            while leader.ledger.num_complete_blocks < 8:
                await anyio.lowlevel.checkpoint()
        for ours, theirs in zip(processes[0].store.layers, processes[1].store.layers, strict=True):
            assert torch.equal(ours[SHUFFLED], theirs[:8])
        for exchange in exchanges:
            exchange.end("over")


# The bindings of the real driver, where they are installed; only what a device would do is a stand-in.


@pytest.fixture
def driver_calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, tuple[object, ...]]]:
    driver = pytest.importorskip("cuda.bindings.driver", exc_type=ImportError)
    calls: list[tuple[str, tuple[object, ...]]] = []
    results: dict[str, tuple[object, ...]] = {
        "cuInit": (),
        "cuDeviceGet": (driver.CUdevice(3),),
        "cuDevicePrimaryCtxRetain": (driver.CUcontext(77),),
        "cuCtxSetCurrent": (),
        "cuMemGetAddressRange": (driver.CUdeviceptr(0x1000), 0x500),
        "cuIpcGetMemHandle": (driver.CUipcMemHandle(),),
        "cuIpcOpenMemHandle": (driver.CUdeviceptr(0x9000),),
        "cuIpcCloseMemHandle": (),
        "cuMemcpyAsync": (),
        "cuPointerGetAttribute": (3,),
    }

    def stand_in(name: str) -> Callable[..., object]:
        signature = inspect.signature(getattr(driver, name))

        def call(*arguments: object) -> object:
            signature.bind(*arguments)
            calls.append((name, arguments))
            return (driver.CUresult.CUDA_SUCCESS, *results[name])

        return call

    for name in results:
        monkeypatch.setattr(driver, name, stand_in(name))
    return calls


def test_the_driver_is_called_as_its_bindings_want_it(driver_calls: list[tuple[str, tuple[object, ...]]]) -> None:
    driver = CudaDriver(3, lambda: 0x55)
    assert driver.allocation(0x1234) == (0x1000, 0x500)
    handle = driver.handle(0x1000)
    assert handle == bytes(HANDLE_BYTES)
    assert driver.open(bytes(range(HANDLE_BYTES))) == 0x9000
    driver.copy(0x1000, 0x9000, 256)
    assert driver.is_near(0x9000)
    driver.close(0x9000)
    names = [name for name, _ in driver_calls]
    assert names == [
        *("cuInit", "cuDeviceGet", "cuDevicePrimaryCtxRetain", "cuCtxSetCurrent"),  # once for a thread
        *("cuMemGetAddressRange", "cuIpcGetMemHandle", "cuIpcOpenMemHandle", "cuMemcpyAsync"),
        *("cuPointerGetAttribute", "cuIpcCloseMemHandle"),
    ]
    arguments = dict(driver_calls)
    assert arguments["cuDeviceGet"] == (3,)
    opened = arguments["cuIpcOpenMemHandle"][0]
    assert CudaDriver.handle_bytes(opened) == bytes(range(HANDLE_BYTES))
    to, source, num_bytes, stream = arguments["cuMemcpyAsync"]
    assert [int(value) for value in (to, source, stream)] == [0x1000, 0x9000, 0x55]  # type: ignore[call-overload]
    assert num_bytes == 256


def test_a_cache_of_this_process_is_where_it_is() -> None:
    """Whoever says that it is in this process says where."""
    process = a_process(FakeHost(), 0)
    good, own = process.shared.describe(), process.store.layers[0]
    behind, inside = own.data_ptr() + own.nbytes, own.data_ptr() + 4
    for address, reason in (
        (8, "not this process's"),
        (behind - 8, "not at the address"),
        (inside, "not at the address"),
    ):
        lie = good[: 16 + HANDLE_BYTES] + address.to_bytes(8, "little") + good[24 + HANDLE_BYTES :]
        with pytest.raises(KvTransferError, match=reason):
            process.shared.open(os.getpid(), lie)
    process.shared.open(os.getpid(), good).close()


def test_a_device_without_room_is_sent_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_room(driver: CudaDriver, block_ids: Sequence[int]) -> Tensor:
        raise torch.OutOfMemoryError("64 MiB")

    monkeypatch.setattr(CudaDriver, "_index", no_room)
    with pytest.raises(KvTransferError, match="no room for a copy buffer: 64 MiB"):
        CudaDriver(0, lambda: 0).copy_blocks([0x1000], [0x9000], 64, theirs=[1], ours=[2])


def test_what_the_driver_refuses_is_an_error(
    driver_calls: list[tuple[str, tuple[object, ...]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    driver: Any = importlib.import_module("cuda.bindings.driver")

    refused = driver.CUresult.CUDA_ERROR_PEER_ACCESS_UNSUPPORTED
    monkeypatch.setattr(driver, "cuIpcOpenMemHandle", lambda handle, flags: (refused, None))
    with pytest.raises(KvTransferError, match="cuIpcOpenMemHandle: CUDA_ERROR_PEER_ACCESS_UNSUPPORTED"):
        CudaDriver(0, lambda: 0).open(bytes(HANDLE_BYTES))
