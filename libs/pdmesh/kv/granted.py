"""What all granted transfers have in common at a source, of prompts and of what decodes: who it is, and how it ends."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

import anyio

from pdmesh.kv.outcome import SentTransfer
from pdmesh.kv.outgoing import PieceWriter
from pdmesh.kv.piece import PieceHeader, PieceKind, request_key
from pdmesh.model import Epoch, KvPart, RequestId

#: Pieces of one transfer under way at once: one is copied and checked while others travel.
PIECES_IN_FLIGHT = 4


class KvDestination(NamedTuple):
    """Where a transfer goes: a data address, and what of the request's KV is to be there."""

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

    @property
    def num_bytes(self) -> int:
        return self._writer.num_bytes

    @property
    def num_pieces(self) -> int:
        return self._writer.num_pieces

    @abstractmethod
    def landed(self, destination: int) -> None:
        """A destination has all that goes there."""

    def fail(self, reason: str) -> None:
        """End `run` with a KvTransferError."""
        if self._failure is None:
            self._failure = reason
            self._work.cancel()

    @abstractmethod
    async def run(self) -> SentTransfer:
        """Send everything and wait for the acknowledgement. Raises KvTransferError."""
