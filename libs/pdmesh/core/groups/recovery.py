"""Recovery of a group that lost a helper: the other members compute only the tokens that they lack.

The core sends the new membership to all members (`lose_helper`). Their chunks of the prompt in flight then end without
waiting for other members: computed, or not at all. The leader reports how many of the prompt's first tokens it has.
When all this is known, the prompt is planned again from the first token whose KV neither the leader nor another living
member has. Tokens that are computed again have the same bits.
"""

from __future__ import annotations

from pdmesh.core.events import GroupPrefix
from pdmesh.core.mesh_state import MeshState
from pdmesh.core.requests.group_state import GroupState
from pdmesh.core.requests.request import RequestState
from pdmesh.model import InstanceId
from pdmesh.policy.bundle import Bundle


def lose_helper(mesh: MeshState, state: RequestState, instance_id: InstanceId) -> None:
    """Remove a lost helper from a group, send the new membership to the others, and begin the recovery.

    Also frees what the helper held for the prompt.
    """
    state.lose_helper(instance_id)
    mesh.note_interruption(state)
    mesh.recovering[state.key] = state
    mesh.free(instance_id, state.key)
    tell_group(mesh, state)


def tell_group(mesh: MeshState, state: RequestState) -> None:
    """Send the group's membership to all members that are left."""
    assert state.group is not None, f"{state.key} has no group to tell"
    group = state.group.told
    for member_id in group.living_ids:
        mesh.set_places(member_id, state.key, group)


class GroupRecovery:
    """Groups that lost a helper, until their prompts are planned again."""

    def __init__(self, mesh: MeshState) -> None:
        self._mesh = mesh

    def on_prefix_report(self, event: GroupPrefix) -> None:
        """Note how many tokens a leader has. A report from before the last loss, or of another instance, is ignored."""
        state = self._mesh.recovering.get((event.request_id, event.epoch))
        if (
            state is None
            or state.group is None
            or event.instance_id != state.prefill_ids[0]
            or event.num_lost != len(state.group.lost_ids)
        ):
            self._mesh.ignore("GroupPrefix")
            return
        state.group.hear_prefix(event.num_tokens)

    def recover(self, bundle: Bundle) -> list[RequestState]:
        """Plan again the lost tokens of each group whose losses are known, and return the requests of these groups."""
        recovered = [
            (state, state.group)
            for state in self._mesh.recovering.values()
            if state.group is not None and self._is_known(state, state.group)
        ]
        for state, group in recovered:
            del self._mesh.recovering[state.key]
            self._take_back(state, group, bundle)
        return [state for state, _ in recovered]

    def _is_known(self, state: RequestState, group: GroupState) -> bool:
        members = (self._mesh.instances[name] for name in state.prefill_ids)
        in_flight = (chunk for member in members for plan in member.plans.values() for chunk in plan.chunks)
        return group.prefix_tokens is not None and all(
            (chunk.request_id, chunk.epoch) != state.key for chunk in in_flight
        )

    def _take_back(self, state: RequestState, group: GroupState, bundle: Bundle) -> None:
        leader = self._mesh.instances[state.prefill_ids[0]]
        last = (state.request.num_prompt_tokens - 1) // leader.block_size * leader.block_size
        end = group.recover(min(last, state.num_planned_tokens))
        num_again = state.num_planned_tokens - end
        if num_again > 0:
            if state.is_planned:
                leader.prefills.append(state)
            state.plan_again_from(end)
            leader.queue_tokens(num_again)
            state.rank_by(bundle.order)
            self._mesh.note_interruption(state)
