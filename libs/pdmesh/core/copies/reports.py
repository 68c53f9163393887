"""Instances' reports of KV transfers."""

from __future__ import annotations

from pdmesh.core.commands import SHARED_BLAME
from pdmesh.core.copies.context_ranges import ContextRanges
from pdmesh.core.copies.decode_moves import Moves
from pdmesh.core.copies.prefix_fetches import Fetches
from pdmesh.core.copies.rebalancing import Rebalancer
from pdmesh.core.copies.receivers import has_all_kv, lose_receiver
from pdmesh.core.events import (
    KvExpected,
    TransferFailed,
    TransferLanded,
    TransferOffered,
    TransferPaused,
    TransferSent,
)
from pdmesh.core.instances.allocations import AllocationKind
from pdmesh.core.mesh_state import MeshState
from pdmesh.core.requests.copy import Copy
from pdmesh.model import MAX_REQUEST_TOKENS, NO_TRANSFER, Then


class TransferReports:
    """Handlers of transfer reports. A report that does not fit the mesh state is counted and changes nothing."""

    def __init__(
        self, mesh: MeshState, fetches: Fetches, parts: ContextRanges, moves: Moves, rebalancer: Rebalancer
    ) -> None:
        self._mesh = mesh
        self._fetches = fetches
        self._parts = parts
        self._moves = moves
        self._rebalancer = rebalancer

    def reserved(self, event: KvExpected) -> None:
        if copy := self._to(event):
            self._mesh.grant(self._mesh.broker.reserve(copy, event.instance_id))

    def offered(self, event: TransferOffered) -> None:
        state = self._mesh.find((event.request_id, event.epoch))
        if (
            state is not None
            and state.is_in_prefill
            and (state.num_lost_receivers or event.transfer_id == NO_TRANSFER)
            and (state.incoming is not None or state.key in self._mesh.awaiting_decode)
            and event.instance_id in state.prefill_ids
        ):
            self._mesh.offer(state)
        elif copy := self._from(event):
            self._mesh.grant(self._mesh.broker.offer(copy))

    def paused(self, event: TransferPaused) -> None:
        if copy := self._from(event):
            granted = self._mesh.broker.stopped(copy, event.instance_id)
            if granted is None:
                self._mesh.ignore("TransferPaused")
            else:
                self._mesh.grant(granted)

    def landed(self, event: TransferLanded) -> None:
        mesh, key = self._mesh, (event.request_id, event.epoch)
        allocation = mesh.allocation_of(event.instance_id, key)
        if allocation is not None and allocation.transfer_id == event.transfer_id:
            if allocation.kind is AllocationKind.FETCH:
                self._fetches.count(allocation)
            mesh.instances[event.instance_id].computed(key, MAX_REQUEST_TOKENS)
        if (copy := self._to(event)) is None:
            return
        for source_id in copy.source_ids:
            mesh.cut.forgive(source_id, event.instance_id)
        mesh.grant(mesh.broker.land(copy, event.instance_id))
        if copy.plan.then is Then.KEEP:
            self._fetches.landed(key)
            return
        state = mesh.requests[event.request_id]
        if copy.plan.is_move:
            if state.move is copy:
                mesh.land_move(state)
        elif copy.plan.is_of_range:
            self._parts.landed(state)
        elif copy.has_landed:
            mesh.land(state)
        else:
            self._parts.landed_of_prompt(state, copy)

    def sent(self, event: TransferSent, now_s: float) -> None:
        """Note that a source's KV was acknowledged, and learn the rate of the link."""
        if event.was_decoding:
            self._moves.sent(event)
            self._rebalancer.timed(event)
        elif copy := self._from(event):
            copy.sent(event.instance_id)
        self._mesh.links.note(event.instance_id, event.destination_id, event.num_bytes, event.sent_s, now_s)

    def failed(self, event: TransferFailed, now_s: float) -> None:
        if event.committed is not None:
            self._moves.failed(event, now_s)
            return
        key = (event.request_id, event.epoch)
        if copy := self._mesh.broker.find(event.transfer_id, key):
            is_receiver = event.instance_id in copy.destination_ids
            is_load = copy.source_ids == copy.destination_ids
            for source_id in () if is_load else copy.source_ids:
                for destination_id in (event.instance_id,) if is_receiver else copy.destination_ids:
                    self._mesh.cut.note(source_id, destination_id, now_s)
        if self._fetches.failed(key) or self._parts.failed(key, event.instance_id, event.transfer_id):
            return
        state = self._mesh.find(key)
        if state is None or not state.needs(event.instance_id):
            self._mesh.free(event.instance_id, key)
        elif state.incoming is None or state.incoming.plan.transfer_id != event.transfer_id:
            self._mesh.ignore("TransferFailed")
        elif has_all_kv(self._mesh, state):
            lose_receiver(self._mesh, state, told_by=event.instance_id)
        else:
            self._mesh.restart(state, f"KV transfer failed on {event.instance_id}: {event.reason}", blame=SHARED_BLAME)

    def _to(self, event: KvExpected | TransferLanded) -> Copy | None:
        """Return the copy that one of its destinations reports; None, counted as ignored, if it is over or unknown."""
        copy = self._mesh.broker.find(event.transfer_id, (event.request_id, event.epoch))
        if copy is not None and event.instance_id in copy.destination_ids:
            return copy
        self._mesh.ignore(type(event).__name__)
        return None

    def _from(self, event: TransferOffered | TransferPaused | TransferSent) -> Copy | None:
        """Return the copy that one of its sources reports; None, counted as ignored, if it is over or unknown."""
        copy = self._mesh.broker.find(event.transfer_id, (event.request_id, event.epoch))
        if copy is not None and event.instance_id in copy.source_ids:
            return copy
        self._mesh.ignore(type(event).__name__)
        return None
