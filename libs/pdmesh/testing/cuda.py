"""A device that is the host: what the CUDA engine needs of streams and graphs, for tests without one."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from pdmesh.engine.compute import Compute, Loaded
from pdmesh.engine.cuda.flashinfer import FlashInfer
from pdmesh.engine.cuda.forward import DeviceForward
from pdmesh.engine.cuda.kv_store import DeviceKvStore
from pdmesh.engine.kernels import TorchKernels
from pdmesh.testing.flashinfer import FakeFlashInfer

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

    def record(self, *, spins: bool = False) -> FakeEvent:
        self.num_recorded += 1
        event = FakeEvent(done=not self.held)
        self.events.append(event)
        return event

    @contextlib.contextmanager
    def copying(self) -> Iterator[None]:
        yield

    @contextlib.contextmanager
    def pinned(self, memory: Sequence[memoryview]) -> Iterator[None]:
        self.num_pinned += len(memory)
        yield
        self.num_pinned -= len(memory)

    def host_buffer(self, num_values: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(num_values, dtype=dtype)


class FakeRecorder:
    """`pdmesh.engine.cuda.graphs.Recorder`: a replay does the work again."""

    def __init__(self) -> None:
        self.num_recorded = 0

    def record(self, work: Callable[[], object]) -> Callable[[], object]:
        self.num_recorded += 1
        work()
        return work


def fake_cuda_compute(loaded: Loaded, library: FakeFlashInfer, streams: FakeStreams, recorder: FakeRecorder) -> Compute:
    """What `pdmesh.engine.cuda.compute.cuda_compute` puts together, on the host and for any dtype."""
    store = DeviceKvStore(loaded.layout, loaded.num_blocks, streams)
    flashinfer = FlashInfer(
        library,
        loaded.layout,
        num_heads=loaded.config.num_heads,
        scale=loaded.scale,
        max_decodes=loaded.max_num_seqs,
        num_multiprocessors=4,
        device=streams.device,
    )
    transformer = loaded.transformer(TorchKernels(loaded.config.rms_norm_eps))
    forward = DeviceForward(
        transformer,
        flashinfer,
        store,
        streams,
        recorder,
        max_model_len=loaded.max_model_len,
        max_num_seqs=loaded.max_num_seqs,
    )
    return Compute(name="fake", transformer=transformer, forward=forward, kv=store)
