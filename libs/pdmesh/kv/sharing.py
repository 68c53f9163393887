"""A KV cache that processes of the same host may copy pages from: its description, and how it is opened and read.

Caches are only read: no process writes into another's memory, so a page holds what its owner wrote. Whether a page
still held the wanted KV when it was read, the owner says separately (`pdmesh.kv.peer_reads`).
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

from pdmesh.errors import KvTransferError
from pdmesh.kv_layout import IndexRange, KvLayout
from pdmesh.transport.reading import read_parts

_SIZES = struct.Struct("<2Q")


class PeerCache(Protocol):
    """Another instance's cache of the same layout, opened."""

    def read(self, layers: IndexRange, theirs: Sequence[int], ours: Sequence[int]) -> None:
        """Copy the cache's pages ``theirs``, in order, into ``ours`` of this instance, in each of ``layers``.

        Page numbers are frames in layers with frames (`pdmesh.kv.frames`), and blocks in others; ``layers`` has one
        kind only.

        The copy is complete on return. Any thread. Raises KvTransferError, possibly after copying some pages.
        """
        ...

    def close(self) -> None:
        """Release the mapping. Call after the last read."""
        ...


class SharedCache(Protocol):
    """An instance's cache, as other processes of its host may open it."""

    @property
    def kind(self) -> bytes:
        """The cache's kind, in four bytes. Only caches of the same kind can open each other."""
        ...

    @property
    def max_read_bytes(self) -> int:
        """Maximum bytes of KV in one read. A copy runs to its end even if the request is cancelled."""
        ...

    @property
    def copies_inline(self) -> bool:
        """Whether short copies may be made on the event loop, because they do not wait."""
        ...

    def describe(self) -> bytes:
        """Return the argument of `open` for other processes. Its length is fixed for a kind and layout."""
        ...

    def open(self, pid: int, described: bytes) -> PeerCache:
        """Open the cache of another process, of the same kind and layout. Raises KvTransferError."""
        ...


class HostCache:
    """`SharedCache` of host memory: pages are read directly from the other process, without staging."""

    kind = b"host"
    copies_inline = True

    # All buffers of a receiver may hold reads that are copied before the next message, such as the commit of a paused
    # decode. A prompt of one block behind 1.5 GiB took 3 to 9 ms if the 1.5 GiB went in pieces, 10 to 26 in reads of
    # 16 MiB, 19 to 57 in reads of 64 MiB. The 1.5 GiB took 0.23 s, 0.11 and 0.10 (2-core VM, 2026-11-23).
    max_read_bytes = 16 << 20

    def __init__(
        self, layout: KvLayout, num_blocks: int, layer_addresses: Sequence[int], *, num_frames: int = 0
    ) -> None:
        """``layer_addresses`` has the address of each layer's page 0, which its other pages follow.

        Layers with a window have ``num_frames`` pages, if the layout frees pages outside the window.
        """
        self._layout = layout
        self._num_blocks, self._num_frames = num_blocks, num_frames
        self._layer_addresses = layer_addresses
        self._addresses = struct.Struct(f"<{layout.num_layers}Q")

    def describe(self) -> bytes:
        return _SIZES.pack(self._num_blocks, self._num_frames) + self._addresses.pack(*self._layer_addresses)

    def open(self, pid: int, described: bytes) -> HostPeerCache:
        num_blocks, num_frames = _SIZES.unpack_from(described)
        addresses = self._addresses.unpack_from(described, _SIZES.size)
        windowed = self._layout.windowed_layers
        num_pages = [num_frames if layer in windowed else num_blocks for layer in range(self._layout.num_layers)]
        return HostPeerCache(pid, num_pages, addresses, self._layer_addresses, self._layout)


class HostPeerCache:
    """`PeerCache` of host memory, by cross-memory attach. Reads raise KvTransferError once the owner is dead."""

    def __init__(
        self,
        pid: int,
        num_pages: Sequence[int],
        their_layers: Sequence[int],
        our_layers: Sequence[int],
        layout: KvLayout,
    ) -> None:
        self._pid = pid
        self._num_pages = num_pages
        self._their_layers = their_layers
        self._our_layers = our_layers
        self._layout = layout

    def read(self, layers: IndexRange, theirs: Sequence[int], ours: Sequence[int]) -> None:
        check_blocks(theirs, min(self._num_pages[slice(*layers)]))
        runs, parts = list(common_runs(theirs, ours)), list[tuple[int, int, int]]()
        for layer in range(*layers):
            from_address, to_address = self._their_layers[layer], self._our_layers[layer]
            size = self._layout.page_bytes(layer)
            parts += [
                (from_address + run.theirs * size, to_address + run.ours * size, run.num_blocks * size) for run in runs
            ]
        try:
            read_parts(self._pid, parts)
        except OSError as error:
            raise KvTransferError(f"the peer's cache cannot be read: {error}") from error

    def close(self) -> None:
        """Do nothing: host memory is not mapped."""


class Run(NamedTuple):
    """Blocks that are contiguous in both caches."""

    theirs: int
    ours: int
    num_blocks: int


def common_runs(theirs: Sequence[int], ours: Sequence[int]) -> Iterator[Run]:
    """Yield the fewest runs that copy each block of ``theirs`` to the block of ``ours`` at the same index."""
    first = 0
    for position in range(1, len(ours) + 1):
        if (
            position == len(ours)
            or theirs[position] != theirs[position - 1] + 1
            or ours[position] != ours[position - 1] + 1
        ):
            yield Run(theirs[first], ours[first], position - first)
            first = position


def check_blocks(block_ids: Sequence[int], num_blocks: int) -> None:
    """Raise KvTransferError if a peer named a block outside its ``num_blocks`` blocks. At least one is named."""
    if not 0 <= min(block_ids) <= max(block_ids) < num_blocks:
        raise KvTransferError(f"a block outside the peer's {num_blocks}")
