"""State of a group of instances that compute one prompt together."""

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
    """Group of instances that compute a prompt, from the first request for help until the prompt is computed.

    - `told` is the group as its members know it: the leader, the helpers that joined, and the lost ones.
    - `asked_ids` are helpers that joined, and others that have not answered or have refused.
    - `computed_parts` were computed by members; the leader may not have received all of them.
    - `is_recovering` says that a helper was lost, and the computed part of the prompt is not known yet.
    - `prefix_tokens` is the length of the prompt's prefix that the leader reported since then.
    """

    told: PrefillGroup
    asked_ids: tuple[InstanceId, ...] = ()
    computed_parts: list[ComputedPart] = field(default_factory=list[ComputedPart])
    is_recovering: bool = False
    prefix_tokens: int | None = None

    @property
    def member_ids(self) -> tuple[InstanceId, ...]:
        """The leader and all helpers that ever joined."""
        return self.told.member_ids

    @property
    def living_ids(self) -> tuple[InstanceId, ...]:
        """Members that were not lost, the leader first."""
        return self.told.living_ids

    @property
    def lost_ids(self) -> tuple[InstanceId, ...]:
        return self.told.lost_ids

    def join(self, instance_id: InstanceId, num_computed_tokens: int) -> None:
        """Add a helper that has room for the prompt. The leader has computed ``num_computed_tokens`` of it."""
        if not self.computed_parts:
            self.computed_parts = [ComputedPart(0, num_computed_tokens, self.living_ids[0])]
        self.told = structs.replace(self.told, member_ids=(*self.member_ids, instance_id))

    def lose(self, instance_id: InstanceId) -> None:
        """Note a lost helper. `recover` may follow after `hear_prefix`, once no chunk is in flight."""
        self.told = structs.replace(self.told, lost_ids=(*self.lost_ids, instance_id))
        self.asked_ids = tuple([helper_id for helper_id in self.asked_ids if helper_id != instance_id])
        self.is_recovering, self.prefix_tokens = True, None

    def hear_prefix(self, num_tokens: int) -> None:
        """Note that the leader has the first ``num_tokens`` of the prompt."""
        self.prefix_tokens = num_tokens

    def compute(self, instance_id: InstanceId, start: int, end: int) -> None:
        """Note a computed chunk. If the leader computed it, the leader has all tokens before it."""
        if instance_id == self.living_ids[0]:
            self.computed_parts = [ComputedPart(0, start, instance_id)]
        self.computed_parts.append(ComputedPart(start, end, instance_id))

    def recover(self, most_tokens: int) -> int:
        """Return how many of the first ``most_tokens`` the living members have without a gap; forget other parts."""
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
