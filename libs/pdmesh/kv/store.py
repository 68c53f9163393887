"""The interface of an engine's KV cache to KV transfers: how bytes get in and out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

from pdmesh.kv.frames import FrameMap
from pdmesh.kv.sharing import SharedCache
from pdmesh.kv_layout import KvLayout


class KvStore(Protocol):
    """An instance's paged KV cache, seen as bytes.

    One (layer, block) page is ``layout.page_bytes(layer)`` contiguous bytes: keys and values of ``block_size`` tokens,
    shape ``(2, num_kv_heads, block_size, head_dim)``. `gather` and `scatter` block; large copies run off the event
    loop.
    """

    @property
    def layout(self) -> KvLayout: ...

    @property
    def num_blocks(self) -> int: ...

    @property
    def frames(self) -> FrameMap | None:
        """The frames of blocks in layers with a window. None if every block has a page in all layers."""
        ...

    @property
    def inline_copy_bytes(self) -> int:
        """Bytes up to which copies cost less on the event loop than on another thread."""
        ...

    @property
    def num_copy_threads(self) -> int:
        """Number of threads that copy and check pieces, for all transfers together."""
        ...

    def gather(self, layer: int, block_ids: Sequence[int], out: memoryview) -> None:
        """Copy the pages of ``block_ids``, in order, into ``out``, which has exactly their size."""
        ...

    def scatter(self, layer: int, block_ids: Sequence[int], data: memoryview) -> None:
        """Copy ``data`` into the pages of ``block_ids``, in order. The copy is complete on return."""
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
        """Return a context that encloses all use by a mover. A device reaches the mover's ``memory`` directly."""
        ...


class HostKvStore:
    """The methods of a store in host memory that concern devices: all computed KV is there at once."""

    @property
    def frames(self) -> FrameMap | None:
        return None

    @property
    def inline_copy_bytes(self) -> int:
        # A MiB is copied and checked in 0.15 ms. On another thread it took twice as long: the hop takes 60 µs, and the
        # two threads then wait for each other at the interpreter's lock. 2 MiB in pieces of 64 KiB went at 1.2 GB/s,
        # and on a thread at 0.93 (two hosts on two cores, AMD EPYC Zen 5, 2026-11-28).
        return 2 << 20

    @property
    def num_copy_threads(self) -> int:
        return 2

    @property
    def shared(self) -> SharedCache | None:
        return None

    def when_written(self, callback: Callable[[], object]) -> None:
        callback()

    def serving(self, memory: Sequence[memoryview]) -> AbstractContextManager[None]:
        return nullcontext()
