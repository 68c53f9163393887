"""What all granted transfers have in common at a source, of prompts and of what decodes.

Who it is, how it ends, and that what was damaged on the way, or cannot be read there, is sent again.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import anyio

from pdmesh.kv.outcome import SentTransfer
from pdmesh.kv.outgoing import Blocks, PieceWriter
from pdmesh.kv.piece import PieceHeader, PieceKind, request_key
from pdmesh.kv.repair import DamageLimit
from pdmesh.model import Epoch, KvPart, RequestId

#: Pieces of one transfer under way at once: one is copied and checked while others travel.
PIECES_IN_FLIGHT = 4


class KvDestination(NamedTuple):
    """A transfer's destination: its data address and the part of the request's KV that goes there."""

    address: bytes
    part: KvPart


class GrantedTransfer(ABC):
    """A transfer that goes on until it has landed, fails, or ``scope`` is cancelled: then it ends without an outcome.

    Made and run by `pdmesh.kv.departures.KvDepartures`.
    """

    def __init__(
        self,
        request_id: RequestId,
        epoch: Epoch,
        *,
        capability: int,
        destinations: Sequence[KvDestination],
        writer: PieceWriter,
    ) -> None:
        self.request_id = request_id
        self.epoch = epoch
        self.key = request_key(request_id)
        self.capability = capability
        self.destinations = tuple(destinations)
        self.scope = anyio.CancelScope()
        self._writer = writer
        self._about = PieceHeader(kind=PieceKind.KV, request_key=self.key, epoch=epoch, capability=capability)
        self._work = anyio.CancelScope()  # of `run`
        self._failure: str | None = None
        self._limits = [DamageLimit(sends=True) for _ in destinations]
        self._asked: deque[tuple[int, Blocks]] = deque()  # of a destination, to be sent again; bounded by its limit
        self._is_asked = anyio.Event()  # there are some, or no more will be sent
        self._answers = True

    @property
    def num_bytes(self) -> int:
        return self._writer.num_bytes

    @property
    def num_pieces(self) -> int:
        return self._writer.num_pieces

    @abstractmethod
    def landed(self, destination: int) -> None:
        """A destination has all that goes there."""

    def close(self) -> None:
        """End the transfer, so that blocks that peers could read may be used again. Idempotent."""
        self._writer.close()

    def send_again(self, header: PieceHeader) -> str | None:
        """A destination asks for pages that came damaged, or cannot be read there; or say why that must be dropped."""
        if (
            header.destination >= len(self.destinations)
            or not 0 < header.part.num_pages <= self._writer.max_pages
            or not self._has(header.destination, header.part)
        ):
            return "range"
        if header.kind is PieceKind.NO_PEER_READS:
            address = self.destinations[header.destination].address
            is_allowed = self._writer.refused(address, header.part.num_pages)
        else:
            is_allowed = self._limits[header.destination].add_damaged()
        if not is_allowed:
            return "limit"
        self._asked.append((header.destination, Blocks.of(header)))
        self._is_asked.set()
        return None

    def fail(self, reason: str) -> None:
        """End `run` with a KvTransferError."""
        if self._failure is None:
            self._failure = reason
            self._work.cancel()

    @abstractmethod
    async def run(self) -> SentTransfer:
        """Send everything and wait for the acknowledgement. Raises KvTransferError."""

    # --- inside -------------------------------------------------------------------------------------------------------

    @abstractmethod
    def _has(self, destination: int, part: KvPart) -> bool:
        """Whether these pages are to be sent there, and could be by now."""

    @abstractmethod
    async def _send_once_more(self, destination: int, blocks: Blocks) -> None:
        """Send damaged blocks again as soon as a piece may begin; `fail` if that is impossible."""

    async def _answer(self) -> None:
        """A lane of `run`: send what was asked for again, one after the other, until `_end_answers`."""
        while self._answers:
            while self._asked and self._answers:
                await self._send_once_more(*self._asked.popleft())
            if self._answers:
                await self._is_asked.wait()
                self._is_asked = anyio.Event()

    def _end_answers(self) -> None:
        """What is under way ends."""
        self._answers = False
        self._is_asked.set()
