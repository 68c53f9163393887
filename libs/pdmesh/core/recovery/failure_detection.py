"""Restart of requests on a silent instance elsewhere, if that loses almost nothing.

Silence is only a suspicion: the instance may be busy. Started work therefore stays until the instance reports again or
its lease runs out. A request moves to another instance if it has not begun, or takes less time to compute again than
the silence lasted. The next epoch begins, so that later reports of the silent instance are ignored. If the silent
instance was a receiver, the KV stays where it is computed and goes to another receiver. If it was a helper, the others
compute without it.
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

#: Predicted work on a prompt, in microseconds, that may be repeated: at most the silence that raises suspicion.
CHEAP_US = 500_000

#: Highest epoch that is restarted for silence: the request may be what silences instances, and must end.
MAX_EPOCH = 1


def start_elsewhere(mesh: MeshState, bundle: Bundle) -> None:
    """Let requests in prefill continue without suspected instances, if other instances could take them.

    A receiver is replaced, unless all KV may have landed there and was much work. Any other request starts again if
    that loses almost nothing and its epoch is at most `MAX_EPOCH`.
    """
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
    """Remove an instance that is silent, or cannot be reached, from the groups that it helps."""
    for key in list(instance.allocations):
        state = mesh.find(key)
        if state is not None and state.is_helped_by(instance.instance_id):
            lose_helper(mesh, state, instance.instance_id)


def receive_elsewhere(mesh: MeshState, instance: InstanceState) -> None:
    """Replace an unreachable instance as a receiver: when it registers again, it has dropped KV that has not landed."""
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
    """Whether the request's whole KV may have landed without a report: it is computed, and its copy was granted."""
    return state.is_computed and state.incoming is not None and state.incoming.state is CopyState.GRANTED


def _loses_nothing(state: RequestState, members: Sequence[InstanceState | None]) -> bool:
    """Whether none of the prompt is known to be computed or reused, or its work is at most `CHEAP_US`.

    The leader, the first of ``members``, may be gone once it has sent all KV.
    """
    if state.work_us <= CHEAP_US:
        return True
    if members[0] is None:
        return False
    in_flight = [chunk for each in members if each for plan in each.plans.values() for chunk in plan.chunks]
    num_in_flight = sum(chunk.num_tokens for chunk in in_flight if (chunk.request_id, chunk.epoch) == state.key)
    return num_in_flight == state.num_planned_tokens
