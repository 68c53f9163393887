"""Replacement of a request's receiver by another one, or by the instance that computes the prompt.

Computed KV stays where it is. `pdmesh.core.copies.handover` chooses the next receiver.
"""

from __future__ import annotations

from collections.abc import Sequence

from pdmesh.core.groups.recovery import lose_helper
from pdmesh.core.instances.instance import InstanceState
from pdmesh.core.mesh_state import MeshState
from pdmesh.core.requests.request import RequestState
from pdmesh.model import InstanceId


def replace_receiver(
    mesh: MeshState, state: RequestState, instance_id: InstanceId, reason: str, *, blame: float = 0.0
) -> None:
    """Let a request continue without an instance that it needs.

    * A lost helper: the others compute its part of the prompt.
    * A lost receiver: another one will receive the KV.
    * A lost holder of a context's range: another instance computes the range again.

    Otherwise the request starts again, with ``blame`` for a request that may have caused the loss (`Restart.blame`).
    """
    if state.is_helped_by(instance_id):
        lose_helper(mesh, state, instance_id)
    elif has_all_kv(mesh, state) and instance_id not in state.prefill_ids:
        lose_receiver(mesh, state)
    elif state.may_lose(instance_id):
        lose_range(mesh, state, instance_id)
    else:
        mesh.restart(state, reason, blame=blame)


def lose_range(mesh: MeshState, state: RequestState, instance_id: InstanceId) -> None:
    """Mark an instance's range of a decoding context as lost, and free it there if the instance still exists."""
    state.lose_range(instance_id)
    mesh.lost_ranges[state.key] = state
    mesh.free(instance_id, state.key)


def has_all_kv(mesh: MeshState, state: RequestState) -> bool:
    """Whether all computed KV of a moving prompt is where it was computed, so that another receiver can get it.

    False if too many receivers were lost. False if the prompt frees ranges, since these are at the receiver alone.
    """
    copy, too_often = state.incoming, state.num_lost_receivers >= mesh.max_lost_receivers
    if not state.is_in_prefill or copy is None or too_often or state.streams_out:
        return False
    allocations = [mesh.allocation_of(source_id, state.key) for source_id in copy.source_ids]
    has_left = any(copy.was_sent_by(source_id) for source_id in copy.source_ids)
    return not has_left and all(allocation is not None and not allocation.freeing for allocation in allocations)


def lose_receiver(mesh: MeshState, state: RequestState, *, told_by: InstanceId | None = None) -> None:
    """Withdraw the KV from its receiver; it waits for another one. The source ``told_by`` reported that itself."""
    assert state.incoming is not None, f"{state.key} has no receiver to lose"
    mesh.withdraw(state.incoming, told_by=told_by)
    state.lose_receiver()
    source = mesh.instances[state.prefill_ids[0]]
    mesh.awaiting_decode.add(state, source.kv_group, source.num_first_blocks(state.request))
    mesh.awaiting_decode.is_ready(state.key)
    source.defer(state.key, True)


def receive(mesh: MeshState, state: RequestState, decode: InstanceState, members: Sequence[InstanceState] = ()) -> None:
    """Give a request its receiver. ``members`` get the first ranges of a spread context."""
    mesh.awaiting_decode.discard(state.key)
    allocation = mesh.allocation_of(state.prefill_ids[0], state.key)
    assert allocation is not None, f"{state.key} has no KV to send"
    mesh.promise(state, decode, allocation.long_tokens, members)
    mesh.instances[state.prefill_ids[0]].defer(state.key, state.is_computed)


def keep(mesh: MeshState, state: RequestState) -> None:
    """Let a request without a receiver decode where its prompt is computed."""
    mesh.awaiting_decode.discard(state.key)
    request, instance = state.request, mesh.instances[state.prefill_ids[0]]
    num_blocks = instance.num_first_blocks(request)
    instance.keep(state.key, num_blocks, instance.num_decode_blocks(request))
    state.keep(instance.shard(num_blocks))
    mesh.hold(instance, state.key, decodes=True, room=instance.make_room())
    if state.is_computed:
        mesh.land(state)
