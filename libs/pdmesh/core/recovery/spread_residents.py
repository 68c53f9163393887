"""Contexts that are spread over instances which register in any order: whole once all that hold a range have.

One that the core knows goes on as it is, if the instance is where the core has it. Of one that it does not know, after
a scheduler's restart, the instance where it decodes names its members: it is found as soon as these have registered,
too. What is not whole when its grace is over is freed.
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
    """What is known of a context so far."""

    deadline_s: float
    home_id: InstanceId | None = None
    resident: Resident | None = None  # as its home tells of it
    #: Instances that hold a range, and its number; two hold the same one where it had just been handed on.
    holders: dict[InstanceId, int] = field(default_factory=dict[InstanceId, int])

    @property
    def is_whole(self) -> bool:
        if self.resident is None:
            return False
        return all(self.holders.get(each.instance_id) == number for number, each in enumerate(self.resident.members))


class SpreadResidents:
    """Those of which some instances have not registered."""

    def __init__(self, mesh: MeshState) -> None:
        self._mesh = mesh
        self._found: dict[RequestKey, _Found] = {}

    @property
    def next_deadline_s(self) -> float:
        """Infinite if there is none."""
        return min([found.deadline_s for found in self._found.values()], default=inf)

    def joined(self, instance_id: InstanceId, resident: Resident, deadline_s: float) -> None:
        """An instance registered with a context that decodes there, or a range of one."""
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
        """Let a request that is known go on if the instance has what it is to have; else free that."""
        key = (resident.request_id, resident.epoch)
        if known.key != key or not known.decodes:
            self._mesh.free(instance_id, key)
        elif resident.part is None:
            if known.decode_id != instance_id:
                self._mesh.free(instance_id, key)
            elif resident.members not in (known.members, known.next_members) or not self._have_parts(resident):
                self._mesh.restart(known, f"instance {instance_id} knows others that hold its KV")
            elif known.lost_part is None:
                self._mesh.set_places(instance_id, key, resident.members)  # it may have given one up, unheard
        else:
            held = [member.instance_id for member in (*known.members, *known.next_members)]
            if instance_id not in held or instance_id == known.lost_member_id:
                self._mesh.free(instance_id, key)

    def _have_parts(self, resident: Resident) -> bool:
        """Whether the members have, as far as is known, what they are to have."""
        key = (resident.request_id, resident.epoch)
        held = [self._mesh.allocation_of(member.instance_id, key) for member in resident.members]
        return all(each is not None and each.kind is AllocationKind.PART and not each.freeing for each in held)

    def pop_complete(self) -> list[tuple[InstanceId, Resident]]:
        """Take out those that are whole by now."""
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
        """An instance is gone, or registers anew."""
        for key in self._found:
            self.released(instance_id, key)

    def released(self, instance_id: InstanceId, key: RequestKey) -> None:
        """An instance has nothing of a context any more; as a rule, because it has decoded it to its end."""
        if (found := self._found.get(key)) is not None:
            found.holders.pop(instance_id, None)
            if found.home_id == instance_id:
                found.home_id = found.resident = None

    def expire(self, now_s: float) -> None:
        """Free what is not whole in time."""
        for key, found in list(self._found.items()):
            if found.deadline_s <= now_s:
                del self._found[key]
                for instance_id in (found.home_id, *found.holders):
                    if instance_id is not None:
                        self._mesh.free(instance_id, key)
