"""The peers that the scheduler has named. No other process is read, answered or connected to."""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple

from pdmesh.transport.address import WorkerAddress, peer_id, unpack_address

MAX_PEERS = 1024


class Peer(NamedTuple):
    """An instance that the scheduler has named: the id in its messages, its data address, and the decoded address."""

    id: bytes
    address: bytes
    facts: WorkerAddress


class KnownPeers:
    """Peers by address and by id: at most `MAX_PEERS`, the most recently named."""

    def __init__(self) -> None:
        self._by_address: OrderedDict[bytes, Peer] = OrderedDict()
        self._by_id: dict[bytes, Peer] = {}

    def admit(self, address: bytes) -> Peer:
        """Add a peer by its data address and return it. Raises KvTransferError if ``address`` is no data address."""
        peer = self._by_address.get(address)
        if peer is None:
            peer = Peer(peer_id(address), address, unpack_address(address))
            self._by_address[address] = self._by_id[peer.id] = peer
            if len(self._by_address) > MAX_PEERS:
                self.forget(next(iter(self._by_address)))
        else:
            self._by_address.move_to_end(address)
        return peer

    def get(self, name: bytes) -> Peer | None:
        """Return a peer by its id; None if it was not named."""
        return self._by_id.get(name)

    def forget(self, address: bytes) -> None:
        peer = self._by_address.pop(address, None)
        if peer is not None:
            del self._by_id[peer.id]
