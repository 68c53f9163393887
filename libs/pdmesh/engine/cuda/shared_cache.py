"""A device's KV cache that other processes on the host read by the driver's IPC handles, from device to device.

The driver names an allocation by 64 bytes. Another process maps it into its own device's addresses. Between two
devices, this requires peer access (NVLink, or PCIe where the system allows it). A handle can name only memory of
``cudaMalloc``. An instance that uses torch's expandable segments therefore shares nothing.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import struct
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

import structlog
import torch
from torch import Tensor

from pdmesh.errors import KvTransferError
from pdmesh.kv.sharing import check_blocks, common_runs
from pdmesh.kv_layout import IndexRange, KvLayout

log = structlog.get_logger()

HANDLE_BYTES = 64

#: Number of copies that take the host as long as the kernels for scattered blocks. A copy takes 6 µs. The kernels take
#: 105 µs for 64 blocks of 64 KiB, and 288 for 512 blocks, which took 3,500 by copies (H100, 2026-11-23).
_MAX_RUNS = 16

_WORD_BYTES = 8

_NUM_BLOCKS = struct.Struct("<Q")
#: One layer: handle of the allocation, the layer's offset in the allocation, and the layer's address.
_LAYER = struct.Struct(f"<{HANDLE_BYTES}sQQ")


class DeviceAllocation(NamedTuple):
    """An allocation of the driver: its address and size."""

    address: int
    num_bytes: int


class DeviceMemory(Protocol):
    """Driver calls for device memory. Every call raises KvTransferError."""

    def allocation(self, address: int) -> DeviceAllocation:
        """Return the allocation that contains an address."""
        ...

    def handle(self, address: int) -> bytes:
        """Return `HANDLE_BYTES` by which other processes open the allocation."""
        ...

    def open(self, handle: bytes) -> int:
        """Map another process's allocation, and return its address here. A process cannot open its own handles."""
        ...

    def close(self, address: int) -> None: ...

    def copy(self, to_address: int, from_address: int, num_bytes: int) -> None:
        """Submit the copy to the calling thread's current stream."""
        ...

    def is_near(self, address: int) -> bool:
        """Return whether the memory is on this process's device, whichever process allocated it."""
        ...

    def copy_blocks(
        self,
        to_layers: Sequence[int],
        from_layers: Sequence[int],
        block_bytes: int,
        *,
        theirs: Sequence[int],
        ours: Sequence[int],
    ) -> None:
        """Copy blocks by their numbers, from the given layer addresses on, all near, with two kernels per layer."""
        ...


class Copying(Protocol):
    """The part of `pdmesh.engine.cuda.streams.Streams` that copies need."""

    def copying(self) -> AbstractContextManager[None]: ...


class CudaSharedCache:
    """`pdmesh.kv.sharing.SharedCache` of a device's cache."""

    kind = b"cuda"
    copies_inline = False
    max_read_bytes = 64 << 20

    def __init__(
        self,
        layout: KvLayout,
        num_blocks: int,
        layer_addresses: Sequence[int],
        *,
        memory: DeviceMemory,
        streams: Copying,
    ) -> None:
        """Raise KvTransferError if the driver gives no handles for this memory."""
        self._layout = layout
        self._layer_addresses = layer_addresses
        self._memory = memory
        self._streams = streams
        parts = [_NUM_BLOCKS.pack(num_blocks)]
        for address in layer_addresses:
            allocation = memory.allocation(address)
            parts.append(_LAYER.pack(memory.handle(allocation.address), address - allocation.address, address))
        self._described = b"".join(parts)

    def describe(self) -> bytes:
        return self._described

    def open(self, pid: int, described: bytes) -> CudaPeerCache:
        (num_blocks,) = _NUM_BLOCKS.unpack_from(described)
        layers = list(_LAYER.iter_unpack(described[_NUM_BLOCKS.size :]))
        peer = CudaPeerCache(
            self._layer_addresses, self._layout.max_page_bytes, num_blocks, self._memory, self._streams
        )
        try:
            if pid == os.getpid():  # the driver opens no handle in the process that made it
                peer.use([address for _, _, address in layers])
            else:
                peer.map([(handle, offset) for handle, offset, _ in layers])
        except BaseException:
            peer.close()
            raise
        return peer


class CudaPeerCache:
    """`pdmesh.kv.sharing.PeerCache` of a device's cache. Layers may share an allocation, which is mapped once."""

    def __init__(
        self,
        our_layers: Sequence[int],
        block_bytes: int,
        num_blocks: int,
        memory: DeviceMemory,
        streams: Copying,
    ) -> None:
        self._our_layers = our_layers
        self._their_layers: Sequence[int] = ()
        self._block_bytes = block_bytes
        self._num_blocks = num_blocks
        self._memory = memory
        self._streams = streams
        self._mapped: dict[bytes, int] = {}

    def use(self, layer_addresses: Sequence[int]) -> None:
        """Use layers of this process. Raise KvTransferError if these are not its memory."""
        for address in layer_addresses:
            allocation = self._memory.allocation(address)
            self._check_place(address - allocation.address, allocation)
        self._their_layers = layer_addresses

    def map(self, layers: Sequence[tuple[bytes, int]]) -> None:
        """Map layers of another process, each given by handle and offset in an allocation.

        Raise KvTransferError if mapping fails, or a layer is not inside its allocation.
        """
        addresses: list[int] = []
        for handle, offset in layers:
            if handle not in self._mapped:
                self._mapped[handle] = self._memory.open(handle)
            allocation = self._memory.allocation(self._mapped[handle])
            self._check_place(offset, allocation)
            addresses.append(allocation.address + offset)
        self._their_layers = addresses

    def _check_place(self, offset: int, allocation: DeviceAllocation) -> None:
        """Raise KvTransferError unless the cache lies inside its allocation and is aligned.

        A wrong read, beyond the end or of half a word, would end this process's computation, so peers are not trusted.
        """
        if offset + self._num_blocks * self._block_bytes > allocation.num_bytes or offset % _WORD_BYTES:
            raise KvTransferError("the peer's cache is not at the address that it sent")

    def read(self, layers: IndexRange, theirs: Sequence[int], ours: Sequence[int]) -> None:
        check_blocks(theirs, self._num_blocks)
        size, runs = self._block_bytes, list(common_runs(theirs, ours))
        to_layers, from_layers = self._our_layers[slice(*layers)], self._their_layers[slice(*layers)]
        with self._streams.copying():  # leaving waits once for all copies: a wait costs as much as a layer's copy
            if len(runs) > _MAX_RUNS and self._memory.is_near(from_layers[0]):
                self._memory.copy_blocks(to_layers, from_layers, size, theirs=theirs, ours=ours)
                return
            for to_address, from_address in zip(to_layers, from_layers, strict=True):
                for run in runs:
                    self._memory.copy(
                        to_address + run.ours * size, from_address + run.theirs * size, run.num_blocks * size
                    )

    def close(self) -> None:
        while self._mapped:
            _, address = self._mapped.popitem()
            try:
                self._memory.close(address)
            except KvTransferError as error:  # the process that owns it may have ended
                log.info("cannot close a peer's cache", reason=str(error))


class _Words:
    """Device memory in numba's interface, which torch accepts without copying: rows of words of eight bytes."""

    def __init__(self, address: int, num_rows: int, num_columns: int) -> None:
        self.__cuda_array_interface__ = {
            "version": 3,
            "shape": (num_rows, num_columns),
            "typestr": "<i8",
            "data": (address, False),
        }


class CudaDriver:
    """`DeviceMemory` by CUDA's driver, with the bindings that torch includes. Raise ImportError without these."""

    def __init__(self, device_index: int, current_stream: Callable[[], int]) -> None:
        """``current_stream`` returns the calling thread's stream, as in ``torch.cuda.Stream.cuda_stream``."""
        self._driver: Any = importlib.import_module("cuda.bindings.driver")
        self._device_index = device_index
        self._device = torch.device("cuda", device_index)
        self._current_stream = current_stream
        self._local = threading.local()

    def allocation(self, address: int) -> DeviceAllocation:
        base, num_bytes = self._call("cuMemGetAddressRange", self._driver.CUdeviceptr(address))
        return DeviceAllocation(int(base), int(num_bytes))

    def handle(self, address: int) -> bytes:
        (handle,) = self._call("cuIpcGetMemHandle", self._driver.CUdeviceptr(address))
        return self.handle_bytes(handle)

    @staticmethod
    def handle_bytes(handle: Any) -> bytes:
        """Return the bytes of the driver's ``CUipcMemHandle``."""
        return ctypes.string_at(handle.getPtr(), HANDLE_BYTES)

    def open(self, handle: bytes) -> int:
        named = self._driver.CUipcMemHandle()
        ctypes.memmove(named.getPtr(), handle, HANDLE_BYTES)
        flags = self._driver.CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS.value
        (address,) = self._call("cuIpcOpenMemHandle", named, flags)
        return int(address)

    def close(self, address: int) -> None:
        self._call("cuIpcCloseMemHandle", self._driver.CUdeviceptr(address))

    def copy(self, to_address: int, from_address: int, num_bytes: int) -> None:
        pointer, stream = self._driver.CUdeviceptr, self._driver.CUstream(self._current_stream())
        self._call("cuMemcpyAsync", pointer(to_address), pointer(from_address), num_bytes, stream)

    def is_near(self, address: int) -> bool:
        attribute = self._driver.CUpointer_attribute.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL
        (number,) = self._call("cuPointerGetAttribute", attribute, self._driver.CUdeviceptr(address))
        return int(number) == self._device_index

    def copy_blocks(
        self,
        to_layers: Sequence[int],
        from_layers: Sequence[int],
        block_bytes: int,
        *,
        theirs: Sequence[int],
        ours: Sequence[int],
    ) -> None:
        try:
            their_index, our_index = self._index(theirs), self._index(ours)
            for to_address, from_address in zip(to_layers, from_layers, strict=True):
                source = self._blocks(from_address, block_bytes, theirs)
                target = self._blocks(to_address, block_bytes, ours)
                target.index_copy_(0, our_index, source.index_select(0, their_index))
        except torch.OutOfMemoryError as error:  # pieces of a few MiB need less memory
            raise KvTransferError(f"the device has no room for a copy buffer: {error}") from error

    def _blocks(self, address: int, block_bytes: int, block_ids: Sequence[int]) -> Tensor:
        """Return a view of memory, perhaps another process's, with a row per block up to the highest given."""
        return torch.as_tensor(_Words(address, max(block_ids) + 1, block_bytes // _WORD_BYTES), device=self._device)

    def _index(self, block_ids: Sequence[int]) -> Tensor:
        return torch.tensor(list(block_ids)).to(self._device, non_blocking=True)

    def _call(self, name: str, *arguments: object) -> Sequence[Any]:
        """Call the driver in torch's context, the device's primary one. Return the results after the status code.

        Raise KvTransferError unless the status code is a success.
        """
        if not hasattr(self._local, "context"):
            self._check("cuInit", 0)
            (device,) = self._check("cuDeviceGet", self._device_index)
            (context,) = self._check("cuDevicePrimaryCtxRetain", device)
            self._check("cuCtxSetCurrent", context)
            self._local.context = context
        return self._check(name, *arguments)

    def _check(self, name: str, *arguments: object) -> Sequence[Any]:
        results: Sequence[Any]
        code, *results = getattr(self._driver, name)(*arguments)
        if code != self._driver.CUresult.CUDA_SUCCESS:
            raise KvTransferError(f"{name}: {code.name}")
        return results
