"""The state of each page of one request: here, being computed, or on its way; and the number of members it was sent to.

A page is a (layer, block), in the request's own block numbers. Its states, and the calls that change them:

    EMPTY ────── begin ──────▶ COMPUTING ── written ──▶ WRITTEN ── place ──▶ PRESENT
      ▲  └─ claim ─▶ COPYING ── place ────────────────────────────────────────▲
      │  └─ claim ─▶ READING ── place ────────────────────────────────────────┘
      └──── abandon (COMPUTING), release (COPYING, READING)

* COPYING: a checked piece is being copied in. READING: a page of a peer's cache is being copied, and is invalid until
  it is placed; so no other copy, and no chunk, may write there meanwhile.
* WRITTEN: the following layers may use the page, but it cannot be sent yet: a device writes later than it is told to.
* GONE: no token will see the page, because it is behind the window of its layer. It is not sent, and stays GONE.
* A page that is PRESENT stays PRESENT, whichever member computes or sends it again: its bits are the same.
* A group that lost a member may compute a page that is COPYING; if the copy fails, the page stays COMPUTING.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from enum import IntEnum
from operator import and_

from pdmesh.kv.pages import Blocks, marked, runs


class PageState(IntEnum):
    """State of a page, as a byte of the ledger."""

    EMPTY = 0
    COMPUTING = 1
    WRITTEN = 2
    COPYING = 3
    READING = 4
    PRESENT = 5
    GONE = 6

    @classmethod
    def of(cls, *, is_read: bool) -> PageState:
        """Return the state of a page while it is copied from a peer's cache (``is_read``) or from a piece."""
        return cls.READING if is_read else cls.COPYING


_EMPTY, _COMPUTING, _WRITTEN, _COPYING, _READING, _PRESENT, _GONE = PageState


def _changes(*states: int, to: int) -> bytes:
    """Return a table for `bytes.translate` that maps ``states`` to ``to``."""
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

    `write` is for the engine's thread, all else for the event loop. The cost is per run of pages, not per page of a
    long context. ``on_here`` is called, on either thread, with the layers that have new pages here.
    """

    def __init__(self, num_layers: int, num_blocks: int) -> None:
        self.num_present = 0
        self.on_here: Callable[[range], object] | None = None
        self._num_layers = num_layers
        self._num_blocks = num_blocks
        self._lock = threading.Lock()
        self._states = [bytearray(num_blocks) for _ in range(num_layers)]
        self._sources = [bytearray(num_blocks) for _ in range(num_layers)]  # 1 + the source that claimed the page last
        self._sent_to = [bytearray(num_blocks) for _ in range(num_layers)]  # number of a group's first members
        # By layer, number of first blocks that are here without a gap.
        self._num_first = [0] * num_layers

    @property
    def everything(self) -> Blocks:
        """All pages of the request, in all layers."""
        return Blocks(0, 0, 0, self._num_blocks, self._num_layers)

    def grow(self, num_blocks: int) -> None:
        """Make room for ``num_blocks`` blocks in total."""
        added = bytes(max(0, num_blocks - self._num_blocks))
        self._num_blocks += len(added)
        with self._lock:
            for table in (*self._states, *self._sources, *self._sent_to):
                table += added

    # --- pages that are computed here ---------------------------------------------------------------------------------

    def begin(self, first_block: int, num_blocks: int, *, again: bool = False) -> bool:
        """Note that a chunk will fill blocks, in all layers.

        Return False if it must not: a page is being copied from a peer's cache, or is not empty, which ``again``
        allows.
        """
        blocks = Blocks(0, 0, first_block, num_blocks, self._num_layers)
        with self._lock:
            if any(_READING in states or not (again or not any(states)) for states in self._slices(blocks)):
                return False
            self._change(blocks, _BEGIN)
        return True

    def reserve(self, first_block: int, num_blocks: int) -> None:
        """Mark empty pages of these blocks as computing, in all layers: a running chunk fills them."""
        with self._lock:
            self._change(Blocks(0, 0, first_block, num_blocks, self._num_layers), _RESERVE)

    def abandon(self, first_block: int, num_blocks: int) -> None:
        """Mark computing pages of these blocks as empty, in all layers: their chunk ended early."""
        with self._lock:
            self._change(Blocks(0, 0, first_block, num_blocks, self._num_layers), _ABANDON)

    def write(self, blocks: Blocks) -> None:
        """Note that pages were computed, so that the following layers may use them. The engine's thread."""
        with self._lock:
            self._change(blocks, _WRITE)
            self._count_first(blocks)
        self._tell(blocks)

    # --- pages that come from a peer ----------------------------------------------------------------------------------

    def missing(self, blocks: Blocks) -> list[Blocks]:
        """Return the empty pages: neither here, nor being computed, nor on their way."""
        return self._among(blocks, _IS_EMPTY)

    def is_read(self, blocks: Blocks) -> bool:
        """Whether one of these pages is being copied from a peer's cache."""
        return any(_READING in states for states in self._slices(blocks))

    def claim(self, blocks: Blocks, source: int, state: PageState = PageState.COPYING) -> list[Blocks]:
        """Mark the missing pages of ``blocks`` as being copied from a source, and return them.

        Pages that another source claimed first stay with that source.
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
        """Make pages empty that a source claimed and whose copy failed. They will be copied again."""
        with self._lock:
            for part in self._among(blocks, _IS_IN_COPY, self._sources, marked(source + 1)):
                self._change(part, _RELEASE)

    def discard(self, blocks: Blocks) -> None:
        """Mark the empty pages of ``blocks`` as gone: no token will see them, so they are not expected.

        Pages whose copy failed are then no longer counted as their source's.
        """
        with self._lock:
            for part in self._among(blocks, _IS_EMPTY):
                self._change(part, _DISCARD)
                for sources in self._sources[part.layer : part.end_layer]:
                    sources[part.first_block : part.end] = bytes(part.num_blocks)

    def num_gone(self, blocks: Blocks) -> int:
        """Return the number of these pages that are gone."""
        return sum(states.count(_GONE) for states in self._slices(blocks))

    # --- pages that are here ------------------------------------------------------------------------------------------

    def place(self, blocks: Blocks) -> list[Blocks]:
        """Note that pages are here and can be sent, copied or computed. Return which were not here before."""
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
        """Whether all of these pages are here and can be sent."""
        return (
            blocks.end <= self._num_blocks
            and blocks.end_layer <= self._num_layers
            and all(states.count(_PRESENT) == blocks.num_blocks for states in self._slices(blocks))
        )

    def present(self) -> list[Blocks]:
        """Return all pages that are here and can be sent."""
        return self._among(self.everything, _IS_PRESENT)

    def has_first(self, layer: int, num_blocks: int) -> bool:
        """Whether this layer's first ``num_blocks`` blocks are all here, or at least written. Any thread."""
        return self._num_first[layer] >= num_blocks

    @property
    def num_complete_blocks(self) -> int:
        """Number of first blocks that are here, or at least written, in all layers."""
        return min(self._num_first)

    # --- senders and receivers of pages -------------------------------------------------------------------------------

    def set_sent_to(self, blocks: Blocks, num_members: int) -> None:
        """Note that these pages are sent to the first ``num_members`` members of a group."""
        for layer in range(blocks.layer, blocks.end_layer):
            self._sent_to[layer][blocks.first_block : blocks.end] = bytes([num_members]) * blocks.num_blocks

    def not_sent_to(self, number: int, blocks: Blocks) -> list[Blocks]:
        """Return the pages here that are known to be sent to members before ``number`` only."""
        return self._among(blocks, _IS_PRESENT, self._sent_to, marked(*range(1, number + 1)))

    def taken_from(self, source: int) -> list[Blocks]:
        """Return the pages here that a source sent."""
        return self._among(self.everything, _IS_PRESENT, self._sources, marked(source + 1))

    def num_pages_of(self, source: int) -> int:
        """Return the number of pages that a source has sent or begun to send."""
        return sum(sources.count(source + 1) for sources in self._sources)

    def num_unclaimed(self, blocks: Blocks) -> int:
        """Return the number of expected pages in ``blocks`` that no source has begun to send."""
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
        """Return the pages with a state marked in ``is_state``, and a value in ``others`` marked in ``is_other``.

        If all pages are, ``blocks`` is returned undivided.
        """
        if others is None and blocks.num_pages == 1:  # a long context has thousands of one-page pieces
            return [blocks] if is_state[self._states[blocks.layer][blocks.first_block]] else []
        pages, found = slice(blocks.first_block, blocks.end), list[Blocks]()
        for layer in range(blocks.layer, blocks.end_layer):
            marks = self._states[layer][pages].translate(is_state)
            if others is not None:
                marks = bytearray(map(and_, marks, others[layer][pages].translate(is_other)))
            found += [Blocks(blocks.chunk, layer, pages.start + first, count) for first, count in runs(marks)]
        return [blocks] if sum(part.num_pages for part in found) == blocks.num_pages else found
