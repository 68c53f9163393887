"""The transfer broker: it holds the copies of KV, and says which of them may run.

A receiver has few transfer backends, and a copy needs one of each of its destinations, all at once. When they are
scarce, transfers are served in the order of their *first* offer, and keep their backends until all of their KV has
moved, so that later chunks cannot starve (Tetris §4.2). The order is the same at every receiver, so transfers with
several destinations never wait for each other in a circle.

While its request is being computed, a backend moves little. So with ``computed_first`` those of whom all is computed
go before those that are being computed, each in the order of first offers. Nobody starves: a prompt is computed after a
while, and then only those that were offered before it still go before it.

A preempted request moves nothing for as long as it is not computed. So it does not stand in the way of others: it is
passed over while they wait, and backends that it has are taken back by handshake too (its sources finish the pieces
under way and say so). With its next chunk it is offered again, at the rank of its first offer.
"""

from __future__ import annotations

import random
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, field
from operator import attrgetter

from pdmesh.core.requests.copy import Copy, CopyState
from pdmesh.model import InstanceId, PrefixHashes, RequestKey, Then, TransferId
from pdmesh.plans import KvShard, TransferPlan

_RANK = attrgetter("rank")

#: Of a receiver's backends, that running decodes which move there may have, and fetches: a prompt that is handed over
#: waits for its own, and these are no hurry.
MAX_OTHER_BACKENDS = 2


#: Turns of those that wait, from the earliest.
_COMPUTED, _COMPUTING, _LAST = 0, 1, 2


@dataclass(slots=True)
class _Receiver:
    num_backends: int
    line: list[Copy] = field(default_factory=list[Copy])  # only a backend is missing, by rank
    granted: dict[TransferId, Copy] = field(default_factory=dict[TransferId, Copy])  # with a backend of it

    @property
    def is_full(self) -> bool:
        return len(self.granted) == self.num_backends

    def may_begin(self, copy: Copy) -> bool:
        """Whether its kind may have one more of the backends."""
        return copy.is_hand_over or self.num_others < self.most_others

    @property
    def num_others(self) -> int:
        """Return how many backends moves and fetches have."""
        return sum(not granted.is_hand_over for granted in self.granted.values())

    @property
    def most_others(self) -> int:
        return max(1, min(MAX_OTHER_BACKENDS, self.num_backends - 1))

    @property
    def num_returning(self) -> int:
        return sum(copy.is_returning for copy in self.granted.values())


class TransferBroker:
    """Calls that return transfers have granted them, in order.

    ``is_interrupted`` says that a request moves nothing at present, ``is_computed`` that it has all of its KV to move.
    """

    def __init__(
        self,
        is_interrupted: Callable[[RequestKey], bool],
        is_computed: Callable[[RequestKey], bool],
        rng: random.Random,
    ) -> None:
        self.computed_first = False  # of those that wait, whose whole KV is computed
        self._is_interrupted = is_interrupted
        self._is_computed = is_computed
        self._rng = rng
        self._copies: dict[TransferId, Copy] = {}
        self._num_opened = 0
        self._num_ranked = 0
        self._receivers: dict[InstanceId, _Receiver] = {}
        self._changed: dict[InstanceId, None] = {}  # receivers where someone may have to give a backend back
        self._shared: dict[InstanceId, None] = {}  # receivers where a copy to several waits, or did a moment ago

    # --- receivers come and go ---

    def join(self, receiver_id: InstanceId, num_backends: int) -> None:
        """A receiver joined, perhaps again, with nothing on its way to it."""
        self.leave(receiver_id)
        self._receivers[receiver_id] = _Receiver(num_backends)

    def leave(self, receiver_id: InstanceId) -> None:
        """A receiver is gone, and with it what was on its way there."""
        self._receivers.pop(receiver_id, None)
        for copy in [t for t in self._copies.values() if receiver_id in t.destination_ids]:
            copy.give_back(receiver_id)
            self.withdraw(copy)

    # --- transfers ---

    def open(
        self,
        key: RequestKey,
        sources: tuple[KvShard, ...],
        destinations: tuple[KvShard, ...],
        *,
        then: Then = Then.DECODE,
        decoding: bool = False,
        computes: bool = False,
        rank: int | None = None,
        num_reused_granules: int = 0,
        chain: PrefixHashes = (),
    ) -> Copy:
        """A new copy, with a name and a capability of its own; ``rank`` if its request was offered before."""
        self._num_opened += 1
        plan = TransferPlan(
            transfer_id=TransferId(self._num_opened),
            sources=sources,
            destinations=destinations,
            capability=self.new_capability(),
            num_reused_granules=num_reused_granules,
            then=then,
            decoding=decoding,
            computes=computes,
        )
        copy = self._copies[plan.transfer_id] = Copy(key, plan, rank, chain)
        return copy

    def new_capability(self) -> int:
        """64 random bits, for the KV of one request."""
        return self._rng.getrandbits(64)

    def find(self, transfer_id: TransferId, key: RequestKey) -> Copy | None:
        """The copy of this request by this name, if it is not over."""
        copy = self._copies.get(transfer_id)
        return copy if copy is not None and copy.key == key and not copy.is_over else None

    def offer(self, copy: Copy) -> list[Copy]:
        """A source has something to send. A repeated offer changes nothing."""
        if copy.state is CopyState.GRANTED:
            return []
        copy.offer(self.new_rank() if copy.rank is None else copy.rank)
        return self._line_up(copy)

    def new_rank(self) -> int:
        """Return a rank behind every earlier offer."""
        self._num_ranked += 1
        return self._num_ranked

    def offer_again(self, copy: Copy) -> list[Copy]:
        """Offer the copy of a preempted request that continues. Nothing if it has not been offered yet."""
        return [] if copy.rank is None else self.offer(copy)

    def reserve(self, copy: Copy, destination_id: InstanceId) -> list[Copy]:
        """A destination is ready for it. A repeated confirmation changes nothing."""
        copy.reserve(destination_id)
        return self._line_up(copy)

    def land(self, copy: Copy, destination_id: InstanceId) -> list[Copy]:
        """All that goes to this destination is there."""
        copy.land(destination_id)
        return self.release(copy, destination_id)

    def release(self, copy: Copy, destination_id: InstanceId) -> list[Copy]:
        """Release a destination's backend after landing or freeing; return transfers granted in its place."""
        self._leave_line(copy)
        had_backend = copy.give_back(destination_id)
        self._forget_if_done(copy)
        receiver = self._receivers.get(destination_id)
        if receiver is None or not had_backend:
            return []
        del receiver.granted[copy.plan.transfer_id]
        return self._grant(destination_id)

    def release_of(self, key: RequestKey, destination_id: InstanceId) -> list[Copy]:
        """The same for all of a request's, whose KV this destination has freed."""
        receiver = self._receivers.get(destination_id)
        if receiver is None:
            return []
        found = [copy for copy in receiver.granted.values() if copy.key == key]
        return [granted for copy in found for granted in self.release(copy, destination_id)]

    def withdraw(self, copy: Copy) -> None:
        """Withdraw a copy. A granted one keeps its backends until `release`."""
        self._leave_line(copy)
        copy.withdraw()
        self._forget_if_done(copy)

    def takes_move(self, receiver_id: InstanceId) -> bool:
        """Whether one more running decode could move there now, without waiting for a backend."""
        receiver = self._receivers.get(receiver_id)
        return receiver is not None and not receiver.is_full and receiver.num_others < receiver.most_others

    def granted(self, receiver_id: InstanceId) -> tuple[RequestKey, ...]:
        """The requests that have a backend of this receiver."""
        receiver = self._receivers.get(receiver_id)
        return () if receiver is None else tuple(copy.key for copy in receiver.granted.values())

    def unblock(self) -> list[Copy]:
        """Grant what waits behind transfers to several receivers, which may have gone, or come later in turn now."""
        granted: list[Copy] = []
        while self._shared:
            shared, self._shared = self._shared, {}
            known = [receiver_id for receiver_id in shared if receiver_id in self._receivers]
            more = [copy for receiver_id in known for copy in self._grant(receiver_id)]
            if not more:
                break
            granted += more
        return granted

    # --- preempted requests ---

    def interrupted(self, copy: Copy) -> None:
        """Its request was preempted."""
        self._changed.update(dict.fromkeys(copy.destination_ids))

    def take_back(self) -> list[Copy]:
        """Return transfers of preempted requests that must give backends up; each is named once, the last first."""
        asked: list[Copy] = []
        for receiver_id in self._changed:
            receiver = self._receivers.get(receiver_id)
            if receiver is not None:
                asked += self._take_back(receiver)
        self._changed.clear()
        return asked

    def _take_back(self, receiver: _Receiver) -> list[Copy]:
        idle = self._idle(receiver) if receiver.line else []
        num_wanted = self._num_wanted(receiver) if idle else 0
        if num_wanted <= 0:
            return []
        asked = sorted(idle, key=_RANK, reverse=True)[:num_wanted]
        for copy in asked:
            copy.ask_back()
        return asked

    def _num_wanted(self, receiver: _Receiver) -> int:
        """Backends that requests wait for which are being computed, beyond those that are on their way back."""
        wanted = (t for t in receiver.line if not self._is_interrupted(t.key) and receiver.may_begin(t))
        return sum(1 for _ in wanted) - receiver.num_returning

    def _idle(self, receiver: _Receiver) -> list[Copy]:
        """Return granted transfers of preempted requests that are still wanted."""
        granted = (t for t in receiver.granted.values() if t.state is CopyState.GRANTED)
        return [copy for copy in granted if self._is_interrupted(copy.key)]

    def stopped(self, copy: Copy, source_id: InstanceId) -> list[Copy] | None:
        """A source has stopped, as it was asked to. None if it was not asked."""
        all_stopped = copy.stop(source_id)
        if not all_stopped:
            return None if all_stopped is None else []
        for destination_id in copy.destination_ids:
            del self._receivers[destination_id].granted[copy.plan.transfer_id]
        if copy.is_waiting:  # offered again meanwhile
            self._join_line(copy)
        return [granted for receiver_id in copy.destination_ids for granted in self._grant(receiver_id)]

    # --- inside ---

    def _line_up(self, copy: Copy) -> list[Copy]:
        """Put a copy in line if only backends are missing, and grant copies of its first receiver."""
        if copy.is_waiting:
            self._join_line(copy)
        return self._grant(copy.plan.destinations[0].instance_id)

    def _join_line(self, copy: Copy) -> None:
        for destination_id in copy.destination_ids:
            line = self._receivers[destination_id].line
            index = bisect_left(line, copy.rank, key=_RANK)
            if index == len(line) or line[index] is not copy:
                line.insert(index, copy)
        if len(copy.plan.destinations) > 1:
            self._changed.update(dict.fromkeys(copy.destination_ids))
            self._shared.update(dict.fromkeys(copy.destination_ids))

    def _leave_line(self, copy: Copy) -> None:
        if len(copy.destination_ids) > 1:
            self._shared.update(dict.fromkeys(copy.destination_ids))
        for destination_id in copy.destination_ids:
            receiver = self._receivers.get(destination_id)
            if receiver is not None and copy in receiver.line:
                receiver.line.remove(copy)

    def _forget_if_done(self, copy: Copy) -> None:
        if copy.is_over and not copy.backends:
            self._copies.pop(copy.plan.transfer_id, None)

    def _grant(self, receiver_id: InstanceId) -> list[Copy]:
        receiver = self._receivers[receiver_id]
        granted: list[Copy] = []
        while (copy := self._next_grantable(receiver)) is not None:
            self._leave_line(copy)
            copy.grant()
            for destination_id in copy.destination_ids:
                self._receivers[destination_id].granted[copy.plan.transfer_id] = copy
            granted.append(copy)
        if receiver.line:
            self._changed[receiver_id] = None
            if any(len(copy.destination_ids) > 1 for copy in receiver.line):
                self._shared[receiver_id] = None
        return granted

    def _next_grantable(self, receiver: _Receiver) -> Copy | None:
        """The first by its turn, if it is the first at all of its destinations, and these have backends.

        So one to several receivers never starves behind others that need only some of these.
        """
        first = self._first(receiver)
        if first is None or len(first.destination_ids) == 1:
            return first
        others = [self._receivers[destination_id] for destination_id in first.destination_ids]
        return first if all(self._first(other) is first for other in others) else None

    def _first(self, receiver: _Receiver) -> Copy | None:
        """The first by its turn, if there is a backend.

        Moves and fetches are passed over while as many are under way as may be.
        """
        if receiver.is_full or not receiver.line:
            return None
        first, least = None, _LAST + 1
        earliest = _COMPUTED if self.computed_first else _COMPUTING
        for copy in receiver.line:
            if (turn := self._turn(copy)) < least and receiver.may_begin(copy):
                first, least = copy, turn
                if turn == earliest:
                    break  # of equal ones the first offer counts
        return first

    def _turn(self, copy: Copy) -> int:
        """Smaller is earlier, a preempted request the last; of equal ones the first offer counts."""
        if self.computed_first and self._is_computed(copy.key):
            return _COMPUTED
        return _LAST if self._is_interrupted(copy.key) else _COMPUTING

    def check_integrity(self) -> None:
        """AssertionError names what does not balance."""
        for receiver_id, receiver in self._receivers.items():
            self._check_receiver(receiver_id, receiver)
        for copy in self._copies.values():
            held = {name for name, other in self._receivers.items() if copy.plan.transfer_id in other.granted}
            assert held == set(copy.backends), f"{copy.key} has backends of {held}, not {copy.backends}"
            waits = any(copy in receiver.line for receiver in self._receivers.values())
            assert waits == copy.is_waiting, f"{copy.key} is {copy.state.name}, in line: {waits}"

    def _check_receiver(self, receiver_id: InstanceId, receiver: _Receiver) -> None:
        num_granted = len(receiver.granted)
        assert num_granted <= receiver.num_backends, f"{receiver_id}: {num_granted} on {receiver.num_backends} backends"
        due = self._next_grantable(receiver)
        assert due is None, f"{receiver_id}: {due.key} waits for backends that are free"
        ranks = [copy.rank for copy in receiver.line]
        assert ranks == sorted(ranks, key=lambda rank: rank or 0), f"{receiver_id}: the line is out of order"
        num_wanted, num_idle = self._num_wanted(receiver), len(self._idle(receiver))
        assert num_wanted <= 0 or not num_idle, (
            f"{receiver_id}: {num_wanted} transfers wait while {num_idle} preempted requests have a backend"
        )
