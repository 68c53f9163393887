"""KV that leaves one instance: of prompts as they are computed, and of running decodes. Part of `pdmesh.kv.mover`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Unpack

from pdmesh.errors import KvTransferError
from pdmesh.kv.context import KvContext, mismatch
from pdmesh.kv.copy_out import CopyOut, KvSource, Offered
from pdmesh.kv.outcome import SentTransfer
from pdmesh.kv.piece import KvDestination, PieceHeader, PieceKind, request_key
from pdmesh.model import Epoch, RequestId
from pdmesh.transport.kv_transport import ReceivedPiece


class KvDepartures:
    """Tracks the transfers that leave this instance: offered, or granted and in progress. Event loop only."""

    def __init__(self, context: KvContext) -> None:
        self._context = context
        self._sources: dict[bytes, KvSource] = {}
        self._granted: dict[bytes, CopyOut] = {}  # copies under way
        self._num_pieces = self._num_bytes = 0  # of those that have ended

    def __len__(self) -> int:
        return len(self._sources.keys() | self._granted.keys())

    @property
    def num_pieces(self) -> int:
        return self._num_pieces + sum(transfer.num_pieces for transfer in self._granted.values())

    @property
    def num_bytes(self) -> int:
        return self._num_bytes + sum(transfer.num_bytes for transfer in self._granted.values())

    # --- for the worker runtime ---------------------------------------------------------------------------------------

    def offer(self, request_id: RequestId, epoch: Epoch, **offered: Unpack[Offered]) -> KvSource:
        """Get ready to send. An older epoch of the request is cancelled."""
        source = KvSource(self._context, request_id, epoch, **offered)
        self.cancel(request_id, epoch)
        self._sources[source.key] = source
        return source

    def grant(
        self, request_id: RequestId, epoch: Epoch, *, destinations: Sequence[KvDestination], capability: int
    ) -> None:
        """Let an offered copy start, or go on. Ignored if there is none (the request was freed meanwhile).

        A ``capability`` other than before means another copy: it begins with all that has been computed.
        """
        source = self._source(request_id, epoch)
        if source is None:
            return
        if source.copy is not None and source.copy.capability == capability:
            source.copy.grant_again()
        else:
            self._begin(source, destinations, capability)

    def pause(self, request_id: RequestId, epoch: Epoch) -> None:
        """Stop sending until the next grant; answered by `PausedTransfer`. Ignored if there is no such transfer."""
        source = self._source(request_id, epoch)
        if source is not None and source.copy is not None:
            source.copy.pause()

    def withdraw(self, request_id: RequestId, epoch: Epoch) -> None:
        """End a granted transfer without an outcome. Its KV is kept for another grant. Idempotent."""
        if self._source(request_id, epoch) is not None:
            self._end(request_key(request_id))

    # --- for the mover ------------------------------------------------------------------------------------------------

    def cancel(self, request_id: RequestId, epoch: Epoch) -> None:
        """Stop sending this epoch and older ones, without an outcome. Idempotent."""
        key = request_key(request_id)
        granted, source = self._granted.get(key), self._sources.get(key)
        if granted is not None and granted.epoch <= epoch:
            self._end(key)
        if source is not None and source.epoch <= epoch:
            del self._sources[key]

    def clear(self) -> None:
        """Withdraw every offer and end every read window."""
        self._sources.clear()
        for transfer in self._granted.values():
            transfer.close()

    def take(self, header: PieceHeader, piece: ReceivedPiece) -> None:
        """Take a receiver's acknowledgement of a whole transfer, or its request to send pages again."""
        granted = self._granted.get(header.request_key)
        fault = "unknown" if granted is None else mismatch(granted, header)
        if granted is not None and fault is None:
            if header.kind is PieceKind.LANDED:
                granted.landed(header.destination)
            else:
                fault = granted.send_again(header)
        self._context.settle(piece, fault)

    def take_abort(self, header: PieceHeader) -> bool:
        """Note that a peer has given a transfer up. Return whether that transfer leaves from here."""
        granted = self._granted.get(header.request_key)
        if granted is None or mismatch(granted, header) is not None:
            return False
        granted.fail("the receiver gave up")
        return True

    # --- inside -------------------------------------------------------------------------------------------------------

    def _source(self, request_id: RequestId, epoch: Epoch) -> KvSource | None:
        source = self._sources.get(request_key(request_id))
        return source if source is not None and source.epoch == epoch else None

    def _begin(self, source: KvSource, destinations: Sequence[KvDestination], capability: int) -> None:
        """Take the place of the copy of the request that is under way."""
        for destination in destinations:
            self._context.admit(destination.address)
        self._end(source.key)
        copy = self._granted[source.key] = CopyOut(self._context, source, destinations, capability)
        self._context.tasks.start_soon(self._run, copy)

    def _end(self, key: bytes) -> None:
        transfer = self._granted.get(key)
        if transfer is not None:
            transfer.scope.cancel()
            self._forget(transfer)

    def _forget(self, transfer: CopyOut) -> None:
        """Take it out of the table, and let nothing more of it be read; its task may still be ending."""
        transfer.close()
        if self._granted.get(transfer.key) is transfer:
            del self._granted[transfer.key]
            self._num_pieces += transfer.num_pieces
            self._num_bytes += transfer.num_bytes

    async def _run(self, transfer: CopyOut) -> None:
        try:
            with transfer.scope:
                outcome: SentTransfer | KvTransferError
                try:
                    outcome = await transfer.run()
                except KvTransferError as error:
                    outcome = error
                if transfer.scope.cancel_called:
                    return  # as it ended: nobody expects an outcome any more
                self._forget(transfer)
                if self._sources.get(transfer.key) is transfer.source and (
                    isinstance(outcome, SentTransfer) or transfer.source.is_decode
                ):
                    del self._sources[transfer.key]
                if isinstance(outcome, KvTransferError):
                    self._context.failed(transfer, str(outcome), sending=True)
                    for index, destination in enumerate(transfer.destinations):
                        await self._context.tell(PieceKind.ABORT, transfer, destination.address, destination=index)
                else:
                    self._context.on_outcome(outcome)
        finally:
            self._forget(transfer)
