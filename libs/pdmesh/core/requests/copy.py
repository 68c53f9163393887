"""Copy of KV in the core: one object from its first command to its last acknowledgement.

A handshake comes before the grant: a source has offered the copy, and every destination has confirmed its reservation.
Therefore no piece arrives before its receiver knows the copy. A copy needs one backend of each destination
(`pdmesh.core.requests.broker`). A copy keeps a backend until its KV has landed there. The copy of a preempted request
keeps its backends until all sources have stopped on request.

`pdmesh.core.copies` decides why KV is copied. A copy stores facts, and `Copy.state` is derived from them.
"""

from __future__ import annotations

from enum import Enum, auto

from pdmesh.model import InstanceId, PartMember, PrefixHashes, RequestKey
from pdmesh.plans import TransferPlan


class CopyState(Enum):
    """State of a copy.

    - ``EXPECTED``: not offered yet, or a destination has not confirmed its room.
    - ``WAITING``: lacks only a backend of each destination.
    - ``GRANTED``: has a backend of each destination, so its KV may move.
    - ``RETURNING``: the sources were asked to stop, and some have not confirmed.
    - ``PAUSED``: all sources have stopped; offered again with the request's next chunk.
    - ``LANDED``: all KV has reached its destinations.
    - ``WITHDRAWN``: no longer wanted; the backends return as the destinations free their room.
    """

    EXPECTED = auto()
    WAITING = auto()
    GRANTED = auto()
    RETURNING = auto()
    PAUSED = auto()
    LANDED = auto()
    WITHDRAWN = auto()


class Copy:
    """Copy of KV. The methods are transitions; outside reports may make each come late or twice."""

    def __init__(self, key: RequestKey, plan: TransferPlan, rank: int | None = None, chain: PrefixHashes = ()) -> None:
        """``rank`` is the rank of the request's first offer, if its KV was offered to an earlier receiver.

        ``chain`` are the granules that a fetch brings, preceded by the granules before them.
        """
        self.key = key
        self.plan = plan
        self.chain = chain
        self.source_ids = plan.source_ids
        self.destination_ids = plan.destination_ids
        self.source_id: InstanceId = plan.sources[0].instance_id
        self.target_id: InstanceId = plan.destinations[0].instance_id
        #: Whether a request waits for this copy to decode. Other copies leave their request where it was.
        self.is_hand_over = plan.is_hand_over
        #: Rank of the first offer among all requests.
        self.rank = rank
        #: Whether it was offered and not granted since.
        self.in_line = rank is not None
        self.withdrawn = False
        #: Whether the target of a move was told to free it, or is gone.
        self.given_up = False
        #: Whether the target of a stopped move may have begun, as its source reported.
        self.committed: bool | None = None
        #: Destinations whose backends the copy has.
        self.backends: dict[InstanceId, None] = {}
        self._unreserved = set(self.destination_ids)
        # Sources that were asked to stop and have not confirmed.
        self._unstopped: set[InstanceId] = set()
        self._unlanded = set(self.destination_ids)
        # Sources whose KV was acknowledged.
        self._sent: set[InstanceId] = set()

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
        """Whether a source that was asked to stop has not confirmed, also after the copy was withdrawn."""
        return bool(self._unstopped)

    @property
    def has_landed(self) -> bool:
        """Whether all of its KV is at every destination."""
        return not self._unlanded

    @property
    def is_over(self) -> bool:
        """Whether it landed or was withdrawn."""
        return self.withdrawn or not self._unlanded

    @property
    def range_number(self) -> int:
        """Number of the copied range within its context, from 0."""
        blocks = self.plan.destinations[0].part.blocks
        return blocks.start // blocks.size

    @property
    def members(self) -> tuple[PartMember, ...]:
        """Holders of the ranges that the copy brings, in their order."""
        ids = self.destination_ids if self.plan.is_of_range else self.destination_ids[1:]
        return tuple([PartMember(instance_id=each, capability=self.plan.capability) for each in ids])

    @property
    def num_landed_parts(self) -> int:
        """Number of the context's first ranges that landed without a gap."""
        part_ids = self.destination_ids[1:]
        return next((index for index, name in enumerate(part_ids) if name in self._unlanded), len(part_ids))

    def was_sent_by(self, source_id: InstanceId) -> bool:
        """Whether all KV of this source was acknowledged: the source frees its KV by itself."""
        return source_id in self._sent

    # --- transitions ---

    def offer(self, rank: int) -> None:
        """Put the copy in line: a source has KV to send. The ``rank`` of the first offer stays."""
        self.rank = rank if self.rank is None else self.rank
        self.in_line = True

    def reserve(self, destination_id: InstanceId) -> None:
        self._unreserved.discard(destination_id)

    def grant(self) -> None:
        assert self.is_waiting, f"{self.key} is granted, and is {self.state.name}"
        self.in_line = False
        self.backends = dict.fromkeys(self.destination_ids)

    def ask_back(self) -> None:
        """Note that the sources of this granted copy are told to stop. The copy is returning until all have stopped."""
        assert self.state is CopyState.GRANTED, f"{self.key} is asked to stop, and is {self.state.name}"
        self._unstopped = set(self.source_ids)

    def stop(self, source_id: InstanceId) -> bool | None:
        """Note that a source has stopped. Return whether all have; None if no stop was expected from this source.

        After the last one the backends are free.
        """
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
        """Note that this destination holds all of its KV. Return whether every destination does."""
        self._unlanded.discard(destination_id)
        return not self._unlanded

    def give_back(self, destination_id: InstanceId) -> bool:
        """Free this destination's backend, and expect no source to stop any more. Return whether there was one."""
        self._unstopped.clear()
        if destination_id not in self.backends:
            return False
        del self.backends[destination_id]
        return True

    def withdraw(self) -> None:
        """Mark the copy as no longer wanted."""
        self.withdrawn = True
        self.in_line = False
