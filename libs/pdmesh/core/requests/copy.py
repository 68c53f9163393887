"""A copy of KV as the core knows it: one object from its first command to its last acknowledgement.

A copy is granted by handshake: a source has offered it and every destination has confirmed its reservation, so that no
piece arrives before its receiver knows of it. It needs a backend of each destination (`pdmesh.core.requests.broker`),
and has them until its KV has landed there, or until all sources of a preempted request have stopped when they were
asked to.

`pdmesh.core.copies` decides why KV is copied. A copy keeps facts, and `Copy.state` follows from them.
"""

from __future__ import annotations

from enum import Enum, auto

from pdmesh.model import InstanceId, PartMember, PrefixHashes, RequestKey
from pdmesh.plans import TransferPlan


class CopyState(Enum):
    EXPECTED = auto()  # not offered yet, or a destination has not confirmed its room
    WAITING = auto()  # for a backend of each destination
    GRANTED = auto()  # it has them: its KV may move
    RETURNING = auto()  # its sources are asked to stop, and have not all said that they have
    PAUSED = auto()  # they have; it is offered again with the request's next chunk
    LANDED = auto()  # its KV is where it was to go
    WITHDRAWN = auto()  # its request ended; what it has of backends comes back as destinations free their room


class Copy:
    """Copy of KV. The methods are transitions; each may come late, or twice, from outside."""

    def __init__(self, key: RequestKey, plan: TransferPlan, rank: int | None = None, chain: PrefixHashes = ()) -> None:
        """``rank`` is that of its request's first offer, if that was offered to an earlier receiver.

        ``chain`` are the granules that a fetch brings, and those before them.
        """
        self.key = key
        self.plan = plan
        self.chain = chain
        self.source_ids = plan.source_ids
        self.destination_ids = plan.destination_ids
        self.source_id: InstanceId = plan.sources[0].instance_id
        self.target_id: InstanceId = plan.destinations[0].instance_id
        self.is_hand_over = plan.is_hand_over  # a request waits for it to decode; others it finds where they were
        self.rank = rank  # by first offer, among all requests
        self.in_line = rank is not None  # offered, and not granted since
        self.withdrawn = False
        self.given_up = False  # the target of a move is told to free it, or is gone
        self.committed: bool | None = None  # whether that target may have begun, as the source said when it stopped
        self.backends: dict[InstanceId, None] = {}  # of these destinations
        self._unreserved = set(self.destination_ids)
        self._unstopped: set[InstanceId] = set()  # sources that were asked to stop
        self._unlanded = set(self.destination_ids)
        self._sent: set[InstanceId] = set()  # sources whose KV was acknowledged

    @property
    def state(self) -> CopyState:
        if self.withdrawn:
            return CopyState.WITHDRAWN
        if not self._unlanded:
            return CopyState.LANDED
        if self._unstopped:
            return CopyState.RETURNING
        if self.backends:
            return CopyState.GRANTED
        if self.rank is None or self._unreserved:
            return CopyState.EXPECTED
        return CopyState.WAITING if self.in_line else CopyState.PAUSED

    @property
    def is_waiting(self) -> bool:
        """Whether only backends are missing."""
        return self.in_line and not self._unreserved and not self.backends

    @property
    def is_returning(self) -> bool:
        """Whether its backends are on their way back, also if nobody wants it any more."""
        return bool(self._unstopped)

    @property
    def has_landed(self) -> bool:
        """Whether all of its KV is at every destination."""
        return not self._unlanded

    @property
    def is_over(self) -> bool:
        """Whether it landed, or is not wanted any more."""
        return self.withdrawn or not self._unlanded

    @property
    def range_number(self) -> int:
        """The range's place in its context, from the first on, of a copy of one."""
        blocks = self.plan.destinations[0].part.blocks
        return blocks.start // blocks.size

    @property
    def members(self) -> tuple[PartMember, ...]:
        """The holders of the ranges that it brings, in their order."""
        ids = self.destination_ids if self.plan.is_of_part else self.destination_ids[1:]
        return tuple([PartMember(instance_id=each, capability=self.plan.capability) for each in ids])

    @property
    def num_landed_parts(self) -> int:
        """Return how many of a context's first ranges are where they go, with all before them."""
        part_ids = self.destination_ids[1:]
        return next((index for index, name in enumerate(part_ids) if name in self._unlanded), len(part_ids))

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
        assert self.state is CopyState.GRANTED, f"{self.key} is asked to stop, and is {self.state.name}"
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
