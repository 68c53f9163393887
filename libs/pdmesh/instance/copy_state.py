"""KV that leaves an instance, and how far the copy has come."""

from __future__ import annotations

from pdmesh.instance.sequence_phases import COPY_TRANSITIONS, IllegalStep, LeavingState
from pdmesh.model import NO_TRANSFER, InstanceId, TransferId
from pdmesh.plans import TransferPlan


def range_at(transfer: TransferPlan, instance_id: InstanceId) -> int | None:
    """Return the number of the range that a transfer brings to an instance; None if it brings no range there."""
    if transfer.is_of_range:
        blocks = transfer.destinations[0].part.blocks
        return blocks.start // blocks.size
    ids = transfer.destination_ids
    return ids.index(instance_id) - 1 if instance_id in ids[1:] else None


class LeavingCopy:
    """A copy of a sequence's KV from this instance. Its methods are its transitions."""

    __slots__ = ("state", "transfer")

    def __init__(self, transfer: TransferPlan | None, state: LeavingState = LeavingState.WAITING) -> None:
        """``transfer`` is None while no instance is to receive the KV."""
        self.transfer = transfer
        self.state = state

    @property
    def transfer_id(self) -> TransferId:
        return NO_TRANSFER if self.transfer is None else self.transfer.transfer_id

    @property
    def is_sending(self) -> bool:
        return self.state is LeavingState.SENDING

    @property
    def is_frozen(self) -> bool:
        """Whether the sequence draws no more because of this copy."""
        return self.state in (LeavingState.FROZEN, LeavingState.COMMITTED, LeavingState.ABANDONED)

    @property
    def may_have_begun(self) -> bool:
        """Whether the destination may have begun to decode."""
        return self.state in (LeavingState.COMMITTED, LeavingState.ABANDONED)

    @property
    def is_abandoned(self) -> bool:
        return self.state is LeavingState.ABANDONED

    # --- transitions ---

    def offer(self) -> None:
        """Offer the KV, because the first chunk has begun."""
        self._go("offer", LeavingState.OFFERED)

    def grant(self, transfer: TransferPlan) -> None:
        """Send to the destinations of ``transfer``."""
        self._go("grant", LeavingState.SENDING)
        self.transfer = transfer

    def stop(self) -> None:
        """Send nothing until the next grant."""
        self._go("stop", LeavingState.OFFERED)

    def lose_receiver(self) -> None:
        """Keep the KV for another receiver."""
        self._go("lose_receiver", LeavingState.OFFERED if self.is_sending else self.state)
        self.transfer = None

    def freeze(self) -> None:
        """Record that the sequence draws no more tokens here."""
        self._go("freeze", LeavingState.FROZEN)

    def commit(self) -> None:
        """Record that the destination may decode from now on."""
        self._go("commit", LeavingState.COMMITTED)

    def abandon(self) -> None:
        """Stop waiting for an acknowledgement."""
        self._go("abandon", LeavingState.ABANDONED)

    def _go(self, transition: str, state: LeavingState) -> None:
        """Change the state. Raises IllegalStep if the table does not allow the transition."""
        begins, leads = COPY_TRANSITIONS[transition]
        if self.state not in begins or state not in leads:
            raise IllegalStep(f"{transition} of a copy from {self.state} to {state}")
        self.state = state
