"""The objects that the parts of a `pdmesh.kv.mover.KvMover` share, and messages to peers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import anyio
import anyio.abc
import structlog

from pdmesh.config import TransferConfig
from pdmesh.errors import KvTransferError
from pdmesh.kv.outcome import FailedTransfer, OnOutcome
from pdmesh.kv.outgoing import Means, PieceWriter
from pdmesh.kv.peer_reads import PeerReads, PeerReadWriter
from pdmesh.kv.piece import PieceHeader, PieceKind
from pdmesh.model import Epoch, RequestId
from pdmesh.transport.kv_transport import ReceivedPiece

log = structlog.get_logger()


class Authorized(Protocol):
    """A message or a transfer: the epoch of its request, and a capability."""

    @property
    def epoch(self) -> Epoch: ...
    @property
    def capability(self) -> int: ...


class TransferSide(Authorized, Protocol):
    """The identity that the source and the destination of a transfer share."""

    @property
    def request_id(self) -> RequestId: ...
    @property
    def key(self) -> bytes: ...


@dataclass(slots=True, kw_only=True)
class KvContext(Means):
    """The objects that the parts of a `pdmesh.kv.mover.KvMover` share. Event loop only.

    ``call_soon`` makes a call on the event loop, from any thread, without waiting for the result. ``peer_reads`` is
    None unless instances read each other's caches. ``dropped`` counts pieces by reason. ``num_asked_again`` counts
    unusable pieces that were requested again.
    """

    config: TransferConfig
    tasks: anyio.abc.TaskGroup
    call_soon: Callable[[Callable[[], object]], object]
    clock: Callable[[], float]
    on_outcome: OnOutcome
    peer_reads: PeerReads | None = None
    dropped: Counter[str] = field(default_factory=Counter[str])
    num_asked_again: int = 0

    def writer(self, block_ids: Sequence[int] = ()) -> PieceWriter:
        """Return a writer of a request's pieces. Peers may read ``block_ids``, if any are given, until it is closed."""
        peer_reads = self.peer_reads if block_ids else None
        window = None if peer_reads is None else peer_reads.begin()
        if peer_reads is None or window is None:
            return PieceWriter(block_ids, self)
        return PeerReadWriter(peer_reads, window, block_ids, self)

    def drop(self, piece: ReceivedPiece, reason: str) -> None:
        self.dropped[reason] += 1
        piece.release()

    def settle(self, piece: ReceivedPiece, fault: str | None) -> None:
        """Release a piece, and count it as dropped if it has a fault."""
        if fault is None:
            piece.release()
        else:
            self.drop(piece, fault)

    def failed(self, transfer: TransferSide, reason: str, *, sending: bool) -> None:
        """Log and report that one side of a transfer has failed."""
        request_id, epoch = transfer.request_id, transfer.epoch
        log.warning("KV transfer failed", request_id=request_id, epoch=epoch, sending=sending, reason=reason)
        self.on_outcome(FailedTransfer(request_id=request_id, epoch=epoch, sending=sending, reason=reason))

    def admit(self, address: bytes) -> None:
        """Accept messages from a peer that the scheduler names. Log an invalid address."""
        try:
            self.transport.admit(address)
        except KvTransferError as error:
            log.warning("the scheduler sent an invalid peer address", reason=str(error))

    async def tell(self, kind: PieceKind, transfer: TransferSide, address: bytes, *, destination: int) -> None:
        """Send a piece without payload about a transfer. If that fails, the peer's own time limits end its side.

        A LANDED piece is sent as a notice, because there is one for each transfer that the peer has sent.
        """
        request_id, epoch = transfer.request_id, transfer.epoch
        header = PieceHeader(
            kind=kind,
            request_key=transfer.key,
            epoch=epoch,
            capability=transfer.capability,
            destination=destination,
        )
        try:
            await self.writer().tell(address, header, is_notice=kind is PieceKind.LANDED)
        except KvTransferError as error:
            log.warning("cannot notify a peer", request_id=request_id, epoch=epoch, kind=kind.name, reason=str(error))


def mismatch(transfer: Authorized, header: Authorized) -> str | None:
    """Return the reason if a piece does not belong to a transfer of its request; None if it does."""
    if header.epoch != transfer.epoch:
        return "epoch"
    if header.capability != transfer.capability:
        return "capability"
    return None
