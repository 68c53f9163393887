"""KV that leaves one instance: of prompts as they are computed, and of running decodes. Part of `pdmesh.kv.mover`."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pdmesh.errors import KvTransferError
from pdmesh.kv.context import KvContext, mismatch
from pdmesh.kv.moving import MoveSender
from pdmesh.kv.outcome import PausedTransfer, SentTransfer
from pdmesh.kv.piece import PieceHeader, PieceKind, request_key
from pdmesh.kv.sender import KvPush, KvSender
from pdmesh.kv.transfer import GrantedTransfer, KvDestination
from pdmesh.model import Epoch, IndexRange, RequestId
from pdmesh.transport.kv_transport import ReceivedPiece


class KvDepartures:
    """Tracks the transfers that leave this instance: offered, or granted and in progress. Event loop only."""

    def __init__(self, context: KvContext) -> None:
        self._context = context
        self._senders: dict[bytes, KvSender] = {}
        self._granted: dict[bytes, GrantedTransfer] = {}  # of these, and of what decodes
        self._num_pieces = self._num_bytes = 0  # of those that have ended

    def __len__(self) -> int:
        return len(self._senders.keys() | self._granted.keys())

    @property
    def num_pieces(self) -> int:
        return self._num_pieces + sum(transfer.num_pieces for transfer in self._granted.values())

    @property
    def num_bytes(self) -> int:
        return self._num_bytes + sum(transfer.num_bytes for transfer in self._granted.values())

    # --- for the worker runtime ---------------------------------------------------------------------------------------

    def offer(
        self,
        request_id: RequestId,
        epoch: Epoch,
        *,
        block_ids: Sequence[int],
        num_context_tokens: int,
        source: int = 0,
        blocks: IndexRange | None = None,
        num_present_blocks: int = 0,
    ) -> KvSender:
        """Get ready to send. ``block_ids`` is the request's block table, whose first blocks hold the context.

        This instance is source number ``source`` of the transfer, and sends ``blocks`` of the table; None sends all.
        The first ``num_present_blocks`` of the table hold their KV already. An older epoch of the request is cancelled.
        """
        context = self._context
        sender = KvSender(
            request_id,
            epoch,
            block_ids=block_ids,
            num_context_tokens=num_context_tokens,
            source=source,
            blocks=blocks,
            num_present_blocks=num_present_blocks,
            store=context.store,
            call_soon=context.call_soon,
            clock=context.clock,
        )
        self.cancel(request_id, epoch)
        self._senders[sender.key] = sender
        return sender

    def move(
        self,
        request_id: RequestId,
        epoch: Epoch,
        *,
        block_ids: Sequence[int],
        transcript: bytes,
        destination: KvDestination,
        capability: int,
        on_caught_up: Callable[[], None],
        first_held: int = 0,
    ) -> MoveSender:
        """Begin to move a running decode away. ``block_ids`` is its block table itself, which grows as it goes on.

        Those before ``first_held`` are not there in layers with a window, all others stay until the move has ended.

        Exactly one outcome follows: `SentTransfer` or `FailedTransfer`.
        """
        self._admit((destination,))
        context = self._context
        sender = MoveSender(
            request_id,
            epoch,
            writer=context.writer(block_ids),
            destination=destination,
            capability=capability,
            transcript=transcript,
            layout=context.store.layout,
            first_held=first_held,
            clock=context.clock,
            on_caught_up=on_caught_up,
        )
        self._begin(sender)
        return sender

    def grant(
        self, request_id: RequestId, epoch: Epoch, *, destinations: Sequence[KvDestination], capability: int
    ) -> None:
        """Let an offered transfer start, or go on. Ignored if there is none (the request was freed meanwhile).

        A ``capability`` other than before means another transfer: it begins with all that has been computed.
        """
        sender = self._sender(request_id, epoch)
        if sender is None:
            return
        self._admit(destinations)
        granted = self._granted.get(sender.key)
        if isinstance(granted, KvPush) and granted.capability == capability:
            granted.grant_again()
            return
        context = self._context
        self._begin(
            KvPush(
                sender,
                destinations,
                capability,
                writer=context.writer(sender.block_ids),
                deadline_s=context.config.deadline_s,
                clock=context.clock,
                on_paused=self._paused,
            )
        )

    def pause(self, request_id: RequestId, epoch: Epoch) -> None:
        """Stop sending until the next grant; answered by `PausedTransfer`. Ignored if there is no such transfer."""
        granted = self._granted.get(request_key(request_id))
        if isinstance(granted, KvPush) and granted.epoch == epoch:
            granted.pause()

    def withdraw(self, request_id: RequestId, epoch: Epoch) -> None:
        """End a granted transfer without an outcome. Its KV is kept for another grant. Idempotent."""
        if self._sender(request_id, epoch) is not None:
            self._end(request_key(request_id))

    # --- for the mover ------------------------------------------------------------------------------------------------

    def cancel(self, request_id: RequestId, epoch: Epoch) -> None:
        """Stop sending this epoch and older ones, without an outcome. Idempotent."""
        key = request_key(request_id)
        granted, sender = self._granted.get(key), self._senders.get(key)
        if granted is not None and granted.epoch <= epoch:
            self._end(key)
        if sender is not None and sender.epoch <= epoch:
            del self._senders[key]

    def clear(self) -> None:
        """Withdraw every offer and end every read window."""
        self._senders.clear()
        for transfer in self._granted.values():
            transfer.close()

    def take(self, header: PieceHeader, piece: ReceivedPiece) -> None:
        """Take a receiver's acknowledgement of a whole transfer, or its request to send pages again."""
        granted = self._granted.get(header.request_key)
        fault = "unknown" if granted is None else mismatch(granted, header)
        if granted is None or fault is not None:
            self._context.drop(piece, fault or "unknown")
            return
        if header.kind is PieceKind.LANDED:
            granted.landed(header.destination)
        else:
            if header.kind is PieceKind.NO_PEER_READS and header.destination < len(granted.destinations):
                self._context.decline(granted.destinations[header.destination].address)
            fault = granted.send_again(header)
        if fault is None:
            piece.release()
        else:
            self._context.drop(piece, fault)

    def take_abort(self, header: PieceHeader) -> bool:
        """Note that a peer has given a transfer up. Return whether that transfer leaves from here."""
        granted = self._granted.get(header.request_key)
        if granted is None or mismatch(granted, header) is not None:
            return False
        granted.fail("the receiver gave up")
        return True

    # --- inside -------------------------------------------------------------------------------------------------------

    def _sender(self, request_id: RequestId, epoch: Epoch) -> KvSender | None:
        sender = self._senders.get(request_key(request_id))
        return sender if sender is not None and sender.epoch == epoch else None

    def _admit(self, destinations: Sequence[KvDestination]) -> None:
        for destination in destinations:
            self._context.admit(destination.address)

    def _begin(self, transfer: GrantedTransfer) -> None:
        """Take the place of what is under way of the request."""
        self._end(transfer.key)
        self._granted[transfer.key] = transfer
        self._context.tasks.start_soon(self._run, transfer)

    def _end(self, key: bytes) -> None:
        transfer = self._granted.get(key)
        if transfer is not None:
            transfer.scope.cancel()
            self._forget(transfer)

    def _forget(self, transfer: GrantedTransfer) -> None:
        """Take it out of the table, and let nothing more of it be read; its task may still be ending."""
        transfer.close()
        if self._granted.get(transfer.key) is transfer:
            del self._granted[transfer.key]
            self._num_pieces += transfer.num_pieces
            self._num_bytes += transfer.num_bytes

    async def _run(self, transfer: GrantedTransfer) -> None:
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
                if isinstance(outcome, KvTransferError):
                    self._context.failed(transfer, str(outcome), sending=True)
                    for index, destination in enumerate(transfer.destinations):
                        await self._context.tell(PieceKind.ABORT, transfer, destination.address, destination=index)
                else:
                    if isinstance(transfer, KvPush) and self._senders.get(transfer.key) is transfer.sender:
                        del self._senders[transfer.key]
                    self._context.on_outcome(outcome)
        finally:
            self._forget(transfer)

    def _paused(self, push: KvPush) -> None:
        self._context.on_outcome(PausedTransfer(request_id=push.request_id, epoch=push.epoch))
