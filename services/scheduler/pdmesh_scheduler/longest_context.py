"""The longest context that clients may use. With spread contexts it depends on the number of decode instances."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from pdmesh.core.operators.instance_operations import COME_BACK_S
from pdmesh.core.scheduler import SchedulerCore
from pdmesh.model import InstanceId, InstanceProfile, Role
from pdmesh.operations import OperationKind


class LongestContext:
    """Counter of decode instances: the present ones that stay, and the lost ones that may come back.

    An instance that an operator drains or removes from a pool no longer counts. A request that is too long without it
    is refused at once. A lost instance counts for `COME_BACK_S`, as long as a restart may take, and requests wait for
    it.
    """

    def __init__(self, core: SchedulerCore, clock: Callable[[], float]) -> None:
        self._core = core
        self._clock = clock
        self._lost: dict[InstanceId, tuple[Role, float]] = {}  # roles, and when each stops counting

    def joined(self, instance_id: InstanceId) -> None:
        """Count an instance as present (again)."""
        self._lost.pop(instance_id, None)

    def is_lost(self, instance_id: InstanceId) -> None:
        """Count an instance that the core is about to lose as coming back, for `COME_BACK_S`.

        Ignored if the core does not know the instance, or if it is drained or leaves its pool.
        """
        view = next((each for each in self._core.instances if each.instance_id == instance_id), None)
        pools = self._core.desired.pools
        leaves = self._drained() if pools is None else {*self._drained(), *pools.leaves}
        if view is not None and instance_id not in leaves:
            self._lost[instance_id] = (view.role, self._clock() + COME_BACK_S)

    def num_tokens(self, profiles: Mapping[InstanceId, InstanceProfile]) -> int:
        """Return the longest context that every instance serves, in tokens; 0 without instances.

        A spread context is limited by the KV that all decode instances hold together. If every prefill instance also
        decodes, one is left out: the instance that computes a prompt holds no part of that prompt.
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
        """Return the instances that an operator drains or has drained, or that are leaving their pool."""
        return {each.instance_id for each in self._core.desired.operations if each.kind is OperationKind.DRAIN}
