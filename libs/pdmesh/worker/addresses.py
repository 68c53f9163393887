"""The data addresses of the mesh's instances, as the scheduler reports them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from pdmesh.errors import ProtocolError
from pdmesh.kv.spread import PartHolder
from pdmesh.model import InstanceId, PartMember


class Addresses:
    """Data addresses by instance, since commands name only instances."""

    def __init__(self) -> None:
        self._addresses: dict[InstanceId, bytes] = {}

    def add(self, data_addresses: Mapping[InstanceId, bytes]) -> None:
        self._addresses.update(data_addresses)

    def remove(self, data_address: bytes) -> None:
        """Forget the instance at an address, unless it has another address by now."""
        self._addresses = {each: address for each, address in self._addresses.items() if address != data_address}

    def clear(self) -> None:
        self._addresses.clear()

    def of(self, instance_ids: Iterable[InstanceId]) -> tuple[bytes, ...]:
        """Return these instances' addresses, in order. Raises ProtocolError if one is unknown."""
        instance_ids = tuple(instance_ids)
        unknown = [each for each in instance_ids if each not in self._addresses]
        if unknown:
            raise ProtocolError(
                f"the scheduler named instances without their addresses: {', '.join(unknown)}; "
                "please report this with the scheduler's log"
            )
        return tuple([self._addresses[each] for each in instance_ids])

    def holders(self, members: Iterable[PartMember]) -> list[PartHolder]:
        """Return where the holders of a context's ranges answer, in order. Raises ProtocolError if one is unknown."""
        members = tuple(members)
        addresses = self.of(member.instance_id for member in members)
        return [PartHolder(address, each.capability) for address, each in zip(addresses, members, strict=True)]
