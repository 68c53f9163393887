"""Transfer broker: holds the copies of KV, and decides which of them may run.

A receiver has few transfer backends, and a copy needs one of each of its destinations at the same time. Scarce backends
are granted in the order of *first* offers. A transfer keeps its backends until all of its KV has moved, so that later
chunks cannot starve (Tetris §4.2). The order is the same at every receiver, so transfers with several destinations
never wait for each other in a circle.

A backend moves little while the request's prompt is still being computed. With ``computed_first``, copies of computed
prompts are therefore granted before the others, in the order of first offers within each class. No copy starves: its
prompt is computed after a while, and from then on only earlier offers precede it.

A preempted request moves nothing until it is computed again, and must not block other requests. The copy is passed over
while others wait. If the copy has backends, a handshake takes them back: the sources finish the pieces under way and
report that they stopped. With the request's next chunk the copy is offered again, at the rank of its first offer.
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

#: Largest number of a receiver's backends for moves and fetches. A handed-over prompt waits for its transfer, while
#: moves and fetches are not urgent.
MAX_OTHER_BACKENDS = 2


#: Classes of waiting copies, the earliest first.
_COMPUTED, _COMPUTING, _LAST = 0, 1, 2


@dataclass(slots=True)
class _Receiver:
    """Backends of one receiver.

    `line` has the copies that lack only a backend, by rank; `granted` the copies that have one of these backends.
    """

    num_backends: int
    line: list[Copy] = field(default_factory=list[Copy])
    granted: dict[TransferId, Copy] = field(default_factory=dict[TransferId, Copy])

    @property
    def is_full(self) -> bool:
        return len(self.granted) == self.num_backends

    def may_begin(self, copy: Copy) -> bool:
        """Whether a copy of this kind may take one more of the backends."""
        return copy.is_hand_over or self.num_others < self.most_others

    @property
    def num_others(self) -> int:
        """Number of backends that moves and fetches have."""
        return sum(not granted.is_hand_over for granted in self.granted.values())

    @property
    def most_others(self) -> int:
        return max(1, min(MAX_OTHER_BACKENDS, self.num_backends - 1))

    @property
    def num_returning(self) -> int:
        return sum(copy.is_returning for copy in self.granted.values())


class TransferBroker:
    """Grants of transfer backends. Methods that return copies have granted them, in order.

    ``is_interrupted`` tells whether a request moves nothing at present, ``is_computed`` whether all of its KV exists.
    """

    def __init__(
        self,
        is_interrupted: Callable[[RequestKey], bool],
        is_computed: Callable[[RequestKey], bool],
        rng: random.Random,
    ) -> None:
        #: Whether copies of computed prompts are granted first.
        self.computed_first = False
        self._is_interrupted = is_interrupted
        self._is_computed = is_computed
        self._rng = rng
        self._copies: dict[TransferId, Copy] = {}
        self._num_opened = 0
        self._num_ranked = 0
        self._receivers: dict[InstanceId, _Receiver] = {}
        # Receivers where a preempted request may have to return a backend.
        self._changed: dict[InstanceId, None] = {}
        # Receivers where a copy with several destinations waits, or did until recently.
        self._shared: dict[InstanceId, None] = {}

    # --- receivers ---

    def join(self, receiver_id: InstanceId, num_backends: int) -> None:
        """Add a receiver. If it was known, first withdraw everything on its way to it."""
        self.leave(receiver_id)
        self._receivers[receiver_id] = _Receiver(num_backends)

    def leave(self, receiver_id: InstanceId) -> None:
        """Remove a receiver and withdraw the copies on their way to it."""
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
        """Open a copy with a new id and capability; ``rank`` if the request's KV was offered before."""
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
        """Return 64 random bits that protect one request's KV."""
        return self._rng.getrandbits(64)

    def find(self, transfer_id: TransferId, key: RequestKey) -> Copy | None:
        """Return the request's copy with this id; None if it is unknown, landed or was withdrawn."""
        copy = self._copies.get(transfer_id)
        return copy if copy is not None and copy.key == key and not copy.is_over else None

    def offer(self, copy: Copy) -> list[Copy]:
        """Note that a source has KV to send; return the copies granted. A repeated offer changes nothing."""
        if copy.state is CopyState.GRANTED:
            return []
        copy.offer(self.new_rank() if copy.rank is None else copy.rank)
        return self._line_up(copy)

    def new_rank(self) -> int:
        """Return a rank behind every earlier offer."""
        self._num_ranked += 1
        return self._num_ranked

    def offer_again(self, copy: Copy) -> list[Copy]:
        """Offer the copy of a preempted request that continues. Does nothing before its first offer."""
        return [] if copy.rank is None else self.offer(copy)

    def reserve(self, copy: Copy, destination_id: InstanceId) -> list[Copy]:
        """Note that a destination reserved room; return the copies granted. A repeated report changes nothing."""
        copy.reserve(destination_id)
        return self._line_up(copy)

    def land(self, copy: Copy, destination_id: InstanceId) -> list[Copy]:
        """Note that a destination has all of its KV; return the copies granted in its place."""
        copy.land(destination_id)
        return self.release(copy, destination_id)

    def release(self, copy: Copy, destination_id: InstanceId) -> list[Copy]:
        """Release a destination's backend, if it has one, after landing or freeing.

        Return the copies granted in its place.
        """
        self._leave_line(copy)
        had_backend = copy.give_back(destination_id)
        self._forget_if_done(copy)
        receiver = self._receivers.get(destination_id)
        if receiver is None or not had_backend:
            return []
        del receiver.granted[copy.plan.transfer_id]
        return self._grant(destination_id)

    def release_of(self, key: RequestKey, destination_id: InstanceId) -> list[Copy]:
        """Release all backends of a request at a destination that freed its KV; return the copies granted."""
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
        """Whether another decoding request could move to the receiver now, without waiting for a backend."""
        receiver = self._receivers.get(receiver_id)
        return receiver is not None and not receiver.is_full and receiver.num_others < receiver.most_others

    def granted(self, receiver_id: InstanceId) -> tuple[RequestKey, ...]:
        """Return the requests that have a backend of this receiver."""
        receiver = self._receivers.get(receiver_id)
        return () if receiver is None else tuple(copy.key for copy in receiver.granted.values())

    def unblock(self) -> list[Copy]:
        """Grant copies behind ones with several destinations, which may have left the line or lost their turn."""
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
        """Have the next `take_back` look at the copy's destinations, because the copy's request was preempted."""
        self._changed.update(dict.fromkeys(copy.destination_ids))

    def take_back(self) -> list[Copy]:
        """Choose the preempted requests' copies whose backends others wait for, and mark them as returning.

        Each copy is returned once, at each receiver the latest offer first. The caller tells the sources to stop.
        """
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
        """Return how many running requests' copies wait for a backend, less the backends on their way back."""
        wanted = (t for t in receiver.line if not self._is_interrupted(t.key) and receiver.may_begin(t))
        return sum(1 for _ in wanted) - receiver.num_returning

    def _idle(self, receiver: _Receiver) -> list[Copy]:
        """Return the granted copies of preempted requests that are still wanted."""
        granted = (t for t in receiver.granted.values() if t.state is CopyState.GRANTED)
        return [copy for copy in granted if self._is_interrupted(copy.key)]

    def stopped(self, copy: Copy, source_id: InstanceId) -> list[Copy] | None:
        """Note that a source stopped as asked; return the copies granted. None if it was not asked."""
        all_stopped = copy.stop(source_id)
        if not all_stopped:
            return None if all_stopped is None else []
        for destination_id in copy.destination_ids:
            del self._receivers[destination_id].granted[copy.plan.transfer_id]
        if copy.is_waiting:
            self._join_line(copy)
        return [granted for receiver_id in copy.destination_ids for granted in self._grant(receiver_id)]

    # --- internals ---

    def _line_up(self, copy: Copy) -> list[Copy]:
        """Put a copy in line if only backends are missing.

        In either case grant the copies that may begin at its first receiver, and return them.
        """
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
        """Return the receiver's first copy if it is also first at all of its destinations, else None.

        A copy with several destinations therefore never starves behind copies that need only some of them.
        """
        first = self._first(receiver)
        if first is None or len(first.destination_ids) == 1:
            return first
        others = [self._receivers[destination_id] for destination_id in first.destination_ids]
        return first if all(self._first(other) is first for other in others) else None

    def _first(self, receiver: _Receiver) -> Copy | None:
        """Return the first copy by `_turn` that may take a backend; None if none is free.

        Moves and fetches are passed over at their limit (`MAX_OTHER_BACKENDS`).
        """
        if receiver.is_full or not receiver.line:
            return None
        first, least = None, _LAST + 1
        earliest = _COMPUTED if self.computed_first else _COMPUTING
        for copy in receiver.line:
            if (turn := self._turn(copy)) < least and receiver.may_begin(copy):
                first, least = copy, turn
                if turn == earliest:
                    break
        return first

    def _turn(self, copy: Copy) -> int:
        """Return the copy's class: smaller ones are granted first, and preempted requests' copies last."""
        if self.computed_first and self._is_computed(copy.key):
            return _COMPUTED
        return _LAST if self._is_interrupted(copy.key) else _COMPUTING

    def check_integrity(self) -> None:
        """Raise AssertionError if backends and lines are inconsistent."""
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
