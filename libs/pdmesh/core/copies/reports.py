"""What instances report of KV transfers; the ends of moves are in `pdmesh.core.copies.decode_moves`."""

from __future__ import annotations

from pdmesh.core.commands import SHARED_BLAME
from pdmesh.core.copies.context_ranges import Parts
from pdmesh.core.copies.prefix_fetches import Fetches
from pdmesh.core.copies.receivers import has_all_kv, lose_receiver
from pdmesh.core.events import (
    DecodeReserved,
    TransferFailed,
    TransferLanded,
    TransferOffered,
    TransferPaused,
    TransferSent,
)
from pdmesh.core.instances.allocations import AllocationKind
from pdmesh.core.mesh_state import MeshState
from pdmesh.core.requests.transfer import Side, Transfer, TransferState
from pdmesh.model import MAX_REQUEST_TOKENS, NO_TRANSFER


class TransferReports:
    """Takes note of them; what does not fit the mesh state is counted, and changes nothing."""

    def __init__(self, mesh: MeshState, fetches: Fetches, parts: Parts) -> None:
        self._mesh = mesh
        self._fetches = fetches
        self._parts = parts

    def reserved(self, event: DecodeReserved) -> None:
        if transfer := self._find(event, Side.DESTINATION):
            self._mesh.grant(self._mesh.broker.reserve(transfer, event.instance_id))

    def offered(self, event: TransferOffered) -> None:
        state = self._mesh.find((event.request_id, event.epoch))
        if (
            state is not None
            and state.is_in_prefill
            and (state.num_lost_receivers or event.transfer_id == NO_TRANSFER)
            and (state.transfer is not None or state.key in self._mesh.awaiting_decode)
            and event.instance_id in state.prefill_ids
        ):
            self._mesh.offer(state)  # to whoever receives it now
        elif transfer := self._find(event, Side.SOURCE):
            self._mesh.grant(self._mesh.broker.offer(transfer))

    def paused(self, event: TransferPaused) -> None:
        if transfer := self._find(event, Side.SOURCE):
            granted = self._mesh.broker.stopped(transfer, event.instance_id)
            if granted is None:
                self._mesh.ignore("TransferPaused")
            else:
                self._mesh.grant(granted)

    def landed(self, event: TransferLanded) -> None:
        key = (event.request_id, event.epoch)
        allocation = self._mesh.allocation_of(event.instance_id, key)
        if allocation is not None and allocation.transfer_id == event.transfer_id:
            if allocation.kind is AllocationKind.FETCH:
                self._fetches.count(allocation)
            self._mesh.instances[event.instance_id].computed(key, MAX_REQUEST_TOKENS)
        if transfer := self._find(event, Side.DESTINATION):
            for source_id in transfer.source_ids:
                self._mesh.cut.forgive(source_id, event.instance_id)
            self._mesh.grant(self._mesh.broker.land(transfer, event.instance_id))
            if transfer.is_fetch:
                self._fetches.landed(key)
                return
            state = self._mesh.requests[event.request_id]
            if state.move is not None and state.move.transfer is transfer:
                self._mesh.land_move(state)
            elif transfer.is_part:
                self._parts.landed(state)
            elif transfer.state is TransferState.LANDED and transfer.is_hand_over:
                self._mesh.land(state)
            elif transfer.is_hand_over:
                self._parts.landed_of_prompt(state, transfer)

    def sent(self, event: TransferSent) -> None:
        """All that a source sent was acknowledged."""
        if transfer := self._find(event, Side.SOURCE):
            transfer.sent(event.instance_id)

    def failed(self, event: TransferFailed, now_s: float) -> None:
        if transfer := self._mesh.broker.find(event.transfer_id, (event.request_id, event.epoch)):
            is_receiver = event.instance_id in transfer.destination_ids
            for source_id in transfer.source_ids:
                for destination_id in (event.instance_id,) if is_receiver else transfer.destination_ids:
                    self._mesh.cut.note(source_id, destination_id, now_s)
        key = (event.request_id, event.epoch)
        if self._fetches.failed(key) or self._parts.failed(key, event.instance_id, event.transfer_id):
            return
        state = self._mesh.find(key)
        if state is None or not state.needs(event.instance_id):
            self._mesh.free(event.instance_id, key)  # a move's target, or a sender without acknowledgement
        elif state.transfer is None or state.transfer.plan.transfer_id != event.transfer_id:
            self._mesh.ignore("TransferFailed")  # the other side said so before
        elif has_all_kv(self._mesh, state):
            lose_receiver(self._mesh, state, told_by=event.instance_id)
        else:
            self._mesh.restart(state, f"KV transfer failed on {event.instance_id}: {event.reason}", blame=SHARED_BLAME)

    def _find(
        self, event: DecodeReserved | TransferOffered | TransferPaused | TransferLanded | TransferSent, side: Side
    ) -> Transfer | None:
        """The transfer that an instance reports of, if the instance is on that side of it and it is not over."""
        transfer = self._mesh.broker.find(event.transfer_id, (event.request_id, event.epoch))
        if transfer is not None and event.instance_id in transfer.ids_of(side):
            return transfer
        self._mesh.ignore(type(event).__name__)
        return None
