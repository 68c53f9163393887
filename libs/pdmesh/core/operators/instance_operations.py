"""Operations on instances: drain, use again, restart, change of role. No stream breaks.

An operation is refused before it changes anything, or runs until every request that must leave the instance has left.
Decodes move to other instances with their KV, if there is room (`pdmesh.core.copies.decode_moves`). A request that is
still there at the time limit starts again elsewhere, under the next epoch and with the same tokens. Once all requests
have left an instance that is drained or restarted, its cached prefixes are copied to others
(`pdmesh.core.copies.cache_moves`).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from math import inf

from pdmesh.core.commands import SetRole, StopInstance
from pdmesh.core.copies.cache_moves import CacheMoves
from pdmesh.core.copies.receivers import replace_receiver
from pdmesh.core.instances.allocations import HAVE_SEATS, AllocationKind
from pdmesh.core.instances.instance import InstanceState
from pdmesh.core.instances.revisions import can_serve, have_pair, is_needed, pairs_as
from pdmesh.core.mesh_state import MeshState
from pdmesh.core.operator_events import ActuatorReported, FailedStart, OperationRequested
from pdmesh.core.operators.actuators import Actuators
from pdmesh.core.operators.operation_records import TAKEN_BACK, OperationRecord, OperationRecords
from pdmesh.model import InstanceId, RequestKey, Role
from pdmesh.operations import ManagedProcess, OperationId, OperationKind, OperationState

#: Time limit for a stopped process to start again, including the load of a large model.
COME_BACK_S = 600.0

#: Kinds of allocations that may stay on an instance in its new role.
_STAYS: dict[Role, Collection[AllocationKind]] = {
    Role.PREFILL: (AllocationKind.LEAVING, AllocationKind.FETCH),
    Role.DECODE: (*HAVE_SEATS, AllocationKind.PART, AllocationKind.FETCH),
    Role.MIXED: tuple(AllocationKind),
}

#: Kinds of operations that empty an instance's cache, too.
_EMPTIES_CACHE = (OperationKind.DRAIN, OperationKind.RESTART)


@dataclass(slots=True, eq=False, kw_only=True)
class _Operation(OperationRecord):
    """An operation on an instance.

    - `has_moved_all`: the time limit passed, and the remaining requests were restarted.
    - `stopped_pid`: the process that must end. With `by_actuator` its actuator ends it, else a command does.
    - `back_by_s`: time limit for the next process to join.
    - `role_before`: role of the instance before the operation changed it.
    """

    requested: OperationRequested
    has_moved_all: bool = False
    stopped_pid: int | None = None
    by_actuator: bool = False
    back_by_s: float = inf
    role_before: Role | None = None

    @property
    def deadline_s(self) -> float:
        return self.back_by_s if self.has_moved_all else self.began_s + self.requested.timeout_s

    @property
    def desired(self) -> OperationRequested:
        """The operation in the form in which it is asked of the next scheduler."""
        return replace(
            self.requested,
            stopped_pid=self.stopped_pid,
            by_actuator=self.by_actuator,
            role_before=self.role_before,
        )

    @classmethod
    def of(cls, requested: OperationRequested, now_s: float) -> _Operation:
        """Return a new operation that begins now."""
        return cls(
            operation_id=requested.operation_id,
            kind=requested.kind,
            timeout_s=requested.timeout_s,
            began_s=now_s,
            instance_id=requested.instance_id,
            role=requested.role,
            requested=requested,
            by_actuator=requested.by_actuator,
            role_before=requested.role_before,
        )


class Operations:
    """Operations on instances, at most one each. Outcomes outlive instances and schedulers."""

    def __init__(
        self, mesh: MeshState, records: OperationRecords, actuators: Actuators, cache_moves: CacheMoves | None
    ) -> None:
        """``cache_moves`` copies cached prefixes away; None: nothing does."""
        self._mesh = mesh
        self._cache_moves = cache_moves
        self._records = records
        self._actuators = actuators
        self._running: dict[InstanceId, _Operation] = {}
        #: Operations whose outcome still holds, by instance, for the next scheduler.
        self._drains: dict[InstanceId, OperationRequested] = {}
        self._roles: dict[InstanceId, OperationRequested] = {}

    @property
    def desired(self) -> list[OperationRequested]:
        """Operations to ask of the next scheduler: roles and drains in effect, then running operations."""
        running = [operation.desired for operation in self._running.values()]
        return list(dict.fromkeys([*self._roles.values(), *self._drains.values(), *running]))

    @property
    def leaving(self) -> list[InstanceId]:
        """Instances that all decodes must leave."""
        if not self._running and not self._drains:
            return []
        running = [name for name, operation in self._running.items() if self._empties(operation)]
        return list(dict.fromkeys((*self._drains, *running)))

    @staticmethod
    def _empties(operation: _Operation) -> bool:
        match operation.requested.kind:
            case OperationKind.DRAIN:
                return True
            case OperationKind.RESTART:
                return operation.stopped_pid is None
            case OperationKind.ROLE:
                return operation.requested.role is Role.PREFILL
            case OperationKind.UNDRAIN | OperationKind.MOVE | OperationKind.RESIZE | OperationKind.ROLLING:
                return False

    @property
    def next_deadline_s(self) -> float:
        return min([operation.deadline_s for operation in self._running.values()], default=inf)

    def running_on(self, instance_id: InstanceId) -> OperationRecord | None:
        """Return the operation that runs on an instance; None if none runs."""
        return self._running.get(instance_id)

    def fixes_role(self, instance_id: InstanceId) -> bool:
        """Whether an operator chose the role of an instance."""
        running = self._running.get(instance_id)
        return instance_id in self._roles or (running is not None and running.requested.role is not None)

    def replaced_by(self, report: ActuatorReported) -> tuple[ManagedProcess, ...]:
        """Return the processes of the report that its actuator should replace: empty instances under restart."""
        return tuple(each for each in report.processes if self._is_replaced(InstanceId(each.name)))

    def _is_replaced(self, instance_id: InstanceId) -> bool:
        """Whether an actuator still has to end the process of an instance under restart; False without a restart."""
        operation, instance = self._running.get(instance_id), self._mesh.instances.get(instance_id)
        if operation is None or instance is None:
            return False
        return operation.by_actuator and operation.stopped_pid == instance.profile.pid

    # --- events ---

    def request(self, requested: OperationRequested, now_s: float) -> None:
        """Begin an operation on an instance, or refuse it before anything has changed.

        An accepted operation ends another one that still runs on the instance: as done if that was asked for again,
        else as cancelled. A restart is done at once if another process than its ``pid`` is registered.
        """
        operation = _Operation.of(requested, now_s)
        self._records.add(operation)
        refusal = None if requested.again else self._refusal(requested)
        if requested.kind in (OperationKind.RESIZE, OperationKind.ROLLING):
            refusal = "this operation is for the whole mesh, not for one instance"
        if refusal is not None:
            self._end(operation, OperationState.REFUSED, refusal, now_s)
            return
        there = self._mesh.instances.get(requested.instance_id)
        if there is not None and requested.pid not in (None, there.profile.pid) and requested.stopped_pid is None:
            self._end(operation, OperationState.DONE, "another process registered as this instance first", now_s)
            return
        before = self._running.get(requested.instance_id)
        if before is not None and before.requested.again:
            self._end(before, OperationState.DONE, "", now_s)
        elif before is not None:
            instance = self._mesh.instances.get(requested.instance_id)
            if instance is not None:
                self._restore(before, instance)
            self._end(before, OperationState.CANCELLED, f"a later {requested.kind} replaced it", now_s)
        if requested.kind is OperationKind.UNDRAIN:
            self._drains.pop(requested.instance_id, None)
        elif requested.again and requested.kind is OperationKind.DRAIN:
            self._drains[requested.instance_id] = requested
        elif requested.again and requested.kind is OperationKind.ROLE:
            self._roles[requested.instance_id] = requested
        if requested.stopped_pid is not None:
            self._stops(operation, requested.stopped_pid, now_s)
        self._running[requested.instance_id] = operation
        self._begin(operation, now_s)

    def cancel(self, operation_id: OperationId, now_s: float) -> bool:
        """Cancel an operation and use its instance as before. Return False if it does not run here."""
        operation = next((each for each in self._running.values() if each.operation_id == operation_id), None)
        if operation is None:
            return False
        if instance := self._mesh.instances.get(operation.requested.instance_id):
            self._restore(operation, instance)
        self._end(operation, OperationState.CANCELLED, TAKEN_BACK, now_s)
        return True

    def forget(self, instance_id: InstanceId) -> None:
        """Forget the drain and role of an instance that left: another one may come under its name."""
        self._drains.pop(instance_id, None)
        self._roles.pop(instance_id, None)
        self._records.note_change()

    def use_again(self, instance: InstanceState) -> None:
        """Use a drained instance again; an operation that drains or restarts it now continues."""
        self._drains.pop(instance.instance_id, None)
        running = self._running.get(instance.instance_id)
        instance.set_closed(
            running is not None and running.requested.kind in (OperationKind.DRAIN, OperationKind.RESTART)
        )
        self._mesh.queue.unpark()
        self._records.note_change()

    def joined(self, instance_id: InstanceId, now_s: float) -> None:
        """Apply the wanted role and drain to an instance that joined, and continue its operation.

        A restart is done if another process joined.
        """
        instance = self._mesh.instances[instance_id]
        if (requested := self._roles.get(instance_id)) and requested.role is not None:
            self._set_role(instance, requested.role)
        if instance_id in self._drains:
            instance.set_closed(True, shut=True)
        if (operation := self._running.get(instance_id)) is None:
            return
        replaced = operation.requested.pid if operation.stopped_pid is None else operation.stopped_pid
        if replaced not in (None, instance.profile.pid):
            self._end(operation, OperationState.DONE, "", now_s)
        elif operation.stopped_pid is None:
            self._begin(operation, now_s)
        else:
            self._stop(operation, instance, now_s)

    def lost(self, instance_id: InstanceId, now_s: float) -> None:
        """End the drain of a lost instance as done."""
        operation = self._running.get(instance_id)
        if operation is not None and operation.requested.kind is OperationKind.DRAIN:
            self._drained(operation, "the instance is gone", now_s)

    def lost_cache(self, instance: InstanceState, now_s: float) -> None:
        """Copy again what a lost instance had cached (`CacheMoves.lost`)."""
        if self._cache_moves is not None:
            self._cache_moves.lost(instance, now_s)

    def start_failed(self, failed: FailedStart, now_s: float) -> bool:
        """Fail a restart whose process could not be replaced, and use the instance as before.

        Returns whether such a restart runs here.
        """
        if not self._is_replaced(failed.instance_id):
            return False
        operation = self._running[failed.instance_id]
        self._restore(operation, self._mesh.instances[failed.instance_id])
        self._end(operation, OperationState.FAILED, failed.reason, now_s)
        return True

    def advance(self, now_s: float) -> None:
        """Advance every running operation, after any event: end it, fail it, or restart requests at its time limit."""
        for operation in list(self._running.values()):
            instance = self._mesh.instances.get(operation.requested.instance_id)
            if instance is None:
                if operation.deadline_s <= now_s:
                    self._end(operation, OperationState.FAILED, "the instance did not come back", now_s)
                continue
            if operation.stopped_pid is not None:
                if operation.deadline_s <= now_s:
                    instance.set_closed(instance.instance_id in self._drains)
                    self._end(operation, OperationState.FAILED, "its process did not end", now_s)
                continue
            if operation.deadline_s <= now_s:
                operation.has_moved_all = True
                if operation.requested.role is None:
                    instance.set_closed(True, shut=True)
                for key in self._left(operation.requested, instance):
                    self._restart(key, instance)
            num_left = len(self._left(operation.requested, instance))
            num_cached = 0 if num_left else self._num_cached_left(operation, instance, now_s)
            detail = f"copies {num_cached} cached prefixes to other instances" if num_cached else operation.detail
            self._records.tell(operation, detail, num_left)
            if not num_left and not num_cached:
                self._complete(operation, instance, now_s)

    def _num_cached_left(self, operation: _Operation, instance: InstanceState, now_s: float) -> int:
        """Let cached prefixes move away until the time limit, and return how many are left to move."""
        kind, until_s = operation.requested.kind, operation.deadline_s
        if self._cache_moves is None or kind not in _EMPTIES_CACHE or operation.has_moved_all or until_s <= now_s:
            return 0
        return self._cache_moves.advance(instance, until_s, now_s)

    # --- requests ---

    def _refusal(self, requested: OperationRequested) -> str | None:
        instances = self._mesh.instances
        instance = instances.get(requested.instance_id)
        if instance is None and requested.pid is None:
            known = ", ".join(sorted(instances)) or "none"
            return f"no instance is called {requested.instance_id!r}: the mesh has {known}"
        running = self._running.get(requested.instance_id)
        if running is not None and requested.kind is not OperationKind.UNDRAIN:
            return (
                f"operation {running.operation_id} ({running.kind}) runs on {requested.instance_id}: wait for it, "
                f"or `pdmesh ops cancel {running.operation_id}`"
            )
        if instance is None or requested.kind is OperationKind.UNDRAIN or requested.force:
            return None
        others = [other for other in instances.values() if other is not instance and other.is_usable]
        if requested.role in (Role.MIXED, instance.role):
            return None
        if requested.role is not None and pairs_as(instance, requested.role, others):
            return None
        if is_needed(instance, others) or (requested.kind is OperationKind.ROLE and not have_pair(others)):
            is_alone = not have_pair([instance, *others]) and requested.kind is not OperationKind.ROLE
            kind = "prefill and decode" if instance.role is Role.MIXED or is_alone else str(instance.role)
            if can_serve(others):
                loss, then = "prefill instances would decode beside their prompts", ""
            else:
                loss, then = "no request can be served", ": new requests then wait and are rejected in the end"
            return (
                f"without {requested.instance_id} {loss}: it is the last that can {kind}. Start another one first, or "
                f"use --force{then}"
            )
        return None

    def _begin(self, operation: _Operation, now_s: float) -> None:
        """Begin an operation: no new work goes to the instance, and requests that would leave too late restart at once.

        For a change of role, the instance takes work of its new role while the old work leaves, so it is never idle. An
        operation on an absent instance waits for its return.
        """
        instance = self._mesh.instances.get(operation.requested.instance_id)
        if instance is None:
            self._records.tell(operation, "waiting for the instance to come back")
            return
        self._records.tell(operation, "")
        requested = operation.requested
        if requested.role is not None:
            operation.role_before = operation.role_before or instance.role
            self._set_role(instance, requested.role)
        elif requested.kind is not OperationKind.UNDRAIN:
            instance.set_closed(True)
        for key in self._left(requested, instance):
            if self._takes_longer(key, operation.deadline_s - now_s):
                self._restart(key, instance)

    @staticmethod
    def _left(requested: OperationRequested, instance: InstanceState) -> Sequence[RequestKey]:
        """Return the keys of the allocations that must leave the instance: none for an undrain."""
        if requested.kind is OperationKind.UNDRAIN:
            return ()
        stays = (AllocationKind.FETCH,) if requested.role is None else _STAYS[requested.role]
        return [key for key, allocation in instance.allocations.items() if allocation.kind not in stays]

    def _takes_longer(self, key: RequestKey, limit_s: float) -> bool:
        """Whether the rest of the prompt is predicted to take longer than ``limit_s``; False after the prompt."""
        state = self._mesh.find(key)
        if state is None or not state.is_in_prefill:
            return False
        num_left = state.request.num_prompt_tokens - state.num_planned_tokens
        return state.work_us * num_left / max(1, state.num_work_tokens) > 1e6 * limit_s

    def _restart(self, key: RequestKey, instance: InstanceState) -> None:
        state = self._mesh.find(key)
        if state is not None and state.needs(instance.instance_id):
            replace_receiver(self._mesh, state, instance.instance_id, f"instance {instance.instance_id} is drained")

    # --- ends ---

    def _complete(self, operation: _Operation, instance: InstanceState, now_s: float) -> None:
        requested = operation.requested
        match requested.kind:
            case OperationKind.DRAIN:
                self._drained(operation, "", now_s)
                return
            case OperationKind.RESTART:
                self._stop(operation, instance, now_s)
                return
            case OperationKind.UNDRAIN:
                self.use_again(instance)
            case OperationKind.ROLE:
                self._roles[requested.instance_id] = requested
            case OperationKind.RESIZE | OperationKind.ROLLING | OperationKind.MOVE:
                raise AssertionError(f"no {requested.kind} runs on one instance")
        self._end(operation, OperationState.DONE, "", now_s)

    def _stop(self, operation: _Operation, instance: InstanceState, now_s: float) -> None:
        instance.set_closed(True, shut=True)
        operation.by_actuator = operation.by_actuator or self._actuators.replaces(instance.instance_id)
        if not operation.by_actuator:
            self._mesh.commands.append(StopInstance(instance_id=instance.instance_id))
        self._stops(operation, instance.profile.pid, now_s)

    def _stops(self, operation: _Operation, pid: int, now_s: float) -> None:
        operation.stopped_pid, operation.has_moved_all, operation.back_by_s = pid, True, now_s + COME_BACK_S
        self._records.tell(operation, "its process is started again")

    def _drained(self, operation: _Operation, detail: str, now_s: float) -> None:
        self._drains[operation.requested.instance_id] = operation.requested
        if instance := self._mesh.instances.get(operation.requested.instance_id):
            instance.set_closed(True, shut=True)
        self._end(operation, OperationState.DONE, detail, now_s)

    def _restore(self, operation: _Operation, instance: InstanceState) -> None:
        """Use the instance as before the operation: its role, and closed only if it is drained."""
        instance.set_closed(instance.instance_id in self._drains)
        if operation.role_before is not None:
            self._set_role(instance, operation.role_before)

    def _set_role(self, instance: InstanceState, role: Role) -> None:
        if instance.role is role:
            # Look at the instance again: the operator may have fixed the role that it already has.
            self._mesh.changed[instance.instance_id] = None
            return
        instance.set_role(role)
        self._mesh.regroup()
        self._mesh.commands.append(SetRole(instance_id=instance.instance_id, role=role))
        self._mesh.queue.unpark()

    def _end(self, operation: _Operation, state: OperationState, detail: str, now_s: float) -> None:
        self._records.end(operation, state, detail, now_s)
        if self._cache_moves is not None:
            self._cache_moves.forget(operation.requested.instance_id)
        if self._running.get(operation.requested.instance_id) is operation:
            del self._running[operation.requested.instance_id]

    def check_integrity(self) -> None:
        for instance_id, operation in self._running.items():
            assert operation.is_running, f"{instance_id}: {operation.requested.operation_id} is over"
