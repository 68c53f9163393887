"""What was placed on an instance that has fallen silent starts again elsewhere, where that costs next to nothing.

Silence is a suspicion, no knowledge: the instance may only be busy. So what has begun there is left alone until it
speaks again or its lease runs out. What it has not begun, and what is computed again in less time than the silence
lasted, moves to another that can take it: under the next epoch, so that whatever the silent one still says of it is
late. Of what it was only to receive, the KV stays where it is computed, and goes to another receiver; and what it only
helped with goes on without it.
"""

from __future__ import annotations

from collections.abc import Sequence

from pdmesh.core.commands import SHARED_BLAME
from pdmesh.core.copies.receivers import has_all_kv, lose_receiver
from pdmesh.core.groups.recovery import lose_helper
from pdmesh.core.instances.feasibility import could_place
from pdmesh.core.instances.instance import InstanceState
from pdmesh.core.mesh_state import MeshState
from pdmesh.core.recovery.suspects import computing
from pdmesh.core.requests.copy import CopyState
from pdmesh.core.requests.request import RequestState
from pdmesh.model import InstanceId
from pdmesh.policy.bundle import Bundle

#: Of predicted work on a prompt: not more than the silence that makes an instance suspected.
CHEAP_US = 500_000

#: A request is not moved in later epochs: perhaps it is what silences instances, and it must end somewhere.
MAX_EPOCH = 1


def start_elsewhere(mesh: MeshState, bundle: Bundle) -> None:
    """Restart the requests that need a suspected instance, would lose nothing, and can be placed on others."""
    suspected = [mesh.instances[instance_id] for instance_id in mesh.suspected]
    having_prompts = [each for each in suspected if len(each.allocations) > each.allocated.num_decoding]
    if not having_prompts:
        return
    others = [instance for instance in mesh.instances.values() if instance.takes_new]
    for instance in having_prompts:
        computed = computing(instance)
        for key in list(instance.allocations):
            state = mesh.find(key)
            if (
                state is None
                or not state.is_in_prefill
                or not state.needs(instance.instance_id)
                or not could_place(state.request, others)
            ):
                continue
            loses_nothing = _loses_nothing(state, [mesh.instances.get(name) for name in state.prefill_ids])
            if _only_receives(state, instance.instance_id) and has_all_kv(mesh, state):
                if loses_nothing or not _may_have_landed(state):
                    lose_receiver(mesh, state)
            elif loses_nothing and state.request.epoch <= MAX_EPOCH:
                blame = SHARED_BLAME if key in computed else 0.0
                mesh.restart(state, f"instance {instance.instance_id} is silent", blame=blame)


def go_on_without(mesh: MeshState, instance: InstanceState) -> None:
    """Let an instance that is silent, or cannot be reached, help nobody: the others of its groups need not wait."""
    for key in list(instance.allocations):
        state = mesh.find(key)
        if state is not None and state.is_helped_by(instance.instance_id):
            lose_helper(mesh, state, instance.instance_id)


def receive_elsewhere(mesh: MeshState, instance: InstanceState) -> None:
    """An instance that cannot be reached drops what has not landed when it registers again: others receive that."""
    for key in list(instance.allocations):
        state = mesh.find(key)
        if (
            state is not None
            and state.needs(instance.instance_id)
            and _only_receives(state, instance.instance_id)
            and has_all_kv(mesh, state)
            and not _may_have_landed(state)
        ):
            lose_receiver(mesh, state)


def _only_receives(state: RequestState, instance_id: InstanceId) -> bool:
    return instance_id not in state.prefill_ids


def _may_have_landed(state: RequestState) -> bool:
    """Whether its whole KV may be there already, and not be heard of."""
    return state.is_computed and state.incoming is not None and state.incoming.state is CopyState.GRANTED


def _loses_nothing(state: RequestState, members: Sequence[InstanceState | None]) -> bool:
    """Whether nothing of its prompt is known to be computed, or all of it is computed again in no time.

    The leader, the first of those that compute it, may be gone once it has sent everything.
    """
    if state.work_us <= CHEAP_US:
        return True
    if members[0] is None:
        return False
    in_flight = [chunk for each in members if each for plan in each.plans.values() for chunk in plan.chunks]
    num_in_flight = sum(chunk.num_tokens for chunk in in_flight if (chunk.request_id, chunk.epoch) == state.key)
    return num_in_flight == state.num_planned_tokens
