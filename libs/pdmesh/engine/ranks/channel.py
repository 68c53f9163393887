"""A one-way channel between two processes of an instance: matrices, one after the other, through shared memory.

As among ranks (`pdmesh.engine.ranks.group`), the memory has the values, in tiles of rows. A byte on a socket reports
that a tile is written. A byte in the other direction reports that it was read. A writer is at most `_NUM_TILES` tiles
ahead.
"""

from __future__ import annotations

import socket

import torch
from torch import Tensor

from pdmesh.engine.ranks.rank_commands import read_exactly
from pdmesh.errors import InstanceUnavailable, ProtocolError

_TILE_BYTES = 16 << 20
_NUM_TILES = 4

CHANNEL_BYTES = _NUM_TILES * _TILE_BYTES

_TILE, _READ, _NOTHING = b"t", b"r", b"n"


class StageChannel:
    """An end of a channel. Every call raises InstanceUnavailable if the other end is gone."""

    def __init__(self, connection: socket.socket, memory: Tensor) -> None:
        """``memory`` has `CHANNEL_BYTES`. The system allocates only the pages that are written."""
        self._connection = connection
        self._memory = memory
        self._number = 0
        self._num_unread = 0

    def send(self, matrix: Tensor) -> None:
        """Send a matrix. Wait only if the other end has not yet read earlier tiles."""
        rows, columns = matrix.shape
        for first, end in _tiles(rows, columns * matrix.itemsize):
            if self._num_unread == _NUM_TILES:
                self._read(_READ)
                self._num_unread -= 1
            self._tile(end - first, columns, matrix.dtype)[:] = matrix[first:end]
            self._num_unread += 1
            self._say(_TILE)

    def send_nothing(self) -> None:
        """Report to the other end that the awaited matrix will not be sent."""
        self._say(_NOTHING)

    def receive(self, rows: int, columns: int, dtype: torch.dtype) -> Tensor | None:
        """Wait for the next matrix, of this size. Return None if the other end reports that there is none."""
        matrix = torch.empty(rows, columns, dtype=dtype)
        for first, end in _tiles(rows, columns * matrix.itemsize):
            if self._read(_TILE, _NOTHING) == _NOTHING:
                return None
            matrix[first:end] = self._tile(end - first, columns, dtype)
            self._say(_READ)
        return matrix

    def _tile(self, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
        place = self._number % _NUM_TILES
        self._number += 1
        tile = self._memory[place * _TILE_BYTES :][:_TILE_BYTES].view(dtype)
        return tile[: rows * columns].view(rows, columns)

    def _say(self, word: bytes) -> None:
        try:
            self._connection.sendall(word)
        except OSError as error:
            raise InstanceUnavailable("another rank of the instance ended") from error

    def _read(self, *expected: bytes) -> bytes:
        if (word := read_exactly(self._connection, 1)) not in expected:
            raise ProtocolError("the stages of the instance do not compute the same")
        return word


def _tiles(rows: int, row_bytes: int) -> list[tuple[int, int]]:
    """Return the first row of each tile, and the row after its last."""
    tile_rows = max(1, _TILE_BYTES // row_bytes)
    return [(first, min(rows, first + tile_rows)) for first in range(0, rows, tile_rows)]
