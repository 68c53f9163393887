"""The peers that the scheduler has named: nobody else is read, answered or connected to."""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple

from pdmesh.transport.address import WorkerAddress, peer_id, unpack_address

MAX_PEERS = 1024


class Peer(NamedTuple):
    """An instance that the scheduler has named: the id of its messages, its data address, and what that says."""

    id: bytes
    address: bytes
    facts: WorkerAddress


class KnownPeers:
    """Peers by address and by id; of more than `MAX_PEERS`, those that were named last."""

    def __init__(self) -> None:
        self._by_id: OrderedDict[bytes, Peer] = OrderedDict()

    def admit(self, address: bytes) -> Peer:
        """A peer by its data address. Raises KvTransferError if that is not one."""
        name = peer_id(address)
        peer = self._by_id.get(name)
        if peer is None:
            peer = self._by_id[name] = Peer(name, address, unpack_address(address))
            if len(self._by_id) > MAX_PEERS:
                self._by_id.popitem(last=False)
        else:
            self._by_id.move_to_end(name)
        return peer

    def get(self, name: bytes) -> Peer | None:
        """A peer by its id, if it was named."""
        return self._by_id.get(name)

    def forget(self, address: bytes) -> None:
        self._by_id.pop(peer_id(address), None)
