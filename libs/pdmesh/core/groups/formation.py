"""Groups of a fixed size (`GroupPolicy.group_size`): formed all at once, when their prompt is placed.

The bundle's placement chooses the helpers as it chooses the leader. Each member counts the prompt as a long one of its
own, so it joins no other group meanwhile.
"""

from __future__ import annotations

from collections import Counter

from pdmesh.core.commands import AdmitPrefill
from pdmesh.core.instances.allocations import Allocation, AllocationKind
from pdmesh.core.instances.instance import InstanceState
from pdmesh.core.mesh_state import MeshState
from pdmesh.core.requests.request import RequestState
from pdmesh.plans import PrefillGroup
from pdmesh.policy.bundle import Bundle


class Formation:
    """Choice of the members of fixed-size groups, and the invitation of any helper."""

    def __init__(self, mesh: MeshState) -> None:
        self._mesh = mesh

    def awaits_members(self, state: RequestState, bundle: Bundle) -> bool:
        """Whether a prompt for a fixed-size group must wait, because no arithmetic class has enough free instances.

        Instances of an arithmetic class compute the same bits. Enough are the group's size, or all able instances of
        the class if these are fewer. False if no instance is able to compute the prompt in a group: then the prompt
        is placed as if there were no groups.
        """
        size, request = _group_size(state, bundle), state.request
        if size < 2:
            return False
        able, free = Counter[str](), Counter[str]()
        for instance in self._mesh.instances.values():
            is_able = instance.could_prefill(request) and not instance.streams_out(request)
            if is_able and _may_be_member(instance, bundle):
                able[instance.arithmetic_class] += 1
                free[instance.arithmetic_class] += _is_free(instance, state, bundle)
        return bool(able) and all(free[name] < min(size, number) for name, number in able.items())

    def helpers(self, state: RequestState, leader: InstanceState, bundle: Bundle) -> list[InstanceState]:
        """Return the instances to ask for help with a prompt, in the order of the bundle's placement.

        They are free, have the leader's arithmetic class, and were not asked before. At most as many as the group still
        lacks.
        """
        # No allocation is left on an instance that refused, or was lost.
        allocations = [self._mesh.allocation_of(name, state.key) for name in state.asked_ids]
        num_helpers = sum(allocation is not None and not allocation.freeing for allocation in allocations)
        num_missing = _group_size(state, bundle) - 1 - num_helpers
        known = (*state.asked_ids, *(() if state.group is None else state.group.member_ids))
        if num_missing <= 0:
            return []
        candidates = [
            instance
            for instance in self._mesh.instances.values()
            if instance is not leader
            and instance.arithmetic_class == leader.arithmetic_class
            and instance.instance_id not in known
            and _may_be_member(instance, bundle)
            and _is_free(instance, state, bundle)
        ]
        key = bundle.prefill_placement.key
        candidates.sort(key=lambda each: (key(each.view), each.instance_id))
        return candidates[:num_missing]

    def admit(self, state: RequestState, leader: InstanceState, helper: InstanceState, *, long_tokens: int = 0) -> None:
        """Ask a helper, with room for the whole prompt. ``long_tokens``: the helper counts the prompt as a long one."""
        mesh = self._mesh
        capability = mesh.broker.new_capability() if state.group is None else state.group.told.capability
        state.ask_helper(helper.instance_id, leader.instance_id, capability)
        shard = helper.shard(helper.num_prefill_blocks(state.request))
        # Cached blocks of the chain cannot be evicted meanwhile, and the helper needs other blocks for the prompt.
        request, num_idle_blocks = state.request, helper.kept.num_idle_blocks_of(state.request.chain)
        keeps = bool(request.chain) and shard.num_blocks + num_idle_blocks <= helper.num_free_blocks
        helper.take(
            state.key,
            Allocation(
                AllocationKind.LEAVING,
                shard.num_blocks,
                long_tokens=long_tokens,
                tenant=request.tenant,
                share=request.share,
            ),
            request.chain if keeps else (),
        )
        mesh.commands.append(
            AdmitPrefill(
                instance_id=helper.instance_id,
                request_id=state.key[0],
                epoch=state.key[1],
                shards=(shard,),
                transfer=None,
                group=PrefillGroup(member_ids=(leader.instance_id, helper.instance_id), capability=capability),
                room=helper.make_room(),
                keeps_prefix=keeps,
            )
        )


def _group_size(state: RequestState, bundle: Bundle) -> int:
    """Return the size of the group that computes a prompt; 1 without a group policy, and for a short prompt."""
    if bundle.group_policy is None or not bundle.is_long(state.request, state.num_reused_tokens):
        return 1
    return bundle.group_policy.group_size


def _may_be_member(instance: InstanceState, bundle: Bundle) -> bool:
    """Whether an instance may join groups, whatever its load. Where instances are reserved, only these may."""
    is_in_pool = not bundle.num_reserved or instance.number <= bundle.num_reserved
    return is_in_pool and instance.profile.joins_groups and instance.takes_prompts


def _is_free(instance: InstanceState, state: RequestState, bundle: Bundle) -> bool:
    takes = bundle.prefill_placement.takes
    has_room = instance.can_prefill(state.request) and not instance.streams_out(state.request)
    return has_room and takes(state.request, instance.view, state.num_reused_tokens)
