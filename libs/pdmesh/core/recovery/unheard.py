"""An instance's tokens do not reach a gateway: its requests go on where they do, if there is such an instance.

The gateway may notice, too, and resume what it has had tokens of. Of what it waits for without having heard of it, only
the instance knows: also of a prompt whose first token was lost while its decode went on elsewhere. It is believed of
requests that it was given, and of no others.
"""

from __future__ import annotations

from pdmesh.core.copies.decode_moves import Moves
from pdmesh.core.copies.receivers import do_without
from pdmesh.core.events import TokenLinkReported
from pdmesh.core.instances.cut_pairs import have_way
from pdmesh.core.mesh_state import MeshState


def on_token_link(mesh: MeshState, moves: Moves, event: TokenLinkReported, now_s: float) -> None:
    """Take note of a pair that is cut, and let its requests do without the instance; or forget that it was cut."""
    if mesh.instance_of(event) is None:
        return
    instance_id, gateway_id = event.instance_id, event.gateway_id
    if event.is_up:
        mesh.cut.forgive(instance_id, gateway_id)
        return
    mesh.cut.note(instance_id, gateway_id, now_s)
    reason, unconfirmed = f"instance {instance_id} does not reach its gateway", frozenset(event.unconfirmed)
    for request_id in list(mesh.of_gateway.get(gateway_id, ())):
        state = mesh.requests[request_id]
        if not have_way(state.request, mesh.instances.values(), mesh.cut):
            continue
        if state.key in unconfirmed and instance_id in state.given_ids:
            mesh.restart(state, reason)
        elif state.needs(instance_id):
            do_without(mesh, state, instance_id, reason)
        elif state.move is not None and state.move.target_id == instance_id:
            moves.cancel(state)
