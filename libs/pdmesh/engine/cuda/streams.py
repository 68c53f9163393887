"""Order of a device's computation and copies: streams, events and pinned memory behind a Protocol.

The engine's thread computes on its current stream. Each thread that copies has its own stream, so that copies and
computation overlap. No call waits for the whole device.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor


class Event(Protocol):
    """A point in a stream's work."""

    def synchronize(self) -> None:
        """Wait, without the interpreter's lock, until the device has reached this point."""
        ...


class Streams(Protocol):
    """Queues of a device's work for one engine."""

    @property
    def device(self) -> torch.device: ...

    def record(self, *, spins: bool = False) -> Event:
        """Return the point after all work that the calling thread has submitted to its current stream.

        Waiting for the event sleeps. With ``spins``, the wait occupies a core, and the thread is awake at once.
        """
        ...

    def copying(self) -> AbstractContextManager[None]:
        """Direct the thread's work inside the block to its copy stream. Leaving waits for this work only."""
        ...

    def pinned(self, memory: Sequence[memoryview]) -> AbstractContextManager[None]:
        """Let the device read and write ``memory`` directly inside the block."""
        ...

    def host_buffer(self, num_values: int, dtype: torch.dtype) -> Tensor:
        """Return uninitialized pinned host memory. The thread need not wait for copies from it to the device."""
        ...


class CudaStreams:
    """`Streams` of one CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._local = threading.local()

    @property
    def device(self) -> torch.device:
        return self._device

    def record(self, *, spins: bool = False) -> Event:
        event = torch.cuda.Event(blocking=not spins)  # type: ignore[no-untyped-call]
        event.record()
        return event

    @contextlib.contextmanager
    def copying(self) -> Iterator[None]:
        copies = self._copies()
        with torch.cuda.stream(copies.stream):
            try:
                yield
            finally:
                copies.end.record(copies.stream)
                copies.end.synchronize()

    @contextlib.contextmanager
    def pinned(self, memory: Sequence[memoryview]) -> Iterator[None]:
        runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        with torch.cuda.device(self._device), contextlib.ExitStack() as registered:
            for part in memory:
                address = torch.frombuffer(part, dtype=torch.uint8).data_ptr()
                torch.cuda.check_error(runtime.cudaHostRegister(address, part.nbytes, 0))
                registered.callback(runtime.cudaHostUnregister, address)
            yield

    def host_buffer(self, num_values: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(num_values, dtype=dtype, pin_memory=True)

    def _copies(self) -> _Copies:
        if not hasattr(self._local, "copies"):
            self._local.copies = _Copies(self._device)
        copies: _Copies = self._local.copies
        return copies


class _Copies:
    """A thread's own copy stream, and an event for the end of its copies."""

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self.end = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
