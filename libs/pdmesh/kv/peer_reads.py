"""Peer reads: instances on one host copy KV from each other's caches.

In place of a piece with pages, an instance sends where in its cache the pages are. The receiver copies them straight
into its own cache, from host to host memory or from device to device, and stages nothing. All transfers do so:
hand-overs, moves, and exchanges between members of a prefill group.

**Windows.** A transfer's *window* is open as long as a word in the sender's memory has the value
that the sender sent. The sender changes that word before it gives the blocks to another request. The receiver reads the
word *after* it has copied: if the word is unchanged, so were the pages (an optimistic read, as in FaRM, NSDI 2014 §4).
So neither side waits: the sender keeps no blocks for stopped receivers, is not told when a copy ends, and may die at
any time. The word has 64 random bits, so reading it shows that the right process was read, and was alive after the
copy.

**Permissions.** Processes of one host and user that the system lets read each other's memory, as for pieces
(`pdmesh.transport.local`). Notes are sent like pieces: sealed, with the transfer's capability, between instances that
the scheduler has named. The process that is read follows from the scheduler's data address. The addresses in a note are
in its sender's own memory, so a note discloses nothing that its sender could not have sent.

**Where reads are impossible** (another host, another kind of cache, a device out of reach, an instance whose setting is
off) pages travel as bytes. A receiver that cannot read replies NO_PEER_READS, and is sent bytes from then on.
"""

from __future__ import annotations

import array
import ctypes
import hashlib
import secrets
import struct
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

from pdmesh.errors import KvTransferError
from pdmesh.kv.outgoing import BlocksAbout, Means, PieceWriter
from pdmesh.kv.pages import Blocks
from pdmesh.kv.piece import PieceHeader, PieceKind
from pdmesh.kv.sharing import PeerCache, SharedCache
from pdmesh.kv.store import KvStore
from pdmesh.kv_layout import IndexRange, KvLayout
from pdmesh.transport.buffers import PieceBuffer
from pdmesh.transport.kv_transport import KvTransport
from pdmesh.transport.reading import FORBIDDEN, read_memory

#: Maximum number of open windows of an instance. KV of further transfers travels as bytes.
MAX_WINDOWS = 1024

_NOTE = struct.Struct("<3Q")
_WORD_BYTES = 8
_PAGE_BYTES = 4

# Magic, kind of cache, hash of the layout.
_CARD_HEAD = struct.Struct("<4s4s16s")
_CARD_MAGIC = b"pdC1"


class ReadWindow:
    """The permission to read one request's KV, for the peers of one transfer or group, until ended."""

    def __init__(self, words: ctypes.Array[ctypes.c_uint64], number: int, on_over: Callable[[int], object]) -> None:
        self._words = words
        self._number = number
        self._on_over = on_over
        self.word = words[number] = secrets.randbits(64) | 1
        self.word_address = ctypes.addressof(words) + number * _WORD_BYTES

    def end(self) -> None:
        """Close the window: peers discard copies that they finish from now on. Idempotent."""
        if self._words[self._number] == self.word:
            self._words[self._number] = 0
            self._on_over(self._number)


class ReadNote(NamedTuple):
    """The payload of a peer read: where the peer may read the pages.

    ``card_address`` is where the sender's memory describes its cache. ``pages`` are numbers in that cache: blocks, then
    their frames if the cache has frames (`pdmesh.kv.frames`).
    """

    card_address: int
    word_address: int
    word: int
    pages: Sequence[int]

    def pack(self) -> bytes:
        return _NOTE.pack(*self[:3]) + array.array("I", self.pages).tobytes()

    @classmethod
    def unpack(cls, payload: memoryview) -> ReadNote:
        """Decode a payload whose length is `note_bytes`."""
        card_address, word_address, word = _NOTE.unpack_from(payload)
        return cls(card_address, word_address, word, array.array("I", bytes(payload[_NOTE.size :])))

    def copies(self, blocks: Blocks, first_block: int, block_ids: Sequence[int], store: KvStore) -> Iterator[Copies]:
        """Yield the copies from the peer's cache into this process's cache for ``blocks``, by runs of layers.

        `pages` and ``block_ids`` begin with ``first_block``. Pages outside the window of a layer have no frame here,
        and are left out.
        """
        where = slice(blocks.first_block - first_block, blocks.end - first_block)
        ours, theirs = block_ids[where], self.pages[: len(block_ids)][where]
        windowed = store.layout.windowed_layers
        for in_frames, numbers in groupby(range(blocks.layer, blocks.end_layer), windowed.__contains__):
            layers = list(numbers)
            run = IndexRange(layers[0], layers[-1] + 1)
            if not in_frames or store.frames is None:
                yield Copies(run, theirs, ours)
                continue
            frames = [int(store.frames.of_block[block_id]) for block_id in ours]
            pairs = zip(self.pages[len(block_ids) :][where], frames, strict=True)
            seen = [pair for pair in pairs if pair[1] != store.frames.zeros]
            if seen:
                yield Copies(run, *map(list, zip(*seen, strict=True)))


class Copies(NamedTuple):
    """Pages ``theirs`` of a peer's cache and the pages ``ours`` they are copied into, pairwise, in some layers."""

    layers: IndexRange
    theirs: Sequence[int]
    ours: Sequence[int]


class CacheOwner(NamedTuple):
    """A peer: its data address and its process."""

    address: bytes
    pid: int


def note_bytes(num_blocks: int, layout: KvLayout | None = None) -> int:
    """Return the size in bytes of a note of ``num_blocks`` blocks, in any number of layers."""
    return _NOTE.size + num_blocks * _bytes_a_block(layout)


def _bytes_a_block(layout: KvLayout | None) -> int:
    has_frames = layout is not None and bool(layout.windowed_layers)
    return 2 * _PAGE_BYTES if has_frames else _PAGE_BYTES


@dataclass(slots=True, eq=False)
class _Opened:
    """A peer's opened cache. If ``is_left``, it is closed when no thread reads from it."""

    cache: PeerCache
    num_readers: int = 0
    is_left: bool = False


class PeerReads:
    """The peer reads of one instance: permissions for its peers, and its own reads of their caches.

    `read` is for any thread, all else for the event loop. ``max_pages`` is the limit of one read.
    """

    def __init__(self, cache: SharedCache, layout: KvLayout, transport: KvTransport) -> None:
        self._cache = cache
        self._transport = transport
        self.max_pages = max(1, cache.max_read_bytes // layout.max_page_bytes)
        self.copies_inline = cache.copies_inline
        described = cache.describe()
        kind_of_layout = hashlib.blake2b(repr(layout).encode(), digest_size=16).digest()
        self._head = _CARD_HEAD.pack(_CARD_MAGIC, cache.kind, kind_of_layout)
        self._card = ctypes.create_string_buffer(self._head + described, len(self._head) + len(described))
        self._words = (ctypes.c_uint64 * MAX_WINDOWS)()
        self._free_words = list(range(MAX_WINDOWS))
        self._lock = threading.Lock()
        self._opening = threading.Lock()
        self._opened: dict[bytes, _Opened] = {}
        self._declined: set[bytes] = set()

    def begin(self) -> ReadWindow | None:
        """Return a new window for a request's KV, or None if too many are open."""
        return ReadWindow(self._words, self._free_words.pop(), self._free_words.append) if self._free_words else None

    def may_read(self, address: bytes) -> bool:
        return address not in self._declined and self._transport.process_of(address) is not None

    def decline(self, address: bytes) -> None:
        """Note that the peer at this address cannot read."""
        self._declined.add(address)

    def note(self, window: ReadWindow, pages: Sequence[int]) -> ReadNote:
        return ReadNote(ctypes.addressof(self._card), window.word_address, window.word, pages)

    def read(self, owner: CacheOwner, note: ReadNote, copies: Sequence[Copies]) -> bool:
        """Copy the pages of a peer's note. Any thread.

        Return False if the window was closed: the copied bytes are invalid. Raises KvTransferError if the peer cannot
        be read.
        """
        try:
            self._copy(owner, note, copies)
        except KvTransferError:
            if self._is_open(owner, note):
                raise
            return False  # the copy failed because the window is closed
        return self._is_open(owner, note)

    @staticmethod
    def _is_open(owner: CacheOwner, note: ReadNote) -> bool:
        """Whether the note's window is still open. Raises KvTransferError if this process may not read it."""
        word = ctypes.c_uint64()
        try:
            read_memory(owner.pid, note.word_address, _WORD_BYTES, ctypes.addressof(word))
        except OSError as error:
            if error.errno in FORBIDDEN:
                raise KvTransferError(f"the peer's memory cannot be read: {error}") from error
            return False
        return word.value == note.word

    def _copy(self, owner: CacheOwner, note: ReadNote, copies: Sequence[Copies]) -> None:
        """Copy pages from a peer's cache, which is opened if necessary. Raise KvTransferError if that fails."""
        opened = self._open(*owner, note.card_address)
        try:
            for layers, theirs, ours in copies:
                opened.cache.read(layers, theirs, ours)
        finally:
            with self._lock:
                opened.num_readers -= 1
            self._close_if_left(opened)

    def owner(self, address: bytes) -> CacheOwner | None:
        """Return the peer at an address, or None if its memory cannot be read here."""
        try:
            pid = self._transport.process_of(address)
        except KvTransferError:  # the scheduler sent an invalid address
            return None
        return None if pid is None else CacheOwner(address, pid)

    def forget(self, address: bytes) -> None:
        """Close the cache of a peer that is gone, when no thread reads from it, and forget that it declined."""
        self._declined.discard(address)
        with self._lock:
            opened = self._opened.pop(address, None)
            if opened is not None:
                opened.is_left = True
        if opened is not None:
            self._close_if_left(opened)

    def close(self) -> None:
        """Close every opened cache. Call after the last `read`."""
        for address in list(self._opened):
            self.forget(address)

    def check_integrity(self) -> None:
        num_open = sum(map(bool, self._words))
        assert num_open + len(self._free_words) == MAX_WINDOWS, f"{num_open} open + {len(self._free_words)} free"

    def _open(self, address: bytes, pid: int, card_address: int) -> _Opened:
        opened = self._borrowed(address)
        if opened is None:
            with self._opening:
                opened = self._borrowed(address)
                if opened is None:
                    cache = self._map(pid, card_address)
                    with self._lock:
                        opened = self._opened[address] = _Opened(cache, num_readers=1)
        return opened

    def _borrowed(self, address: bytes) -> _Opened | None:
        with self._lock:
            opened = self._opened.get(address)
            if opened is not None:
                opened.num_readers += 1
            return opened

    def _map(self, pid: int, card_address: int) -> PeerCache:
        """Open a peer's cache. Raises KvTransferError if it cannot be read or is of another kind."""
        card = ctypes.create_string_buffer(len(self._card))
        try:
            read_memory(pid, card_address, len(card), ctypes.addressof(card))
        except OSError as error:
            raise KvTransferError(f"the peer's memory cannot be read: {error}") from error
        if not card.raw.startswith(self._head):
            raise KvTransferError("the peer's KV cache has another layout")
        return self._cache.open(pid, card.raw[len(self._head) :])

    def _close_if_left(self, opened: _Opened) -> None:
        with self._lock:
            closes = opened.is_left and opened.num_readers == 0
            opened.is_left = opened.is_left and not closes
        if closes:
            opened.cache.close()


class PeerReadWriter(PieceWriter):
    """A writer that lets peers read where they can, and sends all others pieces with pages.

    By address, it counts the pages that were offered and not refused, and the pages that were refused and not yet sent
    as bytes.
    """

    def __init__(self, peer_reads: PeerReads, window: ReadWindow, block_ids: Sequence[int], means: Means) -> None:
        super().__init__(block_ids, means)
        self._peer_reads = peer_reads
        self._window = window
        self._num_offered: Counter[bytes] = Counter()
        self._num_refused: Counter[bytes] = Counter()

    @property
    def max_pages(self) -> int:
        return max(super().max_pages, self._peer_reads.max_pages)

    def may_read(self, address: bytes) -> bool:
        try:
            return self._peer_reads.may_read(address)
        except KvTransferError:  # an invalid address: sending reports it
            return False

    def pages_a_piece(self, address: bytes) -> int:
        return self._peer_reads.max_pages if self.may_read(address) else super().pages_a_piece(address)

    def pages_a_message(self, address: bytes) -> int:
        return 0 if self.may_read(address) else super().pages_a_message(address)

    async def send(self, address: bytes, blocks: Sequence[BlocksAbout]) -> None:
        if not self.may_read(address):
            return await super().send(address, blocks)
        limits = self._peer_reads.max_pages, self._blocks_a_note(address)
        for piece, about in [(piece, about) for some, about in blocks for piece in some.cut(*limits)]:
            if self.may_read(address):
                await self._offer(address, piece, about)
            else:  # the peer has declined meanwhile
                await super().send(address, [(piece, about)])

    def refused(self, address: bytes, num_pages: int) -> bool:
        self._peer_reads.decline(address)
        if num_pages > self._num_offered[address]:
            return False
        self._num_offered[address] -= num_pages
        self._num_refused[address] += num_pages
        return True

    def close(self) -> None:
        self._window.end()

    async def _send_message(self, address: bytes, pieces: Sequence[BlocksAbout], buffer: PieceBuffer) -> None:
        await super()._send_message(address, pieces, buffer)
        for blocks, _ in pieces:
            num_counted = min(blocks.num_pages, self._num_refused[address])  # `_offer` counted these
            self._num_refused[address] -= num_counted
            self.num_bytes -= num_counted * blocks.num_bytes(self._store.layout) // blocks.num_pages

    async def _offer(self, address: bytes, blocks: Blocks, about: PieceHeader) -> None:
        block_ids, frames = self._block_ids[blocks.first_block : blocks.end], self._store.frames
        pages = block_ids if frames is None else [*block_ids, *frames.of_block[block_ids].tolist()]
        note = self._peer_reads.note(self._window, pages)
        header = about._replace(kind=PieceKind.PEER_READ, chunk=blocks.chunk, part=self._part(blocks))
        self._num_offered[address] += blocks.num_pages
        await self.send_payload(address, note.pack(), header)
        self.num_bytes += blocks.num_bytes(self._store.layout)

    def _blocks_a_note(self, address: bytes) -> int:
        """Return how many blocks a note to an address may have. Raises KvTransferError if none fits."""
        limit = min(self._transport.max_payload_bytes, self._transport.payload_limit(address))
        num_blocks = (limit - _NOTE.size) // _bytes_a_block(self._store.layout)
        if num_blocks < 1:
            raise KvTransferError(f"the receiver accepts pieces of {limit} bytes, less than one offer")
        return num_blocks
