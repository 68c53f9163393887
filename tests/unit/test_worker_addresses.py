"""What an instance knows of its peers' data addresses."""

import pytest

from pdmesh.errors import ProtocolError
from pdmesh.model import InstanceId, PartMember
from pdmesh.worker.addresses import Addresses

A, B = InstanceId("a"), InstanceId("b")


def test_addresses_come_in_the_order_of_the_instances() -> None:
    addresses = Addresses()
    addresses.add({A: b"1"})
    addresses.add({B: b"2"})
    assert addresses.of([B, A, B]) == (b"2", b"1", b"2")
    (holder,) = addresses.holders([PartMember(instance_id=B, capability=7)])
    assert (holder.address, holder.capability) == (b"2", 7)


def test_an_instance_that_is_gone_is_unknown() -> None:
    addresses = Addresses()
    addresses.add({A: b"1"})
    addresses.add({B: b"2"})
    addresses.remove(b"1")
    assert addresses.of([B]) == (b"2",)
    with pytest.raises(ProtocolError, match="without their addresses: a"):
        addresses.of([B, A])


def test_an_instance_that_began_anew_is_known_whatever_comes_first() -> None:
    addresses = Addresses()
    addresses.add({A: b"before"})
    addresses.add({A: b"after"})
    addresses.remove(b"before")
    assert addresses.of([A]) == (b"after",)


def test_another_scheduler_names_the_peers_anew() -> None:
    addresses = Addresses()
    addresses.add({A: b"1"})
    addresses.clear()
    with pytest.raises(ProtocolError):
        addresses.of([A])
