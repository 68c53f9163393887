"""Lost connections for tokens from an instance to a gateway: requests continue where their tokens arrive.

The gateway may notice too, and resume requests that it has had tokens of. Of requests without any token, only the
instance knows, including prompts whose first token was lost while the decode continued elsewhere. The instance's report
counts only for requests that it was given.
"""

from __future__ import annotations

from pdmesh.core.copies.decode_moves import Moves
from pdmesh.core.copies.receivers import replace_receiver
from pdmesh.core.events import TokenLinkReported
from pdmesh.core.instances.cut_pairs import have_way
from pdmesh.core.mesh_state import MeshState


def on_token_link(mesh: MeshState, moves: Moves, event: TokenLinkReported, now_s: float) -> None:
    """Note a broken pair, and move or restart its requests if they can run elsewhere; or note that it works again."""
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
            replace_receiver(mesh, state, instance_id, reason)
        elif state.move is not None and state.move.target_id == instance_id:
            moves.cancel(state)
