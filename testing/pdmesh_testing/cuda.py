"""A device that is the host: what the CUDA engine needs of streams and graphs, for tests without one."""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from pdmesh.engine.compute import Cache, Compute, Loaded
from pdmesh.engine.cuda.cuda_forward import DeviceForward
from pdmesh.engine.cuda.flashinfer import FlashInfer
from pdmesh.engine.cuda.kv_store import DeviceKvStore
from pdmesh.engine.cuda.shared_cache import HANDLE_BYTES, DeviceAllocation
from pdmesh.engine.kernels import Elementwise, TorchKernels
from pdmesh.errors import KvTransferError
from pdmesh_testing.flashinfer import FakeFlashInfer

_TIMEOUT_S = 30.0


class FakeEvent:
    """Comes about when told to; `FakeStreams` makes events that have, unless it is ``held``."""

    def __init__(self, *, done: bool) -> None:
        self._done = threading.Event()
        if done:
            self._done.set()

    def synchronize(self) -> None:
        if not self._done.wait(_TIMEOUT_S):
            raise TimeoutError("nobody ended the event")

    def complete(self) -> None:
        self._done.set()


class FakeStreams:
    """`pdmesh.engine.cuda.streams.Streams` of the CPU. With ``held``, its events wait for `FakeEvent.complete`."""

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self.held = False
        self.events: list[FakeEvent] = []
        self.num_pinned = 0
        self.num_recorded = 0
        self._copies = threading.local()

    def record(self, *, spins: bool = False) -> FakeEvent:
        self.num_recorded += 1
        event = FakeEvent(done=not self.held)
        self.events.append(event)
        return event

    @property
    def copies(self) -> list[Callable[[], object]]:
        """Copies that a `FakeDriver` was given by the calling thread, and has not made yet."""
        copies: list[Callable[[], object]] = self._copies.__dict__.setdefault("waiting", [])
        return copies

    @contextlib.contextmanager
    def copying(self) -> Iterator[None]:
        yield
        while self.copies:
            self.copies.pop(0)()

    @contextlib.contextmanager
    def pinned(self, memory: Sequence[memoryview]) -> Iterator[None]:
        self.num_pinned += len(memory)
        yield
        self.num_pinned -= len(memory)

    def host_buffer(self, num_values: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(num_values, dtype=dtype)


class FakeHost:
    """Devices of a host: the exported allocations with their processes' drivers, and the drivers of dead processes."""

    def __init__(self) -> None:
        self.owners: dict[bytes, FakeDriver] = {}
        self.dead: set[FakeDriver] = set()


class FakeDriver:
    """`pdmesh.engine.cuda.shared_cache.DeviceMemory` of one process, in host memory.

    An allocation of another process is mapped at an address beyond all real ones. Unknown addresses are refused. Copies
    are made when their stream is waited for.
    """

    #: Beyond all real addresses.
    _MAPPED = 1 << 56

    def __init__(self, host: FakeHost, streams: FakeStreams) -> None:
        self._host = host
        self._streams = streams
        self._own: list[DeviceAllocation] = []
        # Mapped allocations by address.
        self.mapped: dict[int, DeviceAllocation] = {}
        self.num_copies = 0
        self.has_one_device = True

    def own(self, tensors: Sequence[Tensor]) -> None:
        """Register each tensor as an allocation of this process."""
        self._own += [DeviceAllocation(tensor.data_ptr(), tensor.nbytes) for tensor in tensors]

    def allocation(self, address: int) -> DeviceAllocation:
        for start, num_bytes in (*self._own, *((at, part.num_bytes) for at, part in self.mapped.items())):
            if start <= address < start + num_bytes:
                return DeviceAllocation(start, num_bytes)
        raise KvTransferError(f"cuMemGetAddressRange: {address:#x} is not this process's")

    def handle(self, address: int) -> bytes:
        (number,) = [number for number, part in enumerate(self._own) if part.address == address]
        handle = f"{number} of {id(self)}".encode().ljust(HANDLE_BYTES, b"\0")
        self._host.owners[handle] = self
        return handle

    def open(self, handle: bytes) -> int:
        owner = self._host.owners.get(handle)
        if owner is None or owner is self or owner in self._host.dead:
            raise KvTransferError("cuIpcOpenMemHandle: CUDA_ERROR_INVALID_VALUE")
        theirs = owner._own[int(handle.split(b" ")[0])]
        address = self._MAPPED + theirs.address
        assert address not in self.mapped, "opened twice"
        self.mapped[address] = theirs
        return address

    def close(self, address: int) -> None:
        del self.mapped[address]

    def copy(self, to_address: int, from_address: int, num_bytes: int) -> None:
        for address in (to_address, from_address):
            start, size = self.allocation(address)
            assert address + num_bytes <= start + size, "beyond the allocation"
        at, _ = self.allocation(from_address)
        source = self.mapped[at].address + from_address - at if at in self.mapped else from_address
        self._streams.copies.append(lambda: ctypes.memmove(to_address, source, num_bytes))
        self.num_copies += 1

    def is_near(self, address: int) -> bool:
        return self.has_one_device

    def copy_blocks(
        self,
        to_layers: Sequence[int],
        from_layers: Sequence[int],
        block_bytes: int,
        *,
        theirs: Sequence[int],
        ours: Sequence[int],
    ) -> None:
        num_copies = self.num_copies + len(to_layers)
        for to_address, from_address in zip(to_layers, from_layers, strict=True):
            for their, our in zip(theirs, ours, strict=True):
                self.copy(to_address + our * block_bytes, from_address + their * block_bytes, block_bytes)
        self.num_copies = num_copies


class FakeRecorder:
    """`pdmesh.engine.cuda.graphs.Recorder`: a replay does the work again."""

    def __init__(self) -> None:
        self.num_recorded = 0

    def record(self, work: Callable[[], object]) -> Callable[[], object]:
        self.num_recorded += 1
        work()
        return work


def fake_cuda_compute(
    loaded: Loaded, cache: Cache, library: FakeFlashInfer, streams: FakeStreams, recorder: FakeRecorder
) -> Compute:
    """What `pdmesh.engine.cuda.cuda_compute.cuda_compute` puts together, on the host and for any dtype."""
    store = DeviceKvStore(loaded.layout, cache.num_blocks, streams)
    flashinfer = FlashInfer(
        library,
        loaded.layout,
        num_heads=loaded.config.num_heads,
        scale=loaded.config.scale,
        max_decodes=loaded.options.max_num_seqs,
        num_multiprocessors=4,
        device=streams.device,
    )
    transformer = loaded.transformer(TorchKernels(Elementwise.of(loaded.config), dtype=loaded.weights.dtype))
    forward = DeviceForward(
        transformer,
        flashinfer,
        store,
        streams,
        recorder,
        max_model_len=loaded.max_model_len,
        max_num_seqs=loaded.options.max_num_seqs,
    )
    return Compute(name="fake", arithmetic="fake", forward=forward, kv=store)
