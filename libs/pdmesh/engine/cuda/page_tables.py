"""Block tables kept on the device: what a sequence's table has gained is sent, once."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pdmesh.engine.attention import Span
from pdmesh.engine.cuda.staging import Staging

Ints = npt.NDArray[np.int32]

#: Rows to begin with; more are made when one step needs more.
_NUM_ROWS = 64


class PageIndex(NamedTuple):
    """Which pages the sequences of a step read, as FlashInfer takes it; ``pages`` on the device, the rest on the host.

    Sequence ``i`` reads ``pages[indptr[i] : indptr[i + 1]]``, and of the last of these ``last_page_len[i]`` tokens.
    """

    indptr: Ints
    last_page_len: Ints
    pages: Tensor


@dataclass(slots=True)
class _Row:
    table: Sequence[int]  # held, so that its identity stays its own
    number: int
    num_sent: int


class PageTables:
    """A row of block ids for each of the block tables used last.

    A table is known by its identity, and may grow at its end; nothing else of it may change.
    """

    def __init__(self, *, block_size: int, max_blocks: int, device: torch.device) -> None:
        self._block_size = block_size
        self._width = max_blocks
        self._table = torch.zeros(_NUM_ROWS, max_blocks, dtype=torch.int32, device=device)
        self._rows: OrderedDict[int, _Row] = OrderedDict()  # by id(table), used longest ago first
        self._last: tuple[Ints, Ints, Tensor] | None = None
        self.num_sent = 0  # entries sent to the device so far

    def index(self, spans: Sequence[Span], staging: Staging) -> PageIndex:
        """The pages that ``spans`` read: their sequences up to the spans' ends."""
        rows = self._update([span.block_table for span in spans], staging)
        ends = np.fromiter((span.end for span in spans), dtype=np.int32, count=len(spans))
        indptr = np.zeros(len(spans) + 1, dtype=np.int32)
        np.cumsum(-(-ends // self._block_size), out=indptr[1:])
        return PageIndex(indptr, (ends - 1) % self._block_size + 1, self._pages(rows, indptr, staging))

    def _update(self, tables: Sequence[Sequence[int]], staging: Staging) -> Ints:
        """Row numbers of ``tables``; what the device does not have yet is sent."""
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

    def _send(self, places: Ints, blocks: Ints, staging: Staging) -> None:
        device_places, device_blocks = staging.upload(places, blocks)
        self._table.view(-1).index_copy_(0, device_places.long(), device_blocks)
        self.num_sent += len(blocks)
        self._last = None

    def _new_row(self, table: Sequence[int], used: set[int]) -> _Row:
        number = len(self._rows)
        if number == len(self._table):
            oldest = next((key for key in self._rows if key not in used), None)
            if oldest is None:
                self._table = torch.cat([self._table, torch.zeros_like(self._table)])
            else:
                number = self._rows.pop(oldest).number
        row = self._rows[id(table)] = _Row(table, number, 0)
        return row

    def _pages(self, rows: Ints, indptr: Ints, staging: Staging) -> Tensor:
        """The rows' pages, one sequence after the other. Most decode steps read the pages of the step before."""
        if self._last is not None:
            last_rows, last_indptr, pages = self._last
            if np.array_equal(last_rows, rows) and np.array_equal(last_indptr, indptr):
                return pages
        total = int(indptr[-1])
        device_rows, starts, counts = staging.upload(rows, indptr[:-1], np.diff(indptr))
        sequence = torch.repeat_interleave(counts, output_size=total)  # a known size spares waiting for the device
        column = torch.arange(total, dtype=torch.int32, device=staging.device) - starts[sequence]
        pages = self._table[device_rows[sequence], column]
        self._last = (rows, indptr, pages)
        return pages
