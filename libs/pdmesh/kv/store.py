"""What the KV transfer needs to know of an engine: where its KV cache is, and how bytes get in and out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

from pdmesh.kv.frames import FrameMap
from pdmesh.kv.sharing import SharedCache
from pdmesh.model import KvLayout


class KvStore(Protocol):
    """An instance's paged KV cache, seen as bytes.

    One (layer, block) piece is ``layout.block_bytes`` contiguous bytes: keys and values of ``block_size`` tokens,
    shape ``(2, num_kv_heads, block_size, head_dim)``. Both copies block; the larger ones run off the event loop.
    """

    @property
    def layout(self) -> KvLayout: ...

    @property
    def num_blocks(self) -> int: ...

    @property
    def frames(self) -> FrameMap | None:
        """Where blocks lie in layers with a window; None: all layers see everything, or hold it."""
        ...

    @property
    def inline_copy_bytes(self) -> int:
        """Size up to which copies cost less on the event loop than on another thread."""
        ...

    @property
    def num_copy_threads(self) -> int:
        """Number of threads that copy and check pieces, for all transfers together."""
        ...

    def gather(self, layer: int, block_ids: Sequence[int], out: memoryview) -> None:
        """Copy the pieces of ``block_ids``, in order, into ``out`` (exactly as many bytes)."""
        ...

    def scatter(self, layer: int, block_ids: Sequence[int], data: memoryview) -> None:
        """Copy ``data`` into the pieces of ``block_ids``, in order; they are there when it returns."""
        ...

    @property
    def shared(self) -> SharedCache | None:
        """The cache as other processes of this host may read it; None if they cannot."""
        ...

    def when_written(self, callback: Callable[[], object]) -> None:
        """Call back once everything the engine has computed so far can be gathered. On the engine's thread; cheap.

        A device computes later than it is told to: there the callback comes from another thread, inside `serving`.
        """
        ...

    def serving(self, memory: Sequence[memoryview]) -> AbstractContextManager[None]:
        """Enclose all use by a mover that copies pieces from and to ``memory``, which a device reaches directly."""
        ...


class HostKvStore:
    """The part of a store in host memory that concerns devices: whatever was computed is there."""

    @property
    def frames(self) -> FrameMap | None:
        return None

    @property
    def inline_copy_bytes(self) -> int:
        # A MiB is copied and checked in 0.15 ms. On a thread beside the loop it took twice as long: the hop takes
        # 60 µs, and the two then wait for each other's turns with the interpreter. 2 MiB in pieces of 64 KiB went at
        # 1.2 GB/s, on a thread at 0.93 (two hosts on two cores, AMD EPYC Zen 5, 2026-11-28).
        return 2 << 20

    @property
    def num_copy_threads(self) -> int:
        return 2  # steps need the processor's cores

    @property
    def shared(self) -> SharedCache | None:
        return None

    def when_written(self, callback: Callable[[], object]) -> None:
        callback()

    def serving(self, memory: Sequence[memoryview]) -> AbstractContextManager[None]:
        return nullcontext()
