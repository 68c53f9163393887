"""A request loses the instance that was to receive its KV, and gets another, or decodes where it is computed.

Its computed KV stays where it is. `pdmesh.core.copies.handover` chooses the next receiver.
"""

from __future__ import annotations

from collections.abc import Sequence

from pdmesh.core.groups.recovery import lose_helper
from pdmesh.core.instances.instance import InstanceState
from pdmesh.core.mesh_state import MeshState
from pdmesh.core.requests.request import RequestState
from pdmesh.model import InstanceId


def do_without(
    mesh: MeshState, state: RequestState, instance_id: InstanceId, reason: str, *, blame: float = 0.0
) -> None:
    """An instance fails a request that needs it.

    If that was to receive its KV, another one will; if it only helped, the others compute what it did not; if it held a
    range of the context, another one computes that again. Else the request starts again, and may have caused that
    (`Restart.blame`).
    """
    if state.is_helped_by(instance_id):
        lose_helper(mesh, state, instance_id)
    elif has_all_kv(mesh, state) and instance_id not in state.prefill_ids:
        lose_receiver(mesh, state)
    elif state.may_lose(instance_id):
        lose_part(mesh, state, instance_id)
    else:
        mesh.restart(state, reason, blame=blame)


def lose_part(mesh: MeshState, state: RequestState, instance_id: InstanceId) -> None:
    """A range of a context that decodes is lost with this instance, or freed there if that does not answer."""
    state.lose_part(instance_id)
    mesh.parts_lost[state.key] = state
    mesh.free(instance_id, state.key)


def has_all_kv(mesh: MeshState, state: RequestState) -> bool:
    """Whether all that is computed of a request that moves is where it was computed, for another receiver.

    Not of one that gives ranges back: these are where it decodes alone.
    """
    copy, too_often = state.incoming, state.num_lost_receivers >= mesh.max_lost_receivers
    if not state.is_in_prefill or copy is None or too_often or state.gives_back:
        return False
    allocations = [mesh.allocation_of(source_id, state.key) for source_id in copy.source_ids]
    has_left = any(copy.was_sent_by(source_id) for source_id in copy.source_ids)
    return not has_left and all(allocation is not None and not allocation.freeing for allocation in allocations)


def lose_receiver(mesh: MeshState, state: RequestState, *, told_by: InstanceId | None = None) -> None:
    """Its KV waits where it is computed for another receiver. The source ``told_by`` knows."""
    assert state.incoming is not None, f"{state.key} has no receiver to lose"
    mesh.withdraw(state.incoming, told_by=told_by)
    state.lose_receiver()
    source = mesh.instances[state.prefill_ids[0]]
    mesh.awaiting_decode.add(state, source.kv_group, source.num_first_blocks(state.request))
    mesh.awaiting_decode.is_ready(state.key)
    source.defer(state.key, True)


def receive(mesh: MeshState, state: RequestState, decode: InstanceState, members: Sequence[InstanceState] = ()) -> None:
    """A request without a receiver gets one; of a context that is spread, with ``members`` for its first ranges."""
    mesh.awaiting_decode.discard(state.key)
    allocation = mesh.allocation_of(state.prefill_ids[0], state.key)
    assert allocation is not None, f"{state.key} has no KV to send"
    mesh.promise(state, decode, allocation.long_tokens, members)
    mesh.instances[state.prefill_ids[0]].defer(state.key, state.is_computed)


def keep(mesh: MeshState, state: RequestState) -> None:
    """A request without a receiver decodes where it is computed."""
    mesh.awaiting_decode.discard(state.key)
    request, instance = state.request, mesh.instances[state.prefill_ids[0]]
    num_blocks = instance.num_first_blocks(request)
    instance.keep(state.key, num_blocks, instance.num_decode_blocks(request))
    state.keep(instance.shard(num_blocks))
    mesh.hold(instance, state.key, decodes=True, room=instance.make_room())
    if state.is_computed:
        mesh.land(state)
