"""The transfer broker: which KV transfers may run, receiver by receiver.

A transfer is granted by handshake: its sender has offered it and its receiver has confirmed the reservation, so that no
piece arrives before the receiver knows of it. A receiver has few transfer backends. When they are scarce, requests are
served in the order of their *first* offer, and keep their backend until all of their KV has moved, so that later chunks
cannot starve (Tetris §4.2).

A preempted request moves nothing for as long as it is not computed. So it does not stand in the way of others: it is
passed over while they wait, and a backend that it has is taken back by handshake too (its sender finishes the pieces
under way and says so). With its next chunk it is offered again, at the rank of its first offer.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from pdmesh.core.state import RequestKey
from pdmesh.model import InstanceId


@dataclass(slots=True)
class _Receiver:
    num_backends: int
    ranks: dict[RequestKey, int] = field(default_factory=dict[RequestKey, int])  # by first offer, of all that live
    num_ranked: int = 0
    offered: list[tuple[int, RequestKey]] = field(default_factory=list[tuple[int, RequestKey]])  # by rank
    reserved: set[RequestKey] = field(default_factory=set[RequestKey])  # confirmed by the receiver
    granted: dict[RequestKey, None] = field(default_factory=dict[RequestKey, None])
    returning: set[RequestKey] = field(default_factory=set[RequestKey])  # of the granted: asked for their backend

    @property
    def waiting(self) -> Iterator[RequestKey]:
        """Offers that only a backend is missing for, in order."""
        return (key for _, key in self.offered if key in self.reserved and key not in self.granted)

    def offer(self, key: RequestKey) -> None:
        if key not in self.ranks:
            self.ranks[key] = self.num_ranked
            self.num_ranked += 1
        entry = (self.ranks[key], key)
        index = bisect_left(self.offered, entry)
        if index == len(self.offered) or self.offered[index] != entry:
            self.offered.insert(index, entry)

    def withdraw(self, key: RequestKey) -> None:
        rank = self.ranks.get(key)
        if rank is not None and (rank, key) in self.offered:
            self.offered.remove((rank, key))

    def forget(self, key: RequestKey) -> None:
        self.withdraw(key)
        self.reserved.discard(key)
        self.ranks.pop(key, None)


class TransferBroker:
    """Each call that returns requests grants them, in order. ``is_preempted`` tells who moves nothing at present."""

    def __init__(self, is_preempted: Callable[[RequestKey], bool]) -> None:
        self._is_preempted = is_preempted
        self._receivers: dict[InstanceId, _Receiver] = {}
        self._changed: dict[InstanceId, None] = {}  # receivers where someone may have to give a backend back

    def open(self, receiver_id: InstanceId, num_backends: int) -> None:
        """A receiver joined, with nothing on its way to it."""
        self._receivers[receiver_id] = _Receiver(num_backends)

    def close(self, receiver_id: InstanceId) -> None:
        self._receivers.pop(receiver_id, None)

    def offer(self, receiver_id: InstanceId, key: RequestKey) -> list[RequestKey]:
        """A sender has something for the receiver. A repeated offer changes nothing."""
        receiver = self._receivers.get(receiver_id)
        if receiver is None or (key in receiver.granted and key not in receiver.returning):
            return []
        receiver.offer(key)
        return self._grant(receiver_id, receiver)

    def offer_again(self, receiver_id: InstanceId, key: RequestKey) -> list[RequestKey]:
        """A preempted request goes on. Nothing if its sender has not offered it yet."""
        receiver = self._receivers.get(receiver_id)
        return self.offer(receiver_id, key) if receiver is not None and key in receiver.ranks else []

    def reserve(self, receiver_id: InstanceId, key: RequestKey) -> list[RequestKey]:
        """The receiver is ready for a transfer. A repeated confirmation changes nothing."""
        receiver = self._receivers.get(receiver_id)
        if receiver is None:
            return []
        receiver.reserved.add(key)
        return self._grant(receiver_id, receiver)

    def withdraw(self, receiver_id: InstanceId, key: RequestKey) -> None:
        """A transfer is not wanted any more. One that was granted keeps its backend until `release`."""
        receiver = self._receivers.get(receiver_id)
        if receiver is not None:
            receiver.forget(key)

    def release(self, receiver_id: InstanceId, key: RequestKey) -> list[RequestKey]:
        """The transfer landed, or the receiver freed what it had of it: the next one gets the backend."""
        receiver = self._receivers.get(receiver_id)
        if receiver is None:
            return []
        receiver.forget(key)
        receiver.returning.discard(key)
        if key not in receiver.granted:
            return []
        del receiver.granted[key]
        return self._grant(receiver_id, receiver)

    def granted(self, receiver_id: InstanceId) -> tuple[RequestKey, ...]:
        receiver = self._receivers.get(receiver_id)
        return () if receiver is None else tuple(receiver.granted)

    # --- preempted requests ---

    def preempted(self, receiver_id: InstanceId) -> None:
        """A request whose KV goes there was preempted."""
        self._changed[receiver_id] = None

    def take_back(self) -> list[RequestKey]:
        """Preempted requests that must give their backend to one that waits: each is named once, the last first."""
        keys: list[RequestKey] = []
        for receiver_id in self._changed:
            receiver = self._receivers.get(receiver_id)
            if receiver is not None:
                keys += self._take_back(receiver)
        self._changed.clear()
        return keys

    def _take_back(self, receiver: _Receiver) -> list[RequestKey]:
        idle = self._idle(receiver)
        num_wanted = self._num_wanted(receiver) if idle else 0
        if num_wanted <= 0:
            return []
        keys = sorted(idle, key=receiver.ranks.__getitem__, reverse=True)[:num_wanted]
        receiver.returning.update(keys)
        return keys

    def _num_wanted(self, receiver: _Receiver) -> int:
        """Backends that requests wait for which are being computed, beyond those that are on their way back."""
        return sum(not self._is_preempted(key) for key in receiver.waiting) - len(receiver.returning)

    def _idle(self, receiver: _Receiver) -> list[RequestKey]:
        return [key for key in receiver.granted if key not in receiver.returning and self._is_preempted(key)]

    def returned(self, receiver_id: InstanceId, key: RequestKey) -> list[RequestKey] | None:
        """The sender has stopped, as it was asked to. None if it was not asked."""
        receiver = self._receivers.get(receiver_id)
        if receiver is None or key not in receiver.returning:
            return None
        receiver.returning.remove(key)
        del receiver.granted[key]
        return self._grant(receiver_id, receiver)

    def check_integrity(self) -> None:
        for receiver_id, receiver in self._receivers.items():
            num_granted, num_waiting = len(receiver.granted), len(list(receiver.waiting))
            assert num_granted <= receiver.num_backends, (
                f"{receiver_id}: {num_granted} transfers on {receiver.num_backends} backends"
            )
            assert num_granted == receiver.num_backends or not num_waiting, (
                f"{receiver_id}: a backend is free while {num_waiting} transfers wait"
            )
            assert receiver.returning <= receiver.granted.keys(), f"{receiver_id}: a backend comes back from nobody"
            assert receiver.offered == sorted(receiver.offered), f"{receiver_id}: offers are out of order"
            assert all(receiver.ranks[key] == rank for rank, key in receiver.offered), f"{receiver_id}: wrong ranks"
            num_wanted, num_idle = self._num_wanted(receiver), len(self._idle(receiver))
            assert num_wanted <= 0 or not num_idle, (
                f"{receiver_id}: {num_wanted} transfers wait while {num_idle} preempted requests have a backend"
            )

    # --- inside ---

    def _grant(self, receiver_id: InstanceId, receiver: _Receiver) -> list[RequestKey]:
        keys: list[RequestKey] = []
        while (key := self._next_grantable(receiver)) is not None:
            receiver.withdraw(key)
            receiver.granted[key] = None
            keys.append(key)
        if receiver.offered:
            self._changed[receiver_id] = None
        return keys

    def _next_grantable(self, receiver: _Receiver) -> RequestKey | None:
        """If a backend is free: the earliest offer, of a preempted request only if there is no other."""
        if len(receiver.granted) == receiver.num_backends:
            return None
        first: RequestKey | None = None
        for key in receiver.waiting:
            if not self._is_preempted(key):
                return key
            first = first or key
        return first
