"""Outgoing KV of one instance: prompts as they are computed, and running decodes. Part of `pdmesh.kv.mover`."""

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
    """Transfers that leave this instance: offered, or granted and under way. Event loop only."""

    def __init__(self, context: KvContext) -> None:
        self._context = context
        self._sources: dict[bytes, KvSource] = {}
        self._granted: dict[bytes, CopyOut] = {}
        self._num_pieces = self._num_bytes = 0

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
        """Make a request's KV ready to send. Offers and copies of this epoch and older ones are cancelled."""
        source = KvSource(self._context, request_id, epoch, **offered)
        self.cancel(request_id, epoch)
        self._sources[source.key] = source
        return source

    def grant(
        self, request_id: RequestId, epoch: Epoch, *, destinations: Sequence[KvDestination], capability: int
    ) -> None:
        """Start an offered copy, or resume a paused one. Ignored if there is no offer, because the request was freed.

        A new ``capability`` means another copy, which replaces the current one and begins with all computed pages.
        """
        source = self._source(request_id, epoch)
        if source is None:
            return
        if source.copy is not None and source.copy.capability == capability:
            source.copy.grant_again()
        else:
            self._begin(source, destinations, capability)

    def pause(self, request_id: RequestId, epoch: Epoch) -> None:
        """Pause a copy until the next grant; `PausedTransfer` reports when. Ignored if there is no such copy."""
        source = self._source(request_id, epoch)
        if source is not None and source.copy is not None:
            source.copy.pause()

    def withdraw(self, request_id: RequestId, epoch: Epoch) -> None:
        """End a granted copy without an outcome. The offer stays for another grant. Idempotent."""
        if self._source(request_id, epoch) is not None:
            self._end(request_key(request_id))

    # --- for the mover ------------------------------------------------------------------------------------------------

    def cancel(self, request_id: RequestId, epoch: Epoch) -> None:
        """Withdraw the offer and end the copy of this epoch and older ones, without an outcome. Idempotent."""
        key = request_key(request_id)
        granted, source = self._granted.get(key), self._sources.get(key)
        if granted is not None and granted.epoch <= epoch:
            self._end(key)
        if source is not None and source.epoch <= epoch:
            del self._sources[key]

    def clear(self) -> None:
        """Withdraw every offer and close every read window."""
        self._sources.clear()
        for transfer in self._granted.values():
            transfer.close()

    def take(self, header: PieceHeader, piece: ReceivedPiece) -> None:
        """Handle a receiver's acknowledgement of a whole copy, or its request to send pages again."""
        granted = self._granted.get(header.request_key)
        fault = "unknown" if granted is None else mismatch(granted, header)
        if granted is not None and fault is None:
            if header.kind is PieceKind.LANDED:
                granted.landed(header.destination)
            else:
                fault = granted.send_again(header)
        self._context.settle(piece, fault)

    def take_abort(self, header: PieceHeader) -> bool:
        """Fail the copy that a receiver has aborted. Return False if no such copy leaves from here."""
        granted = self._granted.get(header.request_key)
        if granted is None or mismatch(granted, header) is not None:
            return False
        granted.fail("the receiver cancelled the transfer")
        return True

    # --- inside -------------------------------------------------------------------------------------------------------

    def _source(self, request_id: RequestId, epoch: Epoch) -> KvSource | None:
        source = self._sources.get(request_key(request_id))
        return source if source is not None and source.epoch == epoch else None

    def _begin(self, source: KvSource, destinations: Sequence[KvDestination], capability: int) -> None:
        """Start a copy in place of the current one."""
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
        """Remove a copy from the table and close its read window. Its task may still be ending."""
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
                    return  # no outcome is expected any more
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
