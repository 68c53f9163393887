"""Resizes of the pools: which instances change their role, start or leave, and in which order.

A resize is an operation. The steps on single instances are operations, too
(`pdmesh.core.operators.instance_operations`), under ids that begin with the resize's. A resize is refused before
anything changes, or runs in three steps. First roles change, since that costs least. Then missing instances are
started. Once all of them have registered, the surplus ones leave. The resize is done when the processes of the
instances that left have ended. An actuator (`pdmesh.core.operators.actuators`) starts and stops processes and reports
which exist. A resize that fails, or is cancelled, is undone by another one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import repeat
from math import inf
from typing import NamedTuple

from pdmesh.core.instances.allocations import AllocationKind
from pdmesh.core.instances.instance import InstanceState
from pdmesh.core.mesh_state import MeshState
from pdmesh.core.operator_events import FailedStart, OperationRequested, ResizeRequested
from pdmesh.core.operators.actuators import Actuators
from pdmesh.core.operators.instance_operations import Operations
from pdmesh.core.operators.operation_records import TAKEN_BACK, OperationRecord, OperationRecords
from pdmesh.model import InstanceId, Role
from pdmesh.operations import OperationId, OperationKind, OperationState, PoolCounts, PoolMember

#: Time limit for an empty process to end once its actuator has been told, in addition to its grace.
GONE_S = 60.0


class PoolPlan(NamedTuple):
    """Changes from the present pools to wanted ones: instances with new roles, instances to start, and to leave."""

    flips: tuple[PoolMember, ...]
    starts: tuple[PoolMember, ...]
    leaves: tuple[InstanceId, ...]


def plan_pools(
    instances: Iterable[InstanceState],
    wanted: PoolCounts,
    prefixes: Iterator[str] | None = None,
    first: Collection[InstanceId] = (),
    leaves_last: Callable[[InstanceId], int] = lambda _: 0,
) -> PoolPlan:
    """Plan the change to the ``wanted`` pools with as few changed processes as possible.

    Instances that are smallest by ``leaves_last`` leave first, then the ones in ``first``, then the least used, then
    the newest. Surplus instances change their role where one is missing. The name of a started instance begins with the
    next of ``prefixes``, then its role.
    """
    prefixes = repeat("") if prefixes is None else prefixes
    there = list(instances)
    surplus: list[InstanceState] = []
    missing: list[Role] = []
    for role in Role:
        of_role = sorted((each for each in there if each.role is role), key=_least_used)
        of_role.sort(key=lambda each: each.instance_id not in first)
        of_role.sort(key=lambda each: leaves_last(each.instance_id))
        num_more = wanted.of(role) - len(of_role)
        missing += [role] * num_more
        surplus += of_role[: max(0, -num_more)]
    # Instances that cannot leave yet change their role.
    surplus.sort(key=lambda each: -leaves_last(each.instance_id))
    flips = [PoolMember(instance_id=each.instance_id, role=role) for each, role in zip(surplus, missing, strict=False)]
    names = {each.instance_id for each in there}
    starts: list[PoolMember] = []
    for role in missing[len(flips) :]:
        number, prefix = 0, next(prefixes)
        while (name := InstanceId(f"{prefix}{role}-{number}")) in names:
            number += 1
        names.add(name)
        starts.append(PoolMember(instance_id=name, role=role))
    leaves = [each.instance_id for each in surplus[len(flips) :]]
    return PoolPlan(tuple(flips), tuple(starts), tuple(leaves))


def _least_used(instance: InstanceState) -> tuple[bool, int, int]:
    return instance.is_usable, len(instance.allocations), -instance.number


@dataclass(slots=True, eq=False, kw_only=True)
class _Resize(OperationRecord):
    """A resize. Leaving instances are empty since `empty_since_s`: the actuators should end their processes.

    `roles` are the roles of the leaving instances, to start them again if the resize is undone.
    """

    requested: ResizeRequested
    before: PoolCounts
    empty_since_s: float = inf
    roles: dict[InstanceId, Role] | None = None

    def part(self, instance_id: InstanceId) -> OperationId:
        """Return the id of the operation on one instance."""
        return OperationId(f"{self.requested.operation_id}/{instance_id}")


class Pools:
    """Resizes of the pools, one at a time. The wanted sizes outlive the resize and the scheduler."""

    def __init__(
        self, mesh: MeshState, records: OperationRecords, actuators: Actuators, operations: Operations
    ) -> None:
        self._mesh = mesh
        self._records = records
        self._actuators = actuators
        self._operations = operations
        self._running: _Resize | None = None
        # The last resize that was accepted.
        self._desired: ResizeRequested | None = None

    @property
    def running(self) -> OperationRecord | None:
        """The resize that runs; None if none runs."""
        return self._running

    @property
    def desired(self) -> ResizeRequested | None:
        """The wanted pools, for the next scheduler; None if no resize still holds."""
        return self._desired

    @property
    def stops(self) -> tuple[InstanceId, ...]:
        """Instances whose processes should end: they leave, serve no request, and send no more cached prefixes."""
        leaves = () if self._desired is None else self._desired.leaves
        return tuple(each for each in leaves if each not in self._mesh.instances or self._is_free(each))

    @property
    def next_deadline_s(self) -> float:
        resize = self._running
        if resize is None:
            return inf
        instances = self._mesh.instances
        if any(self._operations.running_on(member.instance_id) is not None for member in resize.requested.flips):
            return inf
        started = all(member.instance_id in instances for member in resize.requested.starts)
        return (
            resize.empty_since_s + self._end_limit_s(resize)
            if started
            else resize.began_s + resize.requested.start_timeout_s
        )

    # --- events ---

    def request(self, requested: ResizeRequested, now_s: float) -> None:
        """Begin a resize, or refuse it before anything has changed; or continue an earlier scheduler's."""
        resize = _Resize(
            operation_id=requested.operation_id,
            kind=OperationKind.RESIZE,
            timeout_s=requested.timeout_s,
            began_s=now_s,
            pools=requested.pools,
            requested=requested,
            before=self._sizes(),
        )
        self._records.add(resize)
        if not requested.again:
            # Pools without the temporary instances of a rolling restart are as they were before the restart.
            why_not = None if requested.leaves else requested.pools.why_not
            prefixes = self._actuators.prefixes()
            plan = plan_pools(
                self._mesh.instances.values(),
                requested.pools,
                prefixes,
                requested.leaves,
                self._actuators.leaves_last,
            )
            resize.requested = requested = replace(requested, flips=plan.flips, starts=plan.starts, leaves=plan.leaves)
            if (refusal := why_not or self._refusal(resize)) is not None:
                self._end(resize, OperationState.REFUSED, refusal, now_s)
                return
        resize.roles = {
            each: self._mesh.instances[each].role for each in requested.leaves if each in self._mesh.instances
        }
        for member in requested.starts:
            self._operations.forget(member.instance_id)
        self._running, self._desired = resize, replace(requested, again=True)

    def cancel(self, operation_id: OperationId, now_s: float) -> bool:
        """Cancel the resize and undo it. Return False if it does not run here."""
        resize = self._running
        if resize is None or resize.operation_id != operation_id:
            return False
        self._take_back(resize, OperationState.CANCELLED, TAKEN_BACK, now_s)
        return True

    def start_failed(self, failed: FailedStart, now_s: float) -> None:
        """Undo the resize that wanted an instance which could not be started.

        A report about any other instance, or one that is here, is counted as ignored.
        """
        resize = self._running
        wanted = () if resize is None else [member.instance_id for member in resize.requested.starts]
        if resize is None or failed.instance_id not in wanted or failed.instance_id in self._mesh.instances:
            self._mesh.ignore("FailedStart")
            return
        reason = f"{failed.instance_id} could not be started: {failed.reason}"
        self._take_back(resize, OperationState.FAILED, reason, now_s)

    def advance(self, now_s: float) -> bool:
        """Advance the resize after any event; return whether an operation was requested, or the resize undone."""
        resize = self._running
        if resize is None:
            return False
        instances, requested = self._mesh.instances, resize.requested
        starting = [member.instance_id for member in requested.starts if member.instance_id not in instances]
        flipping = [
            member
            for member in requested.flips
            if (each := instances.get(member.instance_id))
            and (each.role is not member.role or self._operations.running_on(member.instance_id) is not None)
        ]
        leaving = [each for each in requested.leaves if each in instances]
        ending = [each for each in requested.leaves if each not in instances and self._actuators.may_run(each)]
        self._say(resize, starting, [member.instance_id for member in flipping], leaving, ending)
        if (reason := self._why_hopeless(resize, flipping, leaving)) is not None:
            self._take_back(resize, OperationState.FAILED, reason, now_s)
            return True
        if flipping:
            # One after the other: the others serve.
            member = flipping[0]
            return self._ask(resize, OperationKind.ROLE, member.instance_id, now_s, role=member.role)
        if starting:
            if resize.began_s + requested.start_timeout_s <= now_s:
                reason = f"{', '.join(starting)} did not register within {requested.start_timeout_s:g} s"
                self._take_back(resize, OperationState.FAILED, reason, now_s)
                return True
            return False
        asked = [self._ask(resize, OperationKind.DRAIN, instance_id, now_s) for instance_id in leaving]
        if any(asked):
            return True
        if not leaving and not ending:
            for instance_id in requested.leaves:
                # Another instance may come under its name.
                self._operations.forget(instance_id)
            self._end(resize, OperationState.DONE, "", now_s)
        elif all(map(self._is_free, leaving)):
            if resize.empty_since_s == inf:
                resize.empty_since_s = now_s
                self._records.note_change()
            elif resize.empty_since_s + (limit_s := self._end_limit_s(resize)) <= now_s:
                reason = f"the process of {', '.join((*leaving, *ending))} did not end within {limit_s:g} s"
                self._take_back(resize, OperationState.FAILED, reason, now_s)
                return True
        else:
            resize.empty_since_s = inf
        return False

    def _end_limit_s(self, resize: _Resize) -> float:
        """Return the time limit for the actuators to end the processes of all leaving instances."""
        return GONE_S + self._actuators.grace_s(resize.requested.leaves)

    def _why_hopeless(
        self, resize: _Resize, flipping: Sequence[PoolMember], leaving: Sequence[InstanceId]
    ) -> str | None:
        """Return why an operation on an instance failed or was undone; None if all may still succeed."""
        changed = [member.instance_id for member in flipping]
        for instance_id in (*leaving, *changed):
            part = self._records.get(resize.part(instance_id))
            if part is None or part.is_running:
                continue
            if part.state is not OperationState.DONE:
                return f"{part.kind} {instance_id} was {part.state}: {part.detail}"
            if instance_id in changed or self._mesh.instances[instance_id].is_usable:
                return f"{part.kind} {instance_id} was undone"
        return None

    # --- requests ---

    def _refusal(self, resize: _Resize) -> str | None:
        requested = resize.requested
        if (running := self._running) is not None:
            return (
                f"operation {running.operation_id} (pool resize to {running.pools}) runs: wait for it, or "
                f"`pdmesh ops cancel {running.operation_id}`"
            )
        for instance_id in (*(member.instance_id for member in requested.flips), *requested.leaves):
            if (other := self._operations.running_on(instance_id)) is not None:
                return f"operation {other.operation_id} ({other.kind}) runs on {instance_id}: wait for it"
        if not requested.starts and not requested.leaves:
            return None
        if not self._actuators.there:
            resize.needs_actuator = True
            return "no supervisor is connected to start and stop processes"
        if away := self._actuators.away:
            return f"{', '.join(away)} is restarting: try again when it is back"
        rejected_peers = [each for each in requested.leaves if each not in self._actuators.instance_ids]
        if rejected_peers:
            return f"{', '.join(rejected_peers)} would have to stop, but was not started by this mesh's supervisor"
        return self._actuators.why_stays(requested.leaves) or self._actuators.why_no_memory(requested.starts)

    def _ask(
        self, resize: _Resize, kind: OperationKind, instance_id: InstanceId, now_s: float, role: Role | None = None
    ) -> bool:
        """Ask for an operation on an instance; return False if it was asked for before.

        The operation is forced, because the pools can serve when the resize is over.
        """
        requested = OperationRequested(
            operation_id=resize.part(instance_id),
            kind=kind,
            instance_id=instance_id,
            timeout_s=resize.requested.timeout_s,
            role=role,
            force=True,
        )
        if self._records.get(requested.operation_id) is not None:
            return False
        self._operations.request(requested, now_s)
        return True

    def _take_back(self, resize: _Resize, state: OperationState, reason: str, now_s: float) -> None:
        """End the resize in ``state``, cancel its operations under way, and request a resize that undoes it.

        Started instances leave, and leaving ones stay or start again. Changed roles stay. No resize is requested if no
        instance has to start or leave.
        """
        instances, requested = self._mesh.instances, resize.requested
        self._end(resize, state, reason, now_s)
        back: list[PoolMember] = []
        for instance_id in (*requested.leaves, *(member.instance_id for member in requested.flips)):
            part = self._records.get(resize.part(instance_id))
            if part is not None and part.is_running:
                self._operations.cancel(part.operation_id, now_s)
        for instance_id, role in (resize.roles or {}).items():
            instance = instances.get(instance_id)
            self._operations.forget(instance_id)
            if instance is None or instance.draining:
                back.append(PoolMember(instance_id=instance_id, role=role))
            else:
                self._operations.use_again(instance)
        if not requested.starts and not back:
            self._desired = None
            return
        again = replace(
            requested,
            operation_id=OperationId(f"{requested.operation_id}/back"),
            pools=resize.before,
            again=True,
            flips=(),
            starts=tuple(back),
            leaves=tuple(member.instance_id for member in requested.starts),
        )
        self.request(again, now_s)

    def _say(
        self,
        resize: _Resize,
        starting: Sequence[str],
        flipping: Sequence[str],
        leaving: Sequence[str],
        ending: Sequence[str],
    ) -> None:
        parts = (
            (flipping, "to get another role"),
            (starting, "to start"),
            (leaving, "to leave"),
            (ending, "to end its process"),
        )
        detail = "; ".join(f"{', '.join(names)} {what}" for names, what in parts if names)
        self._records.tell(resize, detail, sum(len(names) for names, _ in parts))

    def _end(self, resize: _Resize, state: OperationState, detail: str, now_s: float) -> None:
        self._records.end(resize, state, detail, now_s)
        if self._running is resize:
            self._running = None

    def _sizes(self) -> PoolCounts:
        counts = Counter(instance.role for instance in self._mesh.instances.values())
        return PoolCounts(prefill=counts[Role.PREFILL], decode=counts[Role.DECODE], mixed=counts[Role.MIXED])

    def _is_free(self, instance_id: InstanceId) -> bool:
        """Whether an instance gets no new work, serves no request, and is not being drained of cached prefixes."""
        instance = self._mesh.instances[instance_id]
        return (
            not instance.is_usable
            and self._operations.running_on(instance_id) is None
            and all(allocation.kind is AllocationKind.FETCH for allocation in instance.allocations.values())
        )
