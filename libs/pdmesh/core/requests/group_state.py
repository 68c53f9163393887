"""What the core knows of instances that compute one prompt together."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from msgspec import structs

from pdmesh.model import InstanceId
from pdmesh.plans import PrefillGroup


class ComputedPart(NamedTuple):
    """Tokens of a prompt that a member of its group has computed."""

    start: int
    end: int
    instance_id: InstanceId


@dataclass(slots=True, eq=False)
class GroupState:
    """The instances that compute a prompt together, from when the first helper is asked until all of it is computed."""

    told: PrefillGroup  # as its members know it: the leader, the helpers that have joined, and those that were lost
    asked_ids: tuple[InstanceId, ...] = ()  # to help: those helpers, and others that have not answered, or refused
    computed_parts: list[ComputedPart] = field(default_factory=list[ComputedPart])  # of which the leader may lack some
    is_recovering: bool = False  # a helper was lost, and what of the prompt is computed is not known yet
    prefix_tokens: int | None = None  # of the prompt, that the leader said it had since then

    @property
    def member_ids(self) -> tuple[InstanceId, ...]:
        """The leader and all helpers that ever joined."""
        return self.told.member_ids

    @property
    def living_ids(self) -> tuple[InstanceId, ...]:
        """Return the members that were not lost, the leader first."""
        return self.told.living_ids

    @property
    def lost_ids(self) -> tuple[InstanceId, ...]:
        return self.told.lost_ids

    def join(self, instance_id: InstanceId, num_computed_tokens: int) -> None:
        """A helper has room for the prompt, of which the leader has computed so many tokens."""
        if not self.computed_parts:
            self.computed_parts = [ComputedPart(0, num_computed_tokens, self.living_ids[0])]
        self.told = structs.replace(self.told, member_ids=(*self.member_ids, instance_id))

    def lose(self, instance_id: InstanceId) -> None:
        """A helper is lost; what it computed is known when `hear_prefix` was called and nothing is in flight."""
        self.told = structs.replace(self.told, lost_ids=(*self.lost_ids, instance_id))
        self.asked_ids = tuple([helper_id for helper_id in self.asked_ids if helper_id != instance_id])
        self.is_recovering, self.prefix_tokens = True, None

    def hear_prefix(self, num_tokens: int) -> None:
        """The leader has so many tokens of the prompt, from the first on."""
        self.prefix_tokens = num_tokens

    def compute(self, instance_id: InstanceId, start: int, end: int) -> None:
        """A member has computed a chunk. The leader then has all that the chunk attended to."""
        if instance_id == self.living_ids[0]:
            self.computed_parts = [ComputedPart(0, start, instance_id)]
        self.computed_parts.append(ComputedPart(start, end, instance_id))

    def recover(self, most_tokens: int) -> int:
        """How many tokens, of ``most_tokens``, its members have computed from the first on: what it goes on from."""
        leader_id = self.living_ids[0]
        end = min(self.prefix_tokens or 0, most_tokens)
        parts = [part for part in self.computed_parts if part.instance_id in self.living_ids]
        self.computed_parts = [ComputedPart(0, end, leader_id)]
        for part in sorted(parts):
            if part.start <= end < part.end:
                end = part.end
                self.computed_parts.append(part)
        self.is_recovering = False
        return end
