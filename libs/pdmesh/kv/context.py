"""What the parts that move KV out of one instance, or into it, have in common: means, and messages to peers."""

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


class TransferSide(Protocol):
    """The identity that the source and the destination of a transfer share."""

    @property
    def request_id(self) -> RequestId: ...
    @property
    def epoch(self) -> Epoch: ...
    @property
    def key(self) -> bytes: ...
    @property
    def capability(self) -> int: ...


@dataclass(slots=True, kw_only=True)
class KvContext(Means):
    """The means that the parts of a `pdmesh.kv.mover.KvMover` share. Event loop only."""

    config: TransferConfig
    tasks: anyio.abc.TaskGroup
    call_soon: Callable[[Callable[[], object]], object]  # from any thread, without waiting for the result
    clock: Callable[[], float]
    on_outcome: OnOutcome
    peer_reads: PeerReads | None = None  # if instances read each other's caches
    dropped: Counter[str] = field(default_factory=Counter[str])  # pieces, by the reason
    num_asked_again: int = 0  # of those damaged

    def writer(self, block_ids: Sequence[int] = ()) -> PieceWriter:
        """Return a writer of a request's pieces; until closed, peers that can may read its blocks, if there are any."""
        peer_reads = self.peer_reads if block_ids else None
        window = None if peer_reads is None else peer_reads.begin()
        if peer_reads is None or window is None:
            return PieceWriter(block_ids, self)
        return PeerReadWriter(peer_reads, window, block_ids, self)

    def drop(self, piece: ReceivedPiece, reason: str) -> None:
        self.dropped[reason] += 1
        piece.release()

    def settle(self, piece: ReceivedPiece, fault: str | None) -> None:
        """Release a piece, and count it as dropped if it had a fault."""
        if fault is None:
            piece.release()
        else:
            self.drop(piece, fault)

    def failed(self, transfer: TransferSide, reason: str, *, sending: bool) -> None:
        """Report that one side of a transfer has failed."""
        request_id, epoch = transfer.request_id, transfer.epoch
        log.warning("kv transfer failed", request_id=request_id, epoch=epoch, sending=sending, reason=reason)
        self.on_outcome(FailedTransfer(request_id=request_id, epoch=epoch, sending=sending, reason=reason))

    def admit(self, address: bytes) -> None:
        """Accept messages from a peer that the scheduler names."""
        try:
            self.transport.admit(address)
        except KvTransferError as error:  # then nothing comes from there, and sending there fails
            log.warning("the scheduler sent an invalid peer address", reason=str(error))

    async def tell(self, kind: PieceKind, transfer: TransferSide, address: bytes, *, destination: int) -> None:
        """Send a piece without payload about a transfer. If that fails, the peer's own time limits end its side.

        LANDED comes once for each transfer that the peer has sent, so it is a notice.
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
            log.warning(
                "could not notify a peer", request_id=request_id, epoch=epoch, kind=kind.name, reason=str(error)
            )


def mismatch(transfer: TransferSide, header: PieceHeader) -> str | None:
    """Return why a piece does not belong to a transfer of its request; None if it does."""
    if header.epoch != transfer.epoch:
        return "epoch"
    if header.capability != transfer.capability:
        return "capability"
    return None
