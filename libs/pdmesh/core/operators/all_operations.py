"""Operators' requests, and the part of the core that carries out each kind."""

from __future__ import annotations

from collections import Counter
from math import inf

from pdmesh.core.commands import DesiredProcesses
from pdmesh.core.copies.cache_moves import CacheMoves
from pdmesh.core.copies.decode_moves import Moves
from pdmesh.core.handlers import Handlers
from pdmesh.core.mesh_state import MeshState
from pdmesh.core.operator_events import (
    ActuatorLost,
    ActuatorReported,
    OperationCancelled,
    OperationRequested,
    ResizeRequested,
    RollingRequested,
)
from pdmesh.core.operators.actuators import Actuators
from pdmesh.core.operators.desired import DesiredState
from pdmesh.core.operators.instance_operations import Operations
from pdmesh.core.operators.operation_records import OperationRecords
from pdmesh.core.operators.pools import Pools
from pdmesh.core.operators.replacements import Replacements
from pdmesh.core.operators.request_moves import RequestMoves
from pdmesh.core.operators.rolling import RollingRestarts
from pdmesh.model import Role
from pdmesh.operations import OperationKind


class AllOperations:
    """Operations on instances, requests, pools and processes, and their shared records and actuators."""

    def __init__(self, mesh: MeshState, moves: Moves, cache_moves: CacheMoves | None) -> None:
        self._mesh = mesh
        self.records = records = OperationRecords()
        self.actuators = actuators = Actuators(mesh)
        self.on_instances = Operations(mesh, records, actuators, cache_moves)
        self._cache_moves = cache_moves
        self._request_moves = RequestMoves(mesh, records, moves)
        self._pools = Pools(mesh, records, actuators, self.on_instances)
        self._replacements = Replacements(records, actuators)
        self._rolling = RollingRestarts(mesh, records, actuators, self.on_instances, self._pools, self._replacements)

    def register(self, handlers: Handlers) -> None:
        """Register the handlers of operators' and actuators' events."""
        handlers.on_timed(OperationRequested, self._requested)
        handlers.on_timed(OperationCancelled, self._cancelled)
        handlers.on_timed(ResizeRequested, self._requested)
        handlers.on_timed(RollingRequested, self._requested)
        handlers.on_timed(ActuatorReported, self._reported)
        handlers.on(ActuatorLost, self.actuators.lost)

    # --- views ---

    @property
    def desired(self) -> DesiredState:
        """Operators' wishes that still hold, except for the policies."""
        return DesiredState(
            operations=tuple(self.on_instances.desired),
            pools=self._pools.desired,
            replacements=self._replacements.desired,
            rolling=self._rolling.desired,
        )

    def desired_processes(self, actuator_id: str) -> DesiredProcesses:
        """Return the processes that an actuator should start and stop; none if it is not known."""
        report = next((each for each in self.actuators.there if each.actuator_id == actuator_id), None)
        if report is None:
            return DesiredProcesses()
        starts = () if self._pools.desired is None else self._pools.desired.starts
        return DesiredProcesses(
            start=tuple(each for each in starts if self.actuators.home_of(each.instance_id) is report),
            stop=self._pools.stops,
            replace=(*self._replacements.replaced_by(report), *self.on_instances.replaced_by(report)),
            temporary=self._rolling.temporary,
        )

    @property
    def next_deadline_s(self) -> float:
        """Earliest time limit of the operations that run; infinite if none runs."""
        if not self.records.num_running:
            return inf
        return min(
            self.on_instances.next_deadline_s,
            self._request_moves.next_deadline_s,
            self._pools.next_deadline_s,
            self._replacements.next_deadline_s,
            self._rolling.next_deadline_s,
        )

    def may_instances_come(self) -> bool:
        """Whether a role has fewer instances than the last resize wanted; also True if no resize is in force."""
        desired = self._pools.desired
        there = Counter([instance.role for instance in self._mesh.instances.values()])
        return desired is None or any(there[role] < desired.pools.of(role) for role in Role)

    # --- events ---

    def _requested(self, event: OperationRequested | ResizeRequested | RollingRequested, now_s: float) -> None:
        if event.operation_id in self.records:
            return
        if isinstance(event, ResizeRequested):
            self._pools.request(event, now_s)
        elif isinstance(event, RollingRequested):
            self._rolling.request(event, now_s)
        elif event.of_service or (event.kind is OperationKind.RESTART and self._replacements.takes(event.instance_id)):
            self._replacements.request(event, now_s)
        elif event.kind is OperationKind.MOVE:
            self._request_moves.request(event, now_s)
        else:
            self.on_instances.request(event, now_s)

    def _cancelled(self, event: OperationCancelled, now_s: float) -> None:
        for carrier in (self._rolling, self._pools, self._replacements, self._request_moves, self.on_instances):
            if carrier.cancel(event.operation_id, now_s):
                return
        self._mesh.ignore("OperationCancelled")

    def _reported(self, event: ActuatorReported, now_s: float) -> None:
        self.actuators.reported(event, now_s)
        for failed in event.failed:
            if not self.on_instances.start_failed(failed, now_s):
                self._pools.start_failed(failed, now_s)

    def advance(self, now_s: float) -> None:
        """Advance all operations that run, and copies after losses, after any event."""
        if self._cache_moves is not None:
            self._cache_moves.copy_again(now_s)
        if not self.records.num_running:
            return
        self._replacements.advance(now_s)
        self._request_moves.advance(now_s)
        self.on_instances.advance(now_s)
        while self._pools.advance(now_s) or self._rolling.advance(now_s):
            self._request_moves.advance(now_s)
            self.on_instances.advance(now_s)

    def check_integrity(self) -> None:
        """Raise AssertionError if an operation that is over still counts as running."""
        self.on_instances.check_integrity()
        self._request_moves.check_integrity()
