"""KV that instances on one host copy from each other's caches, where it lies.

In place of a piece with pages an instance sends a *loan*: where in its cache they lie. Whoever takes it copies them
straight into its own cache, from host to host memory or from device to device, and stages nothing. So it is with all
KV that moves: of prompts that are handed over, of decodes, and between members of a prefill group.

**Until when a page may be read.** A loan is good as long as a word in the lender's memory has the value that the loan
says, and the lender changes that word before it gives the blocks to another request. Who borrows looks at the word
*after* it has copied: if it is still the same, so were the pages. (An optimistic read, as of FaRM, NSDI 2014 §4.) So
nobody waits for anybody: the lender keeps no blocks for those who were stopped, hears of no copy's end, and may die at
any time; that a word of 64 random bits was read says that it was the right process, and alive, after the copy.

**Who may read.** Processes of one host and user that the system lets read each other's memory, as pieces are read
(`pdmesh.transport.local`). Loans travel as pieces do, sealed, with the transfer's capability, between instances that
the scheduler has named; whose process is read follows from the data address that it gave. A loan names addresses in its
sender's own memory, and whatever that holds it could have sent.

**Where it cannot be** (another host, another kind of cache, a device out of reach, an instance whose setting is off)
pages travel as bytes. Who cannot read says so (NO_LOANS), and is sent those pages and all later ones as bytes.
"""

from __future__ import annotations

import array
import ctypes
import hashlib
import secrets
import struct
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Unpack

from pdmesh.errors import KvTransferError
from pdmesh.kv.outgoing import Blocks, Means, PieceWriter
from pdmesh.kv.piece import PieceHeader, PieceKind
from pdmesh.kv.sharing import PeerCache, SharedCache
from pdmesh.model import IndexRange, KvLayout
from pdmesh.transport.base import KvTransport, SendBuffer
from pdmesh.transport.reading import FORBIDDEN, read_memory

#: Transfers that one instance lends KV to at once; what further ones pass on travels as bytes.
MAX_LOANS = 1024

_NOTE = struct.Struct("<3Q")
_WORD_BYTES = 8
_BLOCK_ID_BYTES = 4

_CARD_HEAD = struct.Struct("<4s4s16s")  # magic, kind of cache, what layout
_CARD_MAGIC = b"pdC1"


class Loan:
    """What an instance lends of one request's KV to one transfer or group, until it is over."""

    def __init__(self, words: ctypes.Array[ctypes.c_uint64], number: int, on_over: Callable[[int], object]) -> None:
        self._words = words
        self._number = number
        self._on_over = on_over
        self.word = words[number] = secrets.randbits(64) | 1
        self.word_address = ctypes.addressof(words) + number * _WORD_BYTES

    def end(self) -> None:
        """Invalidate the loan: nothing read under it counts from now on. Idempotent."""
        if self._words[self._number] == self.word:
            self._words[self._number] = 0
            self._on_over(self._number)


class LoanNote(NamedTuple):
    """What a piece says of the pages that it lends, beside its header."""

    card_address: int  # where the lender's memory describes its cache
    word_address: int
    word: int
    block_ids: Sequence[int]  # in the lender's cache

    def pack(self) -> bytes:
        return _NOTE.pack(*self[:3]) + array.array("I", self.block_ids).tobytes()

    @classmethod
    def unpack(cls, payload: memoryview) -> LoanNote:
        """Decode a payload that is `note_bytes` long."""
        card_address, word_address, word = _NOTE.unpack_from(payload)
        return cls(card_address, word_address, word, array.array("I", bytes(payload[_NOTE.size :])))


class Copies(NamedTuple):
    """Blocks of a lender's cache that are copied into ``ours``, each into the one in its place, in some layers."""

    layers: IndexRange
    theirs: Sequence[int]
    ours: Sequence[int]


class Lender(NamedTuple):
    """A peer: its data address, and the process that has it."""

    address: bytes
    pid: int


def note_bytes(num_blocks: int) -> int:
    """Return the size in bytes of a loan's note for so many blocks, in any number of layers."""
    return _NOTE.size + num_blocks * _BLOCK_ID_BYTES


@dataclass(slots=True, eq=False)
class _Opened:
    """A peer's cache, and how many threads read from it."""

    cache: PeerCache
    num_readers: int = 0
    is_left: bool = False  # closed when nobody reads


class Lending:
    """What one instance lends, and borrows. `borrow` is for any thread, all else for the event loop."""

    def __init__(self, cache: SharedCache, layout: KvLayout, transport: KvTransport) -> None:
        self._cache = cache
        self._transport = transport
        self.max_pages = max(1, cache.max_loan_bytes // layout.block_bytes)  # of a loan
        self.copies_inline = cache.copies_inline
        described = cache.describe()
        kind_of_layout = hashlib.blake2b(repr(layout).encode(), digest_size=16).digest()
        self._head = _CARD_HEAD.pack(_CARD_MAGIC, cache.kind, kind_of_layout)
        self._card = ctypes.create_string_buffer(self._head + described, len(self._head) + len(described))
        self._words = (ctypes.c_uint64 * MAX_LOANS)()
        self._free_words = list(range(MAX_LOANS))
        self._lock = threading.Lock()
        self._opened: dict[bytes, _Opened] = {}
        self._declined: set[bytes] = set()

    def begin(self) -> Loan | None:
        """Lend a request's KV, if not too many are lent already."""
        return Loan(self._words, self._free_words.pop(), self._free_words.append) if self._free_words else None

    def lends_to(self, address: bytes) -> bool:
        return address not in self._declined and self._transport.process_of(address) is not None

    def decline(self, address: bytes) -> None:
        """The peer there cannot borrow."""
        self._declined.add(address)

    def note(self, loan: Loan, block_ids: Sequence[int]) -> LoanNote:
        return LoanNote(ctypes.addressof(self._card), loan.word_address, loan.word, block_ids)

    def borrow(self, lender: Lender, note: LoanNote, copies: Sequence[Copies]) -> bool:
        """Copy of what a peer lends by this note. Any thread.

        False if it is no longer lent: what was copied means nothing. Raises KvTransferError if it cannot be read.
        """
        try:
            self._copy(lender, note, copies)
        except KvTransferError:
            if self._is_lent(lender, note):
                raise
            return False  # that is why
        return self._is_lent(lender, note)

    @staticmethod
    def _is_lent(lender: Lender, note: LoanNote) -> bool:
        """Whether it is yet. Raises KvTransferError if this process may not know."""
        word = ctypes.c_uint64()
        try:
            read_memory(lender.pid, note.word_address, _WORD_BYTES, ctypes.addressof(word))
        except OSError as error:
            if error.errno in FORBIDDEN:
                raise KvTransferError(f"the peer's memory cannot be read: {error}") from error
            return False  # it is gone
        return word.value == note.word

    def _copy(self, lender: Lender, note: LoanNote, copies: Sequence[Copies]) -> None:
        """Raises KvTransferError."""
        opened = self._open(*lender, note.card_address)
        try:
            for layers, theirs, ours in copies:
                opened.cache.read(layers, theirs, ours)
        finally:
            with self._lock:
                opened.num_readers -= 1
            self._close_if_left(opened)

    def lender(self, address: bytes) -> Lender | None:
        """The peer there, if its memory can be read here."""
        try:
            pid = self._transport.process_of(address)
        except KvTransferError:  # what the scheduler gave for one is no address
            return None
        return None if pid is None else Lender(address, pid)

    def forget(self, address: bytes) -> None:
        """The peer there is gone."""
        self._declined.discard(address)
        with self._lock:
            opened = self._opened.pop(address, None)
            if opened is not None:
                opened.is_left = True
        if opened is not None:
            self._close_if_left(opened)

    def close(self) -> None:
        """Close every opened cache; to be called after the last `borrow`."""
        for address in list(self._opened):
            self.forget(address)

    def check_integrity(self) -> None:
        num_lent = sum(map(bool, self._words))
        assert num_lent + len(self._free_words) == MAX_LOANS, f"{num_lent} lent + {len(self._free_words)} free"

    def _open(self, address: bytes, pid: int, card_address: int) -> _Opened:
        with self._lock:
            opened = self._opened.get(address)
            if opened is not None:
                opened.num_readers += 1
                return opened
        card = ctypes.create_string_buffer(len(self._card))
        try:
            read_memory(pid, card_address, len(card), ctypes.addressof(card))
        except OSError as error:
            raise KvTransferError(f"the peer's memory cannot be read: {error}") from error
        if not card.raw.startswith(self._head):
            raise KvTransferError("the peer's cache is of another kind")
        cache = self._cache.open(pid, card.raw[len(self._head) :])
        with self._lock:
            opened = self._opened.setdefault(address, _Opened(cache))
            opened.num_readers += 1
        if opened.cache is not cache:  # another thread was first
            cache.close()
        return opened

    def _close_if_left(self, opened: _Opened) -> None:
        with self._lock:
            closes = opened.is_left and opened.num_readers == 0
            opened.is_left = opened.is_left and not closes
        if closes:
            opened.cache.close()


class LoanWriter(PieceWriter):
    """Sends loans to whom it can, and to all others pieces with pages."""

    def __init__(self, lending: Lending, loan: Loan, block_ids: Sequence[int], **means: Unpack[Means]) -> None:
        super().__init__(block_ids, **means)
        self._lending = lending
        self._loan = loan
        self._num_lent: Counter[bytes] = Counter()  # pages, by who was lent them and has not given them back
        self._num_refused: Counter[bytes] = Counter()  # given back, and not yet sent as bytes

    @property
    def max_pages(self) -> int:
        return max(super().max_pages, self._lending.max_pages)

    def pages_a_piece(self, address: bytes) -> int:
        return self._lending.max_pages if self._lends_to(address) else super().pages_a_piece(address)

    async def send(self, address: bytes, blocks: Blocks, about: PieceHeader) -> int:
        if not self._lends_to(address):
            return await super().send(address, blocks, about)
        num_pieces = 0
        for piece in blocks.cut(self._lending.max_pages, self._blocks_a_note(address)):
            if self._lends_to(address):
                await self._lend(address, piece, about)
                num_pieces += 1
            else:  # it has said so meanwhile
                num_pieces += await super().send(address, piece, about)
        return num_pieces

    def take_back(self, address: bytes, num_pages: int) -> bool:
        if num_pages > self._num_lent[address]:
            return False
        self._num_lent[address] -= num_pages
        self._num_refused[address] += num_pages
        return True

    def close(self) -> None:
        self._loan.end()

    async def _send_piece(self, address: bytes, blocks: Blocks, about: PieceHeader, buffer: SendBuffer) -> None:
        await super()._send_piece(address, blocks, about, buffer)
        num_counted = min(blocks.num_pages, self._num_refused[address])  # when they were lent
        self._num_refused[address] -= num_counted
        self.num_bytes -= num_counted * self._store.layout.block_bytes

    async def _lend(self, address: bytes, blocks: Blocks, about: PieceHeader) -> None:
        note = self._lending.note(self._loan, self._block_ids[blocks.first_block : blocks.end])
        header = replace(about, kind=PieceKind.LOAN, chunk=blocks.chunk, part=self._part(blocks))
        self._num_lent[address] += blocks.num_pages
        await self._send_payload(address, note.pack(), header)
        self.num_bytes += blocks.num_pages * self._store.layout.block_bytes

    def _lends_to(self, address: bytes) -> bool:
        try:
            return self._lending.lends_to(address)
        except KvTransferError:  # no address: sending there says so
            return False

    def _blocks_a_note(self, address: bytes) -> int:
        """Raises KvTransferError."""
        limit = min(self._transport.max_payload_bytes, self._transport.payload_limit(address))
        num_blocks = (limit - _NOTE.size) // _BLOCK_ID_BYTES
        if num_blocks < 1:
            raise KvTransferError(f"the receiver takes pieces of {limit} bytes, less than one loan")
        return num_blocks
