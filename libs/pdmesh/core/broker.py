"""The transfer broker: which KV transfers may run, receiver by receiver.

A transfer is granted by handshake: its sender has offered it and its receiver has confirmed the reservation, so that no
piece arrives before the receiver knows of it. A receiver has few transfer backends. When they are scarce, requests are
served in the order of their *first* offer, and keep their backend until all of their KV has moved, so that later chunks
cannot starve (Tetris §4.2).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from pdmesh.core.state import RequestKey
from pdmesh.model import InstanceId


@dataclass(slots=True)
class _Receiver:
    num_backends: int
    granted: dict[RequestKey, None] = field(default_factory=dict[RequestKey, None])
    offered: dict[RequestKey, None] = field(default_factory=dict[RequestKey, None])  # in order of first offer
    reserved: set[RequestKey] = field(default_factory=set[RequestKey])  # confirmed by the receiver, not yet granted

    def next_grantable(self) -> RequestKey | None:
        """The earliest offer that the receiver is ready for, if a backend is free."""
        if len(self.granted) == self.num_backends:
            return None
        return next((key for key in self.offered if key in self.reserved), None)


class TransferBroker:
    """Each call returns the requests it grants, in order."""

    def __init__(self) -> None:
        self._receivers: dict[InstanceId, _Receiver] = {}

    def open(self, receiver_id: InstanceId, num_backends: int) -> None:
        """A receiver joined, with nothing on its way to it."""
        self._receivers[receiver_id] = _Receiver(num_backends)

    def close(self, receiver_id: InstanceId) -> None:
        self._receivers.pop(receiver_id, None)

    def offer(self, receiver_id: InstanceId, key: RequestKey) -> list[RequestKey]:
        """A sender has something for the receiver. A repeated offer changes nothing."""
        receiver = self._receivers.get(receiver_id)
        if receiver is None or key in receiver.granted:
            return []
        receiver.offered.setdefault(key)
        return self._grant(receiver)

    def reserve(self, receiver_id: InstanceId, key: RequestKey) -> list[RequestKey]:
        """The receiver is ready for a transfer. A repeated confirmation changes nothing."""
        receiver = self._receivers.get(receiver_id)
        if receiver is None or key in receiver.granted:
            return []
        receiver.reserved.add(key)
        return self._grant(receiver)

    def withdraw(self, receiver_id: InstanceId, key: RequestKey) -> None:
        """A transfer not yet granted is not wanted any more; a granted one keeps its backend until `release`."""
        receiver = self._receivers.get(receiver_id)
        if receiver is not None:
            receiver.offered.pop(key, None)
            receiver.reserved.discard(key)

    def release(self, receiver_id: InstanceId, key: RequestKey) -> list[RequestKey]:
        """The transfer landed, or the receiver freed what it had of it: the next one gets the backend."""
        receiver = self._receivers.get(receiver_id)
        if receiver is None or key not in receiver.granted:
            return []
        del receiver.granted[key]
        return self._grant(receiver)

    def _grant(self, receiver: _Receiver) -> list[RequestKey]:
        keys: list[RequestKey] = []
        while (key := receiver.next_grantable()) is not None:
            del receiver.offered[key]
            receiver.reserved.discard(key)
            receiver.granted[key] = None
            keys.append(key)
        return keys

    def granted(self, receiver_id: InstanceId) -> tuple[RequestKey, ...]:
        receiver = self._receivers.get(receiver_id)
        return () if receiver is None else tuple(receiver.granted)

    def check_integrity(self) -> None:
        for receiver_id, receiver in self._receivers.items():
            assert len(receiver.granted) <= receiver.num_backends, (
                f"{receiver_id}: {len(receiver.granted)} transfers on {receiver.num_backends} backends"
            )
            assert receiver.next_grantable() is None, (
                f"{receiver_id}: a backend is free while {len(receiver.offered)} transfers wait"
            )
