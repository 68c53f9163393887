"""The longest context that clients are told of: where contexts are spread, it depends on how many instances decode."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from pdmesh.core.operators.instance_operations import COME_BACK_S
from pdmesh.core.scheduler import SchedulerCore
from pdmesh.model import InstanceId, InstanceProfile, OperationKind, Role


class LongestContext:
    """Counts instances that decode: those that are there to stay, and those that were lost and may come back.

    What an operator drains, or has leave a pool, is counted no longer: a request that is too long without it is refused
    at once. One that died, or was restarted, is waited for as long as a restart may take, and so are requests.
    """

    def __init__(self, core: SchedulerCore, clock: Callable[[], float]) -> None:
        self._core = core
        self._clock = clock
        self._lost: dict[InstanceId, tuple[Role, float]] = {}  # what they did, and until when they may come back

    def joined(self, instance_id: InstanceId) -> None:
        """Count an instance that is there (again)."""
        self._lost.pop(instance_id, None)

    def is_lost(self, instance_id: InstanceId) -> None:
        """Wait for an instance that the core is about to lose, unless it was to leave."""
        view = next((each for each in self._core.instances if each.instance_id == instance_id), None)
        pools = self._core.desired.pools
        leaves = self._drained() if pools is None else {*self._drained(), *pools.leaves}
        if view is not None and instance_id not in leaves:
            self._lost[instance_id] = (view.role, self._clock() + COME_BACK_S)

    def num_tokens(self, profiles: Mapping[InstanceId, InstanceProfile]) -> int:
        """Return the longest context that every instance serves; 0 without instances.

        Where contexts are spread, no longer than what all hold together: who computes a prompt has no part of it.
        """
        longest = min((profile.max_model_len for profile in profiles.values()), default=0)
        limit = min((profile.max_kv_tokens for profile in profiles.values()), default=0)
        if not limit:
            return longest
        roles = self._roles()
        only_mixed = all(role.can_decode for role in roles if role.can_prefill)
        return min(longest, limit * max(1, sum(role.can_decode for role in roles) - only_mixed))

    def _roles(self) -> Collection[Role]:
        drained, now_s = self._drained(), self._clock()
        self._lost = {each: lost for each, lost in self._lost.items() if lost[1] > now_s}
        there = [view.role for view in self._core.instances if view.instance_id not in drained]
        return [*there, *(role for each, (role, _) in self._lost.items() if each not in drained)]

    def _drained(self) -> Collection[InstanceId]:
        """Instances that an operator drains, or has drained; also those that leave their pool, until they have."""
        return {each.instance_id for each in self._core.desired.operations if each.kind is OperationKind.DRAIN}
