"""KV that comes to one instance: of prompts that were computed elsewhere, and of running decodes that move here.

Part of `pdmesh.kv.mover`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import anyio.lowlevel

from pdmesh.kv.context import KvContext, mismatch
from pdmesh.kv.incoming import PieceReader
from pdmesh.kv.inlet import PageIntake
from pdmesh.kv.outcome import LandedTransfer
from pdmesh.kv.piece import PieceHeader, PieceKind, request_key
from pdmesh.kv.receiver import KvReceiver
from pdmesh.model import Epoch, IndexRange, RequestId
from pdmesh.transport.kv_transport import ReceivedPiece


class KvArrivals:
    """Tracks the transfers that this instance expects, and how far each has come. Event loop only."""

    def __init__(self, context: KvContext, reader: PieceReader) -> None:
        self._context = context
        self._receivers: dict[bytes, KvReceiver] = {}
        self.pages = PageIntake(context, reader)

    def __len__(self) -> int:
        return len(self._receivers)

    # --- for the worker runtime ---------------------------------------------------------------------------------------

    def expect(
        self,
        request_id: RequestId,
        epoch: Epoch,
        *,
        capability: int,
        block_ids: Sequence[int],
        num_context_tokens: int | None,
        source_addresses: tuple[bytes, ...],
        destination: int = 0,
        num_present_blocks: int = 0,
        blocks: IndexRange | None = None,
        draws: bool = True,
        hold: Callable[[IndexRange], bool] | None = None,
    ) -> None:
        """Take the request's KV into the first blocks of ``block_ids`` (the rest is room for its output).

        ``num_context_tokens`` is None for a move, whose commit tells the number. This instance is destination number
        ``destination`` of the transfer. The first ``num_present_blocks`` are there already, and nothing is taken into
        them. Of a context that is spread only ``blocks`` come, into ``block_ids``. What ``draws`` waits for a token to
        go on from, too. An older epoch of the request is cancelled.
        ``hold`` is asked for room for blocks of a move in layers with a window.
        """
        receiver = KvReceiver(
            request_id,
            epoch,
            capability=capability,
            block_ids=block_ids,
            num_context_tokens=num_context_tokens,
            source_addresses=source_addresses,
            destination=destination,
            num_present_blocks=num_present_blocks,
            blocks=blocks,
            draws=draws,
            layout=self._context.store.layout,
            hold=hold,
            writer=self._context.writer(),
            on_placed=self._check_landed,
            on_failed=self._give_up,
            start=self._context.tasks.start_soon,
        )
        if (older := self._receivers.get(receiver.key)) is not None:
            self._forget(older)
        self._receivers[receiver.key] = receiver
        for address in source_addresses:
            self._context.admit(address)

    # --- for the mover ------------------------------------------------------------------------------------------------

    def cancel(self, request_id: RequestId, epoch: Epoch) -> None:
        """Stop expecting transfers of this epoch and older ones, without an outcome. Idempotent."""
        key = request_key(request_id)
        receiver = self._receivers.get(key)
        if receiver is not None and receiver.epoch <= epoch:
            self._forget(receiver)

    def take_abort(self, header: PieceHeader) -> bool:
        """Note that a peer has given a transfer up. Return whether that transfer is expected here."""
        receiver = self._receivers.get(header.request_key)
        if receiver is None or mismatch(receiver, header) is not None:
            return False
        self._give_up(receiver, "the sender gave up", tell=False)
        return True

    def take(self, header: PieceHeader, piece: ReceivedPiece) -> None:
        """Take a piece of KV, a peer read, a piece of a transcript, or a commit."""
        context, receiver = self._context, self._receivers.get(header.request_key)
        if receiver is None:
            context.drop(piece, "unknown")
            return
        if reason := mismatch(receiver, header):
            context.drop(piece, reason)
            return
        if receiver.first_piece_s is None:
            receiver.first_piece_s = context.clock()
        if header.kind is PieceKind.COMMIT:
            piece.release()
            if reason := receiver.commit(header):
                self._give_up(receiver, reason)
            else:
                self._check_landed(receiver)
        elif header.kind is PieceKind.TRANSCRIPT:
            self._take_transcript(receiver, header, piece)
        elif header.kind in (PieceKind.KV, PieceKind.PEER_READ):
            self.pages.take(receiver, header, piece)
        else:
            context.drop(piece, "kind")

    def check_integrity(self) -> None:
        for receiver in self._receivers.values():
            receiver.ledger.check_integrity()

    # --- inside -------------------------------------------------------------------------------------------------------

    def _take_transcript(self, receiver: KvReceiver, header: PieceHeader, piece: ReceivedPiece) -> None:
        if not piece.load() or not self._context.key.opens_payload(piece.payload, header.check):
            self._context.drop(piece, "checksum")
            self._give_up(receiver, "a piece of its transcript was damaged on the way")
        elif reason := receiver.take_transcript(header, piece.payload):
            self._context.drop(piece, reason)
        else:
            piece.release()
            self._check_landed(receiver)

    def _check_landed(self, receiver: KvReceiver) -> None:
        if receiver.complete and not receiver.is_over and not receiver.has_landed:
            receiver.has_landed = True
            self._context.tasks.start_soon(self._land, receiver)

    async def _land(self, receiver: KvReceiver) -> None:
        """Tell the sources, then the instance: its next step holds the interpreter up for longer than that takes."""
        self._context.tasks.start_soon(self._tell_sources, PieceKind.LANDED, receiver)
        await anyio.lowlevel.checkpoint()  # the telling has begun
        if receiver.is_over:
            return  # cancelled meanwhile
        token = receiver.first_token
        assert receiver.first_piece_s is not None
        self._forget(receiver)
        self._context.on_outcome(
            LandedTransfer(
                request_id=receiver.request_id,
                epoch=receiver.epoch,
                token_id=None if token is None else token.token_id,
                token_index=0 if token is None else token.token_index,
                num_bytes=receiver.num_bytes,
                duration_s=self._context.clock() - receiver.first_piece_s,
                transcript=bytes(receiver.transcript),
            )
        )

    def _give_up(self, receiver: KvReceiver, reason: str, *, tell: bool = True) -> None:
        if receiver.is_over or receiver.has_landed:
            return  # cancelled, or ended before
        self._forget(receiver)
        if tell:
            self._context.tasks.start_soon(self._tell_sources, PieceKind.ABORT, receiver)
        self._context.failed(receiver, reason, sending=False)

    def _forget(self, receiver: KvReceiver) -> None:
        del self._receivers[receiver.key]
        receiver.is_over = True
        for lane in receiver.lanes:
            lane.close()

    async def _tell_sources(self, kind: PieceKind, receiver: KvReceiver) -> None:
        for lane in receiver.lanes:
            await self._context.tell(kind, receiver, lane.address, destination=receiver.destination)
