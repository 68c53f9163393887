"""The peers that a transport knows, by address and by id."""

from __future__ import annotations

import pytest

from pdmesh.errors import KvTransferError
from pdmesh.transport.address import WorkerAddress, pack_address, peer_id
from pdmesh.transport.peers import MAX_PEERS, KnownPeers


def address(pid: int) -> bytes:
    return pack_address(WorkerAddress(b"the host", 4096, pid, b"its socket".ljust(16), 0, 4096, 1, b""))


def test_a_peer_is_found_by_its_address_and_by_its_id_until_it_is_forgotten() -> None:
    peers = KnownPeers()
    peer = peers.admit(address(7))
    assert peers.admit(address(7)) is peer
    assert peers.get(peer_id(address(7))) is peer
    assert peer.facts.pid == 7
    peers.forget(address(7))
    peers.forget(address(7))
    assert peers.get(peer.id) is None


def test_those_named_last_are_kept() -> None:
    peers = KnownPeers()
    for number in range(MAX_PEERS):
        peers.admit(address(number))
    first = peers.admit(address(0))  # once more
    peers.admit(address(MAX_PEERS))
    assert peers.get(first.id) is first
    assert peers.get(peer_id(address(1))) is None
    kept = [number for number in range(MAX_PEERS + 1) if peers.get(peer_id(address(number))) is not None]
    assert kept == [0, *range(2, MAX_PEERS + 1)]


def test_what_is_no_address_is_not_remembered() -> None:
    peers = KnownPeers()
    with pytest.raises(KvTransferError):
        peers.admit(b"garbage")
    assert peers.get(peer_id(b"garbage")) is None
