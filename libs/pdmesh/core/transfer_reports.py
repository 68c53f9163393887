"""What instances report of KV transfers, as the books see it. Of moves, the ends are in `pdmesh.core.moves`."""

from __future__ import annotations

from pdmesh.core.books import Books
from pdmesh.core.events import (
    DecodeReserved,
    TransferFailed,
    TransferLanded,
    TransferOffered,
    TransferPaused,
    TransferSent,
)
from pdmesh.core.receivers import has_all_kv, lose_receiver
from pdmesh.core.transfers import Side, Transfer, TransferState
from pdmesh.model import NO_TRANSFER


class TransferReports:
    """Takes note of them; what does not fit the books is counted, and changes nothing."""

    def __init__(self, books: Books) -> None:
        self._books = books

    def reserved(self, event: DecodeReserved) -> None:
        if transfer := self._find(event, Side.DESTINATION):
            self._books.grant(self._books.broker.reserve(transfer, event.instance_id))

    def offered(self, event: TransferOffered) -> None:
        state = self._books.find((event.request_id, event.epoch))
        if (
            state is not None
            and state.is_in_prefill
            and (state.num_lost_receivers or event.transfer_id == NO_TRANSFER)
            and (state.transfer is not None or state.key in self._books.unreceived)
            and event.instance_id in state.prefill_ids
        ):
            self._books.offer(state)  # to whoever receives it now
        elif transfer := self._find(event, Side.SOURCE):
            self._books.grant(self._books.broker.offer(transfer))

    def paused(self, event: TransferPaused) -> None:
        if transfer := self._find(event, Side.SOURCE):
            granted = self._books.broker.stopped(transfer, event.instance_id)
            if granted is None:
                self._books.ignore("TransferPaused")
            else:
                self._books.grant(granted)

    def landed(self, event: TransferLanded) -> None:
        if transfer := self._find(event, Side.DESTINATION):
            self._books.grant(self._books.broker.land(transfer, event.instance_id))
            state = self._books.requests[event.request_id]
            if state.move is not None and state.move.transfer is transfer:
                self._books.land_move(state)
            elif transfer.state is TransferState.LANDED and not transfer.is_move:
                self._books.land(state)

    def sent(self, event: TransferSent) -> None:
        """All that a source sent was acknowledged."""
        if transfer := self._find(event, Side.SOURCE):
            transfer.sent(event.instance_id)

    def failed(self, event: TransferFailed) -> None:
        key = (event.request_id, event.epoch)
        state = self._books.find(key)
        if state is None or not state.needs(event.instance_id):
            self._books.free(event.instance_id, key)  # a move's target, or a sender without acknowledgement
        elif state.transfer is None or state.transfer.plan.transfer_id != event.transfer_id:
            self._books.ignore("TransferFailed")  # the other side said so before
        elif has_all_kv(self._books, state):
            lose_receiver(self._books, state, told_by=event.instance_id)
        else:
            self._books.restart(state, f"KV transfer failed on {event.instance_id}: {event.reason}")

    def _find(
        self, event: DecodeReserved | TransferOffered | TransferPaused | TransferLanded | TransferSent, side: Side
    ) -> Transfer | None:
        """The transfer that an instance reports of, if the instance is on that side of it and it is not over."""
        transfer = self._books.broker.find(event.transfer_id, (event.request_id, event.epoch))
        if transfer is not None and event.instance_id in transfer.ids_of(side):
            return transfer
        self._books.ignore(type(event).__name__)
        return None
