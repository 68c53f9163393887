"""The prefill instances that may decode what they have computed, and those that do.

Whether one does is decided for each request (`pdmesh.core.transfers.handover`). What decodes there moves to a decode
instance once that has room that no computed prompt waits for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pdmesh.core.mesh_state import MeshState
from pdmesh.model import InstanceId, Role
from pdmesh.policy.bundle import Bundle


class LocalDecodes:
    """Follows the instances that changed, and those whose role an operator fixed: they never decode."""

    def __init__(self, mesh: MeshState, is_fixed: Callable[[InstanceId], bool]) -> None:
        self._mesh = mesh
        self._is_fixed = is_fixed
        self._are_allowed = False  # by the bundle, as of the last packing
        self._decoding: dict[InstanceId, None] = {}

    def look_at(self, bundle: Bundle) -> None:
        """Look at instances that changed, or at all of them under a bundle with another rule; before packing."""
        mesh, are_allowed = self._mesh, bundle.local_decode is not None
        changed = mesh.changed if are_allowed is self._are_allowed else mesh.instances
        self._are_allowed = are_allowed
        for instance_id in list(changed):
            instance = mesh.instances.get(instance_id)
            is_prefill = instance is not None and instance.role is Role.PREFILL
            if instance is None or not (is_prefill and instance.allocated.num_decoding):
                self._decoding.pop(instance_id, None)
            else:
                self._decoding[instance_id] = None
            if instance is None:
                continue
            may_decode = are_allowed and is_prefill and not self._is_fixed(instance_id)
            if may_decode is not instance.decodes_locally:
                instance.set_decodes_locally(may_decode)
                mesh.regroup()
                mesh.queue.unpark()

    def leaving(self) -> Sequence[InstanceId]:
        """Return the prefill instances whose decodes may move away now."""
        return () if self._mesh.awaiting_decode else list(self._decoding)
