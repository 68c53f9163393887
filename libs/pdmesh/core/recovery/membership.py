"""Changes in the membership of instances: which parts of the core hear of each, and in which order."""

from __future__ import annotations

from pdmesh.core.copies.context_ranges import ContextRanges
from pdmesh.core.copies.decode_moves import Moves
from pdmesh.core.copies.on_demand import OnDemandKv
from pdmesh.core.copies.rebalancing import Rebalancer
from pdmesh.core.events import DrainRequested, InstanceJoined, InstanceLost, InstanceSuspected, InstanceUnreachable
from pdmesh.core.mesh_state import MeshState
from pdmesh.core.operators.bundle_choice import BundleChoice
from pdmesh.core.operators.instance_operations import Operations
from pdmesh.core.recovery.failure_detection import go_on_without, receive_elsewhere, start_elsewhere
from pdmesh.core.recovery.reconcile import Reconciler


class Membership:
    """Handlers of joins, breaks, suspicions, drains and losses of instances."""

    def __init__(
        self,
        mesh: MeshState,
        choice: BundleChoice,
        reconciler: Reconciler,
        on_demand_kv: OnDemandKv,
        moves: Moves,
        parts: ContextRanges,
        rebalancer: Rebalancer,
        operations: Operations,
    ) -> None:
        self._mesh = mesh
        self._choice = choice
        self._reconciler = reconciler
        self._on_demand = on_demand_kv
        self._moves = moves
        self._parts = parts
        self._rebalancer = rebalancer
        self._operations = operations

    def joined(self, event: InstanceJoined, now_s: float) -> None:
        """Match the instance's residents with waiting requests; then inform learning, moves and operations.

        Finally, requests that suspected instances have not begun may start on it.
        """
        instance_id = event.profile.instance_id
        before = self._mesh.instances.get(instance_id)
        is_another = before is None or not before.profile.is_process_of(event.profile)
        if is_another:
            self._mesh.cut.forget(instance_id)
        self._reconciler.instance_joined(event, now_s)
        self._on_demand.joined(self._mesh.instances[instance_id])
        self._choice.joined(event.profile)
        self._moves.joined(instance_id, stopping=event.stopping, is_another=is_another)
        self._parts.joined(self._mesh.instances[instance_id])
        self._operations.joined(instance_id, now_s)
        if before is not None and is_another:
            self._operations.lost_cache(before, now_s)
        start_elsewhere(self._mesh, self._choice.bundle)

    def unreachable(self, event: InstanceUnreachable) -> None:
        """Remove the instance from its prefill groups, and redirect transfers that it has not received."""
        if instance := self._mesh.instance_of(event):
            instance.set_reachable(False)
            go_on_without(self._mesh, instance)
            receive_elsewhere(self._mesh, instance)

    def suspected(self, event: InstanceSuspected) -> None:
        """Note that an instance is suspected or reports again; then requests on suspected ones may begin elsewhere."""
        if instance := self._mesh.instance_of(event):
            self._mesh.suspect(instance, event.suspected)
            if event.suspected:
                self._moves.suspected(event.instance_id)
                go_on_without(self._mesh, instance)
            start_elsewhere(self._mesh, self._choice.bundle)

    def lost(self, event: InstanceLost, now_s: float) -> None:
        """Restart the instance's requests, or let them continue without it; then inform moves and operations."""
        instance = self._mesh.instances.get(event.instance_id)
        self._reconciler.instance_lost(event.instance_id, now_s)
        self._mesh.cut.forget(event.instance_id)
        self._moves.lost(event.instance_id)
        self._parts.lost(event.instance_id)
        self._rebalancer.lost(event.instance_id)
        self._operations.lost(event.instance_id, now_s)
        if instance is not None:
            self._operations.lost_cache(instance, now_s)

    def stops(self, event: DrainRequested) -> None:
        """Give a stopping instance no new work and move its decodes away; or cancel that."""
        if instance := self._mesh.instance_of(event):
            instance.set_draining(event.enabled)
            self._moves.stops(event.instance_id, event.enabled)
