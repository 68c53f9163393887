"""Which pages of one request are here, being computed or on their way, and how many were sent each of them.

A page is a (layer, block), counted in the request's own numbers. Its states, and what changes them:

    EMPTY ────── begin ──────▶ COMPUTING ── written ──▶ WRITTEN ── place ──▶ PRESENT
      ▲  └─ claim ─▶ COPYING ── place ────────────────────────────────────────▲
      │  └─ claim ─▶ READING ── place ────────────────────────────────────────┘
      └──── abandon (COMPUTING), release (COPYING, READING)

* COPYING: a checked piece is being copied in. READING: a page of a peer's cache is, and it means nothing before it is
  placed; so no other copy, and no chunk, may write there meanwhile.
* WRITTEN: layers that follow may use the page, but it cannot be sent yet: a device writes later than it is told to.
* GONE: nobody will see the page, in a layer with a window behind which it lies. It is not sent, and stays so.
* A page that is PRESENT stays so, whichever member computes or sends it again: its bits are the same.
* A group that lost a member may compute what is COPYING; a page whose copy is of no use then stays COMPUTING.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from enum import IntEnum
from operator import and_

from pdmesh.kv.pages import Blocks, marked, runs


class PageState(IntEnum):
    """What a page is, as a byte of the ledger."""

    EMPTY = 0
    COMPUTING = 1
    WRITTEN = 2
    COPYING = 3
    READING = 4
    PRESENT = 5
    GONE = 6

    @classmethod
    def of(cls, *, is_read: bool) -> PageState:
        """Return the state of a page while it is being copied: from a peer's cache, or from a piece."""
        return cls.READING if is_read else cls.COPYING


_EMPTY, _COMPUTING, _WRITTEN, _COPYING, _READING, _PRESENT, _GONE = PageState


def _changes(*states: int, to: int) -> bytes:
    """A table for `bytes.translate` that takes some states to another."""
    return bytes(to if state in states else state for state in range(256))


_BEGIN = _changes(_EMPTY, _COPYING, to=_COMPUTING)
_RESERVE = _changes(_EMPTY, to=_COMPUTING)
_ABANDON = _changes(_COMPUTING, to=_EMPTY)
_RELEASE = _changes(_COPYING, _READING, to=_EMPTY)
_WRITE = _changes(_EMPTY, _COMPUTING, _COPYING, to=_WRITTEN)
_DISCARD = _changes(_EMPTY, to=_GONE)

_IS_EMPTY, _IS_ABSENT, _IS_PRESENT = marked(_EMPTY), marked(*set(PageState) - {_PRESENT, _GONE}), marked(_PRESENT)
_IS_IN_COPY = marked(_COPYING, _READING)
_HERE = bytes([_WRITTEN, _PRESENT])


class PageLedger:
    """The pages of one request in one instance's cache, for its transfers and its prefill group.

    `write` is for the engine's thread, all else for the event loop. The cost is for each run of pages, not for each
    page of a long context.
    """

    def __init__(self, num_layers: int, num_blocks: int) -> None:
        self.num_present = 0
        self.on_here: Callable[[range], object] | None = None  # told of layers with new pages here; any thread
        self._num_layers = num_layers
        self._num_blocks = num_blocks
        self._lock = threading.Lock()  # held for every change of a state
        self._states = [bytearray(num_blocks) for _ in range(num_layers)]
        self._sources = [bytearray(num_blocks) for _ in range(num_layers)]  # 1 + the member that sent it, or was to
        self._sent_to = [bytearray(num_blocks) for _ in range(num_layers)]  # so many of a group's first members
        self._num_first = [0] * num_layers  # blocks from the first one on that are here, without a gap

    @property
    def everything(self) -> Blocks:
        """All pages of the request, in all layers."""
        return Blocks(0, 0, 0, self._num_blocks, self._num_layers)

    def grow(self, num_blocks: int) -> None:
        """Make room for this many blocks in total."""
        added = bytes(max(0, num_blocks - self._num_blocks))
        self._num_blocks += len(added)
        with self._lock:
            for table in (*self._states, *self._sources, *self._sent_to):
                table += added

    # --- pages that are computed here ---------------------------------------------------------------------------------

    def begin(self, first_block: int, num_blocks: int, *, again: bool = False) -> bool:
        """Note that a chunk is to fill blocks. False if they were begun before, which ``again`` allows."""
        blocks = Blocks(0, 0, first_block, num_blocks, self._num_layers)
        with self._lock:
            if any(_READING in states or not (again or not any(states)) for states in self._slices(blocks)):
                return False
            self._change(blocks, _BEGIN)
        return True

    def reserve(self, first_block: int, num_blocks: int) -> None:
        """Note that a chunk already fills blocks: those not here yet are not copied from other members any more."""
        with self._lock:
            self._change(Blocks(0, 0, first_block, num_blocks, self._num_layers), _RESERVE)

    def abandon(self, first_block: int, num_blocks: int) -> None:
        """Note that a chunk ended early: what it has not written may be computed or copied by anyone."""
        with self._lock:
            self._change(Blocks(0, 0, first_block, num_blocks, self._num_layers), _ABANDON)

    def write(self, blocks: Blocks) -> None:
        """Note that pages were computed: the layers that follow may use them. The engine's thread."""
        with self._lock:
            self._change(blocks, _WRITE)
            self._count_first(blocks)
        self._tell(blocks)

    # --- pages that come from a peer ----------------------------------------------------------------------------------

    def missing(self, blocks: Blocks) -> list[Blocks]:
        """Return which of these pages are neither here, nor computed, nor on their way."""
        return self._among(blocks, _IS_EMPTY)

    def is_read(self, blocks: Blocks) -> bool:
        """Whether one of these pages is being copied from a peer's cache."""
        return any(_READING in states for states in self._slices(blocks))

    def claim(self, blocks: Blocks, source: int, state: PageState = PageState.COPYING) -> list[Blocks]:
        """Note that pages are about to be copied in from a source. Return those that were missing, now claimed.

        Pages that another source claimed first remain that one's.
        """
        with self._lock:
            missing = self.missing(blocks)
            for part in missing:
                for layer in range(part.layer, part.end_layer):
                    pages = slice(part.first_block, part.end)
                    self._states[layer][pages] = bytes([state]) * part.num_blocks
                    self._sources[layer][pages] = bytes([source + 1]) * part.num_blocks
        return missing

    def release(self, blocks: Blocks, source: int) -> None:
        """Take back a source's claim of pages whose copy does not count: they are to come again."""
        with self._lock:
            for part in self._among(blocks, _IS_IN_COPY, self._sources, marked(source + 1)):
                self._change(part, _RELEASE)

    def discard(self, blocks: Blocks) -> None:
        """Note that nobody will see these pages: those that are not here, or on their way, are not to come.

        A source whose copy did not count sends them no more.
        """
        with self._lock:
            for part in self._among(blocks, _IS_EMPTY):
                self._change(part, _DISCARD)
                for sources in self._sources[part.layer : part.end_layer]:
                    sources[part.first_block : part.end] = bytes(part.num_blocks)

    def num_gone(self, blocks: Blocks) -> int:
        """Return how many of these pages are not to come."""
        return sum(states.count(_GONE) for states in self._slices(blocks))

    # --- pages that are here ------------------------------------------------------------------------------------------

    def place(self, blocks: Blocks) -> list[Blocks]:
        """Note that pages are here and can be sent, copied or computed. Return those that were not before."""
        with self._lock:
            new = self._among(blocks, _IS_ABSENT)
            for part in new:
                for layer in range(part.layer, part.end_layer):
                    self._states[layer][part.first_block : part.end] = bytes([_PRESENT]) * part.num_blocks
                self.num_present += part.num_pages
            self._count_first(blocks)
        self._tell(blocks)
        return new

    def has(self, blocks: Blocks) -> bool:
        """Whether all of these are here and can be sent."""
        return (
            blocks.end <= self._num_blocks
            and blocks.end_layer <= self._num_layers
            and all(states.count(_PRESENT) == blocks.num_blocks for states in self._slices(blocks))
        )

    def present(self) -> list[Blocks]:
        """Return the pages among these that are here and can be sent."""
        return self._among(self.everything, _IS_PRESENT)

    def has_first(self, layer: int, num_blocks: int) -> bool:
        """Whether the first blocks are all here in this layer, or at least written. Any thread."""
        return self._num_first[layer] >= num_blocks

    @property
    def num_complete_blocks(self) -> int:
        """Number of the first blocks that are here, or at least written, in all layers."""
        return min(self._num_first)

    # --- what was sent to whom ----------------------------------------------------------------------------------------

    def set_sent_to(self, blocks: Blocks, num_members: int) -> None:
        """Note that these pages are sent to the first ``num_members`` of a group."""
        for layer in range(blocks.layer, blocks.end_layer):
            self._sent_to[layer][blocks.first_block : blocks.end] = bytes([num_members]) * blocks.num_blocks

    def not_sent_to(self, number: int, blocks: Blocks) -> list[Blocks]:
        """Return the pages here that were sent to others, but not to member ``number``."""
        return self._among(blocks, _IS_PRESENT, self._sent_to, marked(*range(1, number + 1)))

    def taken_from(self, source: int) -> list[Blocks]:
        """Return the pages here that a source sent."""
        return self._among(self.everything, _IS_PRESENT, self._sources, marked(source + 1))

    def num_pages_of(self, source: int) -> int:
        """Return how many pages a source sent, or began to."""
        return sum(sources.count(source + 1) for sources in self._sources)

    def num_unclaimed(self, blocks: Blocks) -> int:
        """Return how many of these pages no source has begun to send, of those that are to come."""
        return sum(
            sources[blocks.first_block : blocks.end].count(0)
            for sources in self._sources[blocks.layer : blocks.end_layer]
        ) - self.num_gone(blocks)

    def check_integrity(self) -> None:
        """Raise AssertionError, with the numbers, unless they balance."""
        num_present = sum(states.count(_PRESENT) for states in self._states)
        assert num_present == self.num_present, f"{num_present} pages are present, {self.num_present} are counted"
        for layer, (states, sources) in enumerate(zip(self._states, self._sources, strict=True)):
            first = len(states) - len(states.lstrip(_HERE))
            assert first == self._num_first[layer], f"layer {layer}: {first} first blocks, not {self._num_first[layer]}"
            unknown = bytes(map(and_, states.translate(_IS_IN_COPY), sources.translate(marked(0))))
            assert not any(unknown), f"layer {layer}: {unknown.count(1)} pages are copied from nobody"

    # --- inside -------------------------------------------------------------------------------------------------------

    def _slices(self, blocks: Blocks) -> Iterator[bytearray]:
        for states in self._states[blocks.layer : blocks.end_layer]:
            yield states[blocks.first_block : blocks.end]

    def _change(self, blocks: Blocks, table: bytes) -> None:
        for layer in range(blocks.layer, blocks.end_layer):
            states = self._states[layer]
            states[blocks.first_block : blocks.end] = states[blocks.first_block : blocks.end].translate(table)

    def _count_first(self, blocks: Blocks) -> None:
        for layer in range(blocks.layer, blocks.end_layer):
            if blocks.first_block <= self._num_first[layer] < blocks.end:
                rest = self._states[layer][self._num_first[layer] :]
                self._num_first[layer] += len(rest) - len(rest.lstrip(_HERE))

    def _tell(self, blocks: Blocks) -> None:
        if self.on_here is not None:
            self.on_here(range(blocks.layer, blocks.end_layer))

    def _among(
        self, blocks: Blocks, is_state: bytes, others: list[bytearray] | None = None, is_other: bytes = b""
    ) -> list[Blocks]:
        """Return those in some states, and with some values in another table; undivided if that is all."""
        if others is None and blocks.num_pages == 1:  # of which there are thousands in a long context's small pieces
            return [blocks] if is_state[self._states[blocks.layer][blocks.first_block]] else []
        pages, found = slice(blocks.first_block, blocks.end), list[Blocks]()
        for layer in range(blocks.layer, blocks.end_layer):
            marks = self._states[layer][pages].translate(is_state)
            if others is not None:
                marks = bytearray(map(and_, marks, others[layer][pages].translate(is_other)))
            found += [Blocks(blocks.chunk, layer, pages.start + first, count) for first, count in runs(marks)]
        return [blocks] if sum(part.num_pages for part in found) == blocks.num_pages else found
