"""Groups of a fixed size (`GroupPolicy.group_size`): formed all at once, when the prompt that they compute is placed.

Whom they may have is for the bundle's placement to say, as of their leader. Their members hold the prompt as a long one
of their own, so that they are taken for no other while they do.
"""

from __future__ import annotations

from collections import Counter

from pdmesh.core.instances.instance import InstanceState
from pdmesh.core.mesh_state import MeshState
from pdmesh.core.requests.request import RequestState
from pdmesh.policy.bundle import Bundle


class Formation:
    def __init__(self, mesh: MeshState) -> None:
        self._mesh = mesh

    def awaits_members(self, state: RequestState, bundle: Bundle) -> bool:
        """Whether a prompt that a group computes waits until as many are free as it has; or all, where fewer may be.

        Instances that cannot compute prompts together take it as if there were no groups.
        """
        size, request = _group_size(state, bundle), state.request
        if size < 2:
            return False
        able, free = Counter[str](), Counter[str]()
        for instance in self._mesh.instances.values():
            is_able = instance.could_prefill(request) and not instance.gives_back(request)
            if is_able and _may_be_member(instance, bundle):
                able[instance.exact_group] += 1
                free[instance.exact_group] += _is_free(instance, state, bundle)
        return bool(able) and all(free[name] < min(size, number) for name, number in able.items())

    def helpers(self, state: RequestState, leader: InstanceState, bundle: Bundle) -> list[InstanceState]:
        """Return instances to ask to compute a prompt with its leader, in the order of the bundle's placement."""
        allocations = [
            self._mesh.allocation_of(name, state.key) for name in state.asked_ids
        ]  # None: it refused, or was lost
        num_helpers = sum(allocation is not None and not allocation.freeing for allocation in allocations)
        num_missing = _group_size(state, bundle) - 1 - num_helpers
        known = (*state.asked_ids, *(() if state.group is None else state.group.member_ids))
        if num_missing <= 0:
            return []
        candidates = [
            instance
            for instance in self._mesh.instances.values()
            if instance is not leader
            and instance.exact_group == leader.exact_group
            and instance.instance_id not in known
            and _may_be_member(instance, bundle)
            and _is_free(instance, state, bundle)
        ]
        key = bundle.prefill_placement.key
        candidates.sort(key=lambda each: (key(each.view), each.instance_id))
        return candidates[:num_missing]


def _group_size(state: RequestState, bundle: Bundle) -> int:
    """Return the size of the fixed group that computes a prompt; 1 if there is none."""
    if bundle.group_policy is None or not bundle.is_long(state.request, state.num_reused_tokens):
        return 1
    return bundle.group_policy.group_size


def _may_be_member(instance: InstanceState, bundle: Bundle) -> bool:
    """Whether it is one for groups, whatever it does now."""
    is_in_pool = not bundle.num_reserved or instance.number <= bundle.num_reserved
    return is_in_pool and instance.profile.joins_groups and instance.takes_prompts


def _is_free(instance: InstanceState, state: RequestState, bundle: Bundle) -> bool:
    takes = bundle.prefill_placement.takes
    has_room = instance.can_prefill(state.request) and not instance.gives_back(state.request)
    return has_room and takes(state.request, instance.view, state.num_reused_tokens)
