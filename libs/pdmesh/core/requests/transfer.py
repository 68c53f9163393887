"""A KV transfer as the core knows it: one object from the placement of its request to the last acknowledgement.

A transfer is granted by handshake: a source has offered it and every destination has confirmed its reservation, so that
no piece arrives before its receiver knows of it. It needs a backend of each destination
(`pdmesh.core.transfers.broker`), and has them until its KV has landed there, or until all sources of a preempted
request have stopped when they were asked to.

What has happened is kept as facts; `Transfer.state` follows from them.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

from pdmesh.model import InstanceId, PartMember, PrefixHashes, RequestKey, TransferPurpose
from pdmesh.plans import TransferPlan


class TransferState(Enum):
    EXPECTED = auto()  # not offered yet, or a destination has not confirmed its room
    WAITING = auto()  # for a backend of each destination
    GRANTED = auto()  # it has them: its KV may move
    RETURNING = auto()  # its sources are asked to stop, and have not all said that they have
    PAUSED = auto()  # they have; it is offered again with the request's next chunk
    LANDED = auto()  # its KV is where it was to go
    WITHDRAWN = auto()  # its request ended; what it has of backends comes back as destinations free their room


class Side(Enum):
    SOURCE = auto()
    DESTINATION = auto()


class Transfer:
    """One KV transfer. Its methods are its transitions; each may come late, or twice, from outside."""

    def __init__(self, key: RequestKey, plan: TransferPlan, rank: int | None = None, chain: PrefixHashes = ()) -> None:
        """``rank`` is that of its request's first offer, if that was offered to an earlier receiver.

        ``chain`` are the granules that a fetch brings, and those before them.
        """
        self.key = key
        self.plan = plan
        self.chain = chain
        self.source_ids = plan.source_ids
        self.destination_ids = plan.destination_ids
        self.rank = rank  # by first offer, among all requests
        self.in_line = rank is not None  # offered, and not granted since
        self.withdrawn = False
        self.backends: dict[InstanceId, None] = {}  # of these destinations
        self._unreserved = set(self.destination_ids)
        self._unstopped: set[InstanceId] = set()  # sources that were asked to stop
        self._unlanded = set(self.destination_ids)
        self._sent: set[InstanceId] = set()  # sources whose KV was acknowledged

    @property
    def state(self) -> TransferState:
        if self.withdrawn:
            return TransferState.WITHDRAWN
        if not self._unlanded:
            return TransferState.LANDED
        if self._unstopped:
            return TransferState.RETURNING
        if self.backends:
            return TransferState.GRANTED
        if self.rank is None or self._unreserved:
            return TransferState.EXPECTED
        return TransferState.WAITING if self.in_line else TransferState.PAUSED

    @property
    def is_waiting(self) -> bool:
        """Whether only backends are missing."""
        return self.in_line and not self._unreserved and not self.backends

    @property
    def is_returning(self) -> bool:
        """Whether its backends are on their way back, also if nobody wants it any more."""
        return bool(self._unstopped)

    @property
    def is_over(self) -> bool:
        """Whether it landed, or is not wanted any more."""
        return self.withdrawn or not self._unlanded

    @property
    def is_hand_over(self) -> bool:
        """Whether a request waits for it to decode; others it finds where they were."""
        return self.plan.purpose is TransferPurpose.HAND_OVER

    @property
    def is_part(self) -> bool:
        """Whether it takes a range of a context on that decodes, or the range's tokens, to another member."""
        return self.plan.is_of_part

    @property
    def is_fetch(self) -> bool:
        return self.plan.purpose is TransferPurpose.FETCH

    @property
    def num_landed_parts(self) -> int:
        """Return how many of a context's first ranges are where they go, with all before them."""
        part_ids = self.destination_ids[1:]
        return next((index for index, name in enumerate(part_ids) if name in self._unlanded), len(part_ids))

    def ids_of(self, side: Side) -> tuple[InstanceId, ...]:
        return self.source_ids if side is Side.SOURCE else self.destination_ids

    def was_sent_by(self, source_id: InstanceId) -> bool:
        """Whether all that this source had to send was acknowledged: it frees its KV by itself."""
        return source_id in self._sent

    # --- transitions ---

    def offer(self, rank: int) -> None:
        """A source has something to send. The first offer's ``rank`` stays."""
        self.rank = rank if self.rank is None else self.rank
        self.in_line = True

    def reserve(self, destination_id: InstanceId) -> None:
        self._unreserved.discard(destination_id)

    def grant(self) -> None:
        assert self.is_waiting, f"{self.key} is granted, and is {self.state.name}"
        self.in_line = False
        self.backends = dict.fromkeys(self.destination_ids)

    def ask_back(self) -> None:
        """Its sources are told to stop."""
        assert self.state is TransferState.GRANTED, f"{self.key} is asked to stop, and is {self.state.name}"
        self._unstopped = set(self.source_ids)

    def stop(self, source_id: InstanceId) -> bool | None:
        """A source has stopped: whether all have, and the backends are back. None if it was not asked to."""
        if source_id not in self._unstopped:
            return None
        self._unstopped.remove(source_id)
        if self._unstopped:
            return False
        self.backends = {}
        return True

    def sent(self, source_id: InstanceId) -> None:
        if source_id in self.source_ids:
            self._sent.add(source_id)

    def land(self, destination_id: InstanceId) -> bool:
        """All that this destination is to hold is there; whether that is so for all of them."""
        self._unlanded.discard(destination_id)
        return not self._unlanded

    def give_back(self, destination_id: InstanceId) -> bool:
        """Whether it had this destination's backend, which is free now."""
        self._unstopped.clear()
        if destination_id not in self.backends:
            return False
        del self.backends[destination_id]
        return True

    def withdraw(self) -> None:
        """Its request ended."""
        self.withdrawn = True
        self.in_line = False


@dataclass(slots=True, eq=False)
class Relocation:
    """What of a running decode is on its way from one instance to another."""

    transfer: Transfer

    @property
    def source_id(self) -> InstanceId:
        return self.transfer.source_ids[0]

    @property
    def target_id(self) -> InstanceId:
        return self.transfer.destination_ids[0]


@dataclass(slots=True, eq=False)
class Move(Relocation):
    """A running decode on its way to another instance; until it has landed, it decodes where it was."""

    given_up: bool = False  # its target is told to free it, or is gone
    committed: bool | None = None  # as its source said once it sent no more: whether the target may have begun


@dataclass(slots=True, eq=False)
class PartMove(Relocation):
    """A range of a context that decodes, on its way to the instance that holds it next."""

    number: int  # the range's, from the first on
    member: PartMember  # who holds it then
    has_landed: bool = False  # and the instance where it decodes is told

    @property
    def computes(self) -> bool:
        """Whether the target computes a range that was lost; the source, where it decodes, has only its tokens."""
        return self.transfer.plan.purpose is TransferPurpose.LOST_PART
