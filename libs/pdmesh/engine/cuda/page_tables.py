"""Block tables kept on the device. Each entry is sent once."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pdmesh.engine.attention import QuerySpan
from pdmesh.engine.cuda.staging import Staging
from pdmesh.kv_layout import num_blocks_for

Ints = npt.NDArray[np.int32]

#: Number of block tables that are kept: twice the largest graph's batch. Larger steps send their tables whole.
NUM_ROWS = 512


class PageLengths(NamedTuple):
    """Numbers of pages and tokens that sequences read, on the host, in FlashInfer's form.

    Sequence ``i`` reads ``pages[indptr[i] : indptr[i + 1]]``, and ``last_page_len[i]`` tokens of the last of these
    pages.
    """

    indptr: Ints
    last_page_len: Ints


class PageIndex(NamedTuple):
    """The pages that the sequences of a step read. ``pages`` is on the device."""

    lengths: PageLengths
    pages: Tensor


#: ``write(table, rows, indptr, pages)`` copies the first entries of row ``rows[i]`` of ``table`` to ``pages[indptr[i] :
#: indptr[i + 1]]``. All are on the device, int32. Pages after the last of these may be overwritten. A graph can record
#: the call.
PageWriter = Callable[[Tensor, Tensor, Tensor, Tensor], None]


def write_pages(table: Tensor, rows: Tensor, indptr: Tensor, pages: Tensor) -> None:
    """Copy the first entries of row ``rows[i]`` of ``table`` to ``pages[indptr[i] : indptr[i + 1]]``, in torch.

    The pages after the last of these are overwritten, too (`PageWriter`).
    """
    places = torch.arange(len(pages), dtype=torch.int32, device=pages.device)
    sequence = (torch.searchsorted(indptr, places, right=True) - 1).clamp_(max=len(rows) - 1)
    column = (places - indptr[sequence]).clamp_(max=table.shape[1] - 1)
    pages.copy_(table[rows[sequence], column])


def lengths_of(ends: Sequence[int] | Ints, block_size: int) -> PageLengths:
    """Return the page lengths of sequences that read up to ``ends``. No end may be 0."""
    end = np.asarray(ends, dtype=np.int32)
    indptr = np.zeros(len(end) + 1, dtype=np.int32)
    np.cumsum(-(-end // block_size), out=indptr[1:])
    return PageLengths(indptr, (end - 1) % block_size + 1)


@dataclass(slots=True)
class _Row:
    table: Sequence[int]  # held, so that its id is not reused
    number: int
    num_sent: int


class PageTables:
    """Device rows of block ids for the most recently used block tables. Graphs read them, so their address is fixed.

    A table is known by its identity. It may grow at its end, and must not change otherwise. ``num_sent`` counts the
    entries sent to the device so far. ``_rows`` has a row by id(table), the least recently used first.
    """

    def __init__(
        self, *, block_size: int, max_blocks: int, device: torch.device, write: PageWriter = write_pages
    ) -> None:
        self._block_size = block_size
        self._width = max_blocks
        self._write = write
        self.table = torch.zeros(NUM_ROWS, max_blocks, dtype=torch.int32, device=device)
        self._rows: OrderedDict[int, _Row] = OrderedDict()
        self.num_sent = 0

    def index(self, spans: Sequence[QuerySpan], staging: Staging) -> PageIndex:
        """Return the pages that ``spans`` read: their sequences up to the spans' ends."""
        lengths = lengths_of([span.end for span in spans], self._block_size)
        if len(spans) > NUM_ROWS:
            used = [span.block_table[: num_blocks_for(span.end, self._block_size)] for span in spans]
            (pages,) = staging.upload(np.concatenate([np.asarray(blocks, dtype=np.int32) for blocks in used]))
            return PageIndex(lengths, pages)
        numbers = self.rows([span.block_table for span in spans], staging)
        rows, indptr = staging.upload(numbers, lengths.indptr)
        pages = torch.empty(int(lengths.indptr[-1]), dtype=torch.int32, device=staging.device)
        self._write(self.table, rows, indptr, pages)
        return PageIndex(lengths, pages)

    def rows(self, tables: Sequence[Sequence[int]], staging: Staging) -> Ints:
        """Return the row numbers of at most `NUM_ROWS` tables, after sending the entries that the device lacks."""
        numbers = np.empty(len(tables), dtype=np.int32)
        used = {id(table) for table in tables}
        places: list[Ints] = []
        blocks: list[Ints] = []
        for position, table in enumerate(tables):
            row = self._rows.get(id(table)) or self._new_row(table, used)
            self._rows.move_to_end(id(table))
            numbers[position] = row.number
            length = min(len(table), self._width)
            if length > row.num_sent:
                places.append(np.arange(row.num_sent, length, dtype=np.int32) + row.number * self._width)
                blocks.append(np.asarray(table[row.num_sent : length], dtype=np.int32))
                row.num_sent = length
        if blocks:
            self._send(np.concatenate(places), np.concatenate(blocks), staging)
        return numbers

    def write(self, rows: Tensor, indptr: Tensor, pages: Tensor) -> None:
        """Write pages of these tables as `PageWriter` requires."""
        self._write(self.table, rows, indptr, pages)

    def _send(self, places: Ints, blocks: Ints, staging: Staging) -> None:
        device_places, device_blocks = staging.upload(places, blocks)
        self.table.view(-1).index_copy_(0, device_places.long(), device_blocks)
        self.num_sent += len(blocks)

    def _new_row(self, table: Sequence[int], used: set[int]) -> _Row:
        number = len(self._rows)
        if number == NUM_ROWS:
            oldest = next(key for key in self._rows if key not in used)
            number = self._rows.pop(oldest).number
        row = self._rows[id(table)] = _Row(table, number, 0)
        return row
