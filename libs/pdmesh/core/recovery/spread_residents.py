"""Spread contexts whose instances register in any order: whole once all holders of ranges have registered.

A context that the core knows continues if the instance is as the core recorded. After a scheduler's restart, the
decoding instance names the members of a context that the core does not know. The context is adopted as soon as the
members have registered, too. A context that is not whole by its deadline is freed.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf

from pdmesh.core.instances.allocations import AllocationKind
from pdmesh.core.mesh_state import MeshState
from pdmesh.core.requests.phases import Phase
from pdmesh.core.requests.request import RequestState
from pdmesh.model import InstanceId, RequestKey, Resident


@dataclass(slots=True, eq=False)
class _Found:
    """Registered parts of a context. ``resident`` is the report of its decoding instance ``home_id``."""

    deadline_s: float
    home_id: InstanceId | None = None
    resident: Resident | None = None
    #: Instances that hold a range, and its number. Two hold the same one if it had just been handed on.
    holders: dict[InstanceId, int] = field(default_factory=dict[InstanceId, int])

    @property
    def is_whole(self) -> bool:
        if self.resident is None:
            return False
        return all(self.holders.get(each.instance_id) == number for number, each in enumerate(self.resident.members))


class SpreadResidents:
    """Spread contexts with at least one shard holder that has not re-registered."""

    def __init__(self, mesh: MeshState) -> None:
        self._mesh = mesh
        self._found: dict[RequestKey, _Found] = {}

    @property
    def next_deadline_s(self) -> float:
        """Earliest time by which a spread context must be whole; infinite if no context lacks a registration."""
        return min([found.deadline_s for found in self._found.values()], default=inf)

    def joined(self, instance_id: InstanceId, resident: Resident, deadline_s: float) -> None:
        """Note an instance that registered with a decoding context, or with a range of one.

        If the request is known and runs, the two are compared at once: it continues or restarts, or the part is freed.
        """
        key = (resident.request_id, resident.epoch)
        known = self._mesh.requests.get(key[0])
        if known is not None and known.phase is not Phase.WAITING:
            self._go_on(known, instance_id, resident)
            return
        found = self._found.setdefault(key, _Found(deadline_s))
        if resident.part is None:
            found.home_id, found.resident = instance_id, resident
        else:
            found.holders[instance_id] = resident.part

    def _go_on(self, known: RequestState, instance_id: InstanceId, resident: Resident) -> None:
        """Compare a registered part of a context with the record of the request, which continues if both agree.

        Free a part that the request does not use. Restart the request if its decoding instance names other shard
        holders, or if a holder's range is missing.
        """
        key = (resident.request_id, resident.epoch)
        if known.key != key or not known.decodes:
            self._mesh.free(instance_id, key)
        elif resident.part is None:
            if known.decode_id != instance_id:
                self._mesh.free(instance_id, key)
            elif resident.members not in (known.members, known.next_members) or not self._have_parts(resident):
                self._mesh.restart(known, f"instance {instance_id} reports other holders of its KV")
            elif known.lost_range is None:
                # A report that a holder is lost may not have arrived: let the instance ask the holders again.
                self._mesh.set_places(instance_id, key, resident.members)
        else:
            held = [member.instance_id for member in (*known.members, *known.next_members)]
            if instance_id not in held or instance_id == known.lost_member_id:
                self._mesh.free(instance_id, key)

    def _have_parts(self, resident: Resident) -> bool:
        """Whether each member holds a range that is not being freed, as far as is known."""
        key = (resident.request_id, resident.epoch)
        held = [self._mesh.allocation_of(member.instance_id, key) for member in resident.members]
        return all(each is not None and each.kind is AllocationKind.PART and not each.freeing for each in held)

    def pop_complete(self) -> list[tuple[InstanceId, Resident]]:
        """Remove and return the contexts that are whole; free ranges on instances that are not members."""
        whole: list[tuple[InstanceId, Resident]] = []
        for key, found in list(self._found.items()):
            if found.is_whole and found.home_id is not None and found.resident is not None:
                del self._found[key]
                whole.append((found.home_id, found.resident))
                asked = {member.instance_id for member in found.resident.members}
                for instance_id in found.holders:
                    if instance_id not in asked:
                        self._mesh.free(instance_id, key)
        return whole

    def lost(self, instance_id: InstanceId) -> None:
        """Forget what an instance registered of incomplete contexts, because the instance is lost or registers anew.

        The contexts themselves wait for their deadlines.
        """
        for key in self._found:
            self.released(instance_id, key)

    def released(self, instance_id: InstanceId, key: RequestKey) -> None:
        """Forget an instance's part of a context, as a rule because the context decoded to its end."""
        if (found := self._found.get(key)) is not None:
            found.holders.pop(instance_id, None)
            if found.home_id == instance_id:
                found.home_id = found.resident = None

    def expire(self, now_s: float) -> None:
        """Free the parts of contexts that are not whole by their deadline."""
        for key, found in list(self._found.items()):
            if found.deadline_s <= now_s:
                del self._found[key]
                for instance_id in (found.home_id, *found.holders):
                    if instance_id is not None:
                        self._mesh.free(instance_id, key)
