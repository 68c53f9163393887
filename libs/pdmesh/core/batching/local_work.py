"""Local work: decode instances that prefill and prefill instances that decode.

A decode instance may compute the prompt of a request that it will decode. A prefill instance may decode a request whose
prompt it has computed. The choice is made for each request. A decode on a prefill instance moves to a decode instance
that has room, unless computed prompts wait for that room.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pdmesh.core.mesh_state import MeshState
from pdmesh.model import InstanceId, Role
from pdmesh.policy.bundle import Bundle


class LocalWork:
    """The local work that each instance is allowed, and the prefill instances that decode.

    ``is_fixed`` says whether an operator fixed an instance's role: such a prefill instance never decodes.
    """

    def __init__(self, mesh: MeshState, is_fixed: Callable[[InstanceId], bool]) -> None:
        self._mesh = mesh
        self._is_fixed = is_fixed
        #: Whether the bundle of the last packing allows local prefill, and local decode.
        self._allowed = False, False
        self._decoding: dict[InstanceId, None] = {}

    def look_at(self, bundle: Bundle) -> None:
        """Update whether each instance may prefill or decode locally. Call before packing.

        Only changed instances are updated, or all if the bundle's rules changed. If what an instance may do changes,
        regroup the mesh and unpark waiting requests.
        """
        mesh, allowed = self._mesh, (bundle.local_prefill is not None, bundle.local_decode is not None)
        changed = mesh.changed if allowed == self._allowed else mesh.instances
        self._allowed = allowed
        for instance_id in list(changed):
            instance = mesh.instances.get(instance_id)
            is_prefill = instance is not None and instance.role is Role.PREFILL
            if instance is None or not (is_prefill and instance.allocated.num_decoding):
                self._decoding.pop(instance_id, None)
            else:
                self._decoding[instance_id] = None
            if instance is None:
                continue
            prefills = allowed[0] and instance.role is Role.DECODE
            decodes = allowed[1] and is_prefill and not self._is_fixed(instance_id)
            if (prefills, decodes) != (instance.prefills_locally, instance.decodes_locally):
                instance.set_local_work(prefills=prefills, decodes=decodes)
                mesh.regroup()
                mesh.queue.unpark()

    def leaving(self) -> Sequence[InstanceId]:
        """Return the prefill instances whose decodes may move away now; none while computed prompts await decoding."""
        return () if self._mesh.awaiting_decode else list(self._decoding)
