"""Pools of other sizes: which instances get another role, which are started, which leave, and in which order.

A resize is an operation. What it wants of single instances are operations too (`pdmesh.core.operators.operations`),
under ids that begin with its own. It is refused before anything changes, or runs: roles change first, since that costs
least; what is missing is started; only when all that is there does the rest leave. It is done when the processes of
those that left have ended. Who starts and stops processes, the *actuator*, reads `Pools.desired`, and says which there
are. A resize that fails, or is cancelled, is taken back by another one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import NamedTuple

from pdmesh.core.instances.instance import InstanceState
from pdmesh.core.mesh_state import MeshState
from pdmesh.core.operator_events import InstanceStartFailed, OperationRequested, ProcessesReported, ResizeRequested
from pdmesh.core.operators.operations import Operations
from pdmesh.core.operators.records import TAKEN_BACK, OperationRecord, OperationRecords, OperationState, OperationView
from pdmesh.model import InstanceId, OperationId, OperationKind, PoolCounts, PoolMember, Role

#: For a process on which nothing is left to end, once its actuator has been told.
GONE_S = 60.0


class DesiredPools(NamedTuple):
    """What an actuator has to do, unless it is done already."""

    start: tuple[PoolMember, ...]
    stop: tuple[InstanceId, ...]  # nothing is left on them, or they are not there


class PoolPlan(NamedTuple):
    """The way from the present pools to others."""

    flips: tuple[PoolMember, ...]  # get the role that is said
    starts: tuple[PoolMember, ...]
    leaves: tuple[InstanceId, ...]


def plan_pools(
    instances: Iterable[InstanceState], wanted: PoolCounts, name_prefix: str = "", first: Collection[InstanceId] = ()
) -> PoolPlan:
    """Change as few processes as possible. ``first`` go first, then those that do least; of equal ones, the newest."""
    there = list(instances)
    surplus: list[InstanceState] = []
    missing: list[Role] = []
    for role in Role:
        of_role = sorted((each for each in there if each.role is role), key=_least_used)
        of_role.sort(key=lambda each: each.instance_id not in first)
        num_more = wanted.of(role) - len(of_role)
        missing += [role] * num_more
        surplus += of_role[: max(0, -num_more)]
    flips = [PoolMember(instance_id=each.instance_id, role=role) for each, role in zip(surplus, missing, strict=False)]
    names = {each.instance_id for each in there}
    starts: list[PoolMember] = []
    for role in missing[len(flips) :]:
        number = 0
        while (name := InstanceId(f"{name_prefix}{role}-{number}")) in names:
            number += 1
        names.add(name)
        starts.append(PoolMember(instance_id=name, role=role))
    leaves = [each.instance_id for each in surplus[len(flips) :]]
    return PoolPlan(tuple(flips), tuple(starts), tuple(leaves))


def _least_used(instance: InstanceState) -> tuple[bool, int, int]:
    return instance.is_usable, len(instance.allocations), -instance.number


@dataclass(slots=True, eq=False, kw_only=True)
class _Resize(OperationRecord):
    wish: ResizeRequested
    before: PoolCounts
    gone_by_s: float = inf  # when the actuator should have stopped all that leave
    roles: dict[InstanceId, Role] | None = None  # of those that leave, to start them again

    def part(self, instance_id: InstanceId) -> OperationId:
        """Names the operation on one instance."""
        return OperationId(f"{self.wish.operation_id}/{instance_id}")


class Pools:
    """Resizes the pools, one at a time. What is wanted outlives the resize, and schedulers."""

    def __init__(self, mesh: MeshState, operations: Operations) -> None:
        self._mesh = mesh
        self._operations = operations
        self._resizes: OperationRecords[_Resize] = OperationRecords()
        self._running: _Resize | None = None
        self._wanted: ResizeRequested | None = None  # the last one that was taken on
        self._processes: Collection[InstanceId] | None = None  # that the actuator has; None: it has not said
        self.num_changes = 0

    @property
    def views(self) -> list[OperationView]:
        return self._resizes.views

    @property
    def wish(self) -> ResizeRequested | None:
        """What is wanted of the pools, for the next scheduler."""
        return self._wanted

    @property
    def desired(self) -> DesiredPools:
        """What the actuator has to do; nothing if no pool was ever resized."""
        if self._wanted is None:
            return DesiredPools((), ())
        instances = self._mesh.instances
        stop = [each for each in self._wanted.leaves if each not in instances or _is_free(instances[each])]
        return DesiredPools(self._wanted.starts, tuple(stop))

    @property
    def next_deadline_s(self) -> float:
        resize = self._running
        if resize is None:
            return inf
        instances = self._mesh.instances
        if any(self._operations.running_on(member.instance_id) is not None for member in resize.wish.flips):
            return inf  # each is an operation of its own, with its own limit
        started = all(member.instance_id in instances for member in resize.wish.starts)
        return resize.gone_by_s if started else resize.began_s + resize.wish.start_timeout_s

    def knows(self, operation_id: OperationId) -> bool:
        return operation_id in self._resizes

    # --- events ---

    def request(self, wish: ResizeRequested, now_s: float) -> None:
        if wish.operation_id in self._resizes:
            return  # asked again
        self.num_changes += 1
        resize = _Resize(
            operation_id=wish.operation_id,
            kind=OperationKind.RESIZE,
            timeout_s=wish.timeout_s,
            began_s=now_s,
            pools=wish.pools,
            wish=wish,
            before=self._sizes(),
        )
        self._resizes.add(resize)
        if not wish.again:
            prefix = wish.actuator.name_prefix if wish.actuator else ""
            plan = plan_pools(self._mesh.instances.values(), wish.pools, prefix, wish.leaves)
            resize.wish = wish = replace(wish, flips=plan.flips, starts=plan.starts, leaves=plan.leaves)
            if (refusal := self._refusal(resize)) is not None:
                self._end(resize, OperationState.REFUSED, refusal, now_s)
                return
        resize.roles = {each: self._mesh.instances[each].role for each in wish.leaves if each in self._mesh.instances}
        for member in wish.starts:
            self._operations.forget(member.instance_id)
        self._running, self._wanted = resize, replace(wish, again=True, actuator=None)

    def cancel(self, operation_id: OperationId, now_s: float) -> None:
        """Take a resize back; nothing happens if it is over."""
        resize = self._resizes.get(operation_id)
        if resize is None or resize is not self._running:
            self._mesh.ignore("OperationCancelled")
            return
        self._take_back(resize, OperationState.CANCELLED, TAKEN_BACK, now_s)

    def start_failed(self, event: InstanceStartFailed, now_s: float) -> None:
        resize = self._running
        wanted = () if resize is None else [member.instance_id for member in resize.wish.starts]
        if resize is None or event.instance_id not in wanted or event.instance_id in self._mesh.instances:
            self._mesh.ignore("InstanceStartFailed")
            return
        reason = f"{event.instance_id} could not be started: {event.reason}"
        self._take_back(resize, OperationState.FAILED, reason, now_s)

    def processes_reported(self, event: ProcessesReported) -> None:
        self._processes = frozenset(event.instance_ids)

    def advance(self, now_s: float) -> bool:
        """Look how far the resize is, after any event; whether something was asked of an instance."""
        resize = self._running
        if resize is None:
            return False
        instances, wish = self._mesh.instances, resize.wish
        starting = [member.instance_id for member in wish.starts if member.instance_id not in instances]
        flipping = [
            member
            for member in wish.flips
            if (each := instances.get(member.instance_id))
            and (each.role is not member.role or self._operations.running_on(member.instance_id) is not None)
        ]
        leaving = [each for each in wish.leaves if each in instances]
        ending = [each for each in wish.leaves if each not in instances and self._may_run(each)]
        self._say(resize, starting, [member.instance_id for member in flipping], leaving, ending)
        if (reason := self._why_hopeless(resize, flipping, leaving)) is not None:
            self._take_back(resize, OperationState.FAILED, reason, now_s)
            return True
        if flipping:
            member = flipping[0]  # one after the other: the others serve
            return self._ask(resize, OperationKind.ROLE, member.instance_id, now_s, role=member.role)
        if starting:
            if resize.began_s + wish.start_timeout_s <= now_s:
                reason = f"{', '.join(starting)} did not register within {wish.start_timeout_s:g} s"
                self._take_back(resize, OperationState.FAILED, reason, now_s)
                return True
            return False
        asked = [self._ask(resize, OperationKind.DRAIN, instance_id, now_s) for instance_id in leaving]
        if any(asked):
            return True
        if not leaving and not ending:
            for instance_id in wish.leaves:
                self._operations.forget(instance_id)  # one that comes under its name is another one
            self._end(resize, OperationState.DONE, "", now_s)
        elif all(_is_free(instances[instance_id]) for instance_id in leaving):
            if resize.gone_by_s == inf:
                resize.gone_by_s = now_s + GONE_S
                self.num_changes += 1
            elif resize.gone_by_s <= now_s:
                reason = f"the process of {', '.join((*leaving, *ending))} did not end within {GONE_S:g} s"
                self._take_back(resize, OperationState.FAILED, reason, now_s)
                return True
        else:
            resize.gone_by_s = inf
        return False

    def _why_hopeless(
        self, resize: _Resize, flipping: Sequence[PoolMember], leaving: Sequence[InstanceId]
    ) -> str | None:
        """Why what was asked of an instance will not come true: it failed, or was undone; None if it may."""
        changed = [member.instance_id for member in flipping]
        for instance_id in (*leaving, *changed):
            part = self._operations.find(resize.part(instance_id))
            if part is None or part.state is OperationState.RUNNING:
                continue
            if part.state is not OperationState.DONE:
                return f"{part.kind} {instance_id} was {part.state}: {part.detail}"
            if instance_id in changed or self._mesh.instances[instance_id].is_usable:
                return f"{part.kind} {instance_id} was undone meanwhile"
        return None

    def _may_run(self, instance_id: InstanceId) -> bool:
        """Whether there may be a process of an instance, though that has left: its memory is not free yet."""
        return self._processes is None or instance_id in self._processes

    # --- what is asked for ---

    def _refusal(self, resize: _Resize) -> str | None:
        wish = resize.wish
        if (why_not := wish.pools.why_not) is not None:
            return why_not
        if (running := self._running) is not None:
            return (
                f"operation {running.wish.operation_id} (pool resize to {running.wish.pools}) runs: wait for it, or "
                f"`pdmesh ops cancel {running.wish.operation_id}`"
            )
        for instance_id in (*(member.instance_id for member in wish.flips), *wish.leaves):
            if (other := self._operations.running_on(instance_id)) is not None:
                return f"operation {other.operation_id} ({other.kind}) runs on {instance_id}: wait for it"
        if not wish.starts and not wish.leaves:
            return None
        if (actuator := wish.actuator) is None:
            resize.needs_actuator = True
            return "no supervisor is connected to start and stop processes"
        away = [each for each in actuator.instance_ids if each not in self._mesh.instances]
        if away:
            return f"{', '.join(away)} is restarting: try again when it is back"
        strangers = [each for each in wish.leaves if each not in actuator.instance_ids]
        if strangers:
            return f"{', '.join(strangers)} would have to stop, but was not started by this mesh's supervisor"
        num_bytes = len(wish.starts) * actuator.instance_bytes
        if num_bytes > actuator.available_bytes:
            return (
                f"{len(wish.starts)} more instances need about {num_bytes / 2**30:.1f} GiB of memory, and "
                f"{actuator.available_bytes / 2**30:.1f} GiB are free"
            )
        return None

    def _ask(
        self, resize: _Resize, kind: OperationKind, instance_id: InstanceId, now_s: float, role: Role | None = None
    ) -> bool:
        """Ask for an operation on an instance; False if it was asked for before."""
        wish = OperationRequested(
            operation_id=resize.part(instance_id),
            kind=kind,
            instance_id=instance_id,
            timeout_s=resize.wish.timeout_s,
            role=role,
            force=True,  # pools that can serve are there when it is over
        )
        if self._operations.find(wish.operation_id) is not None:
            return False
        self._operations.request(wish, now_s)
        return True

    def _take_back(self, resize: _Resize, state: OperationState, reason: str, now_s: float) -> None:
        """What was started leaves again, and what was to leave stays, or is started again. Roles that changed stay."""
        instances, wish = self._mesh.instances, resize.wish
        self._end(resize, state, reason, now_s)
        back: list[PoolMember] = []
        for instance_id in (*wish.leaves, *(member.instance_id for member in wish.flips)):
            part = self._operations.find(resize.part(instance_id))
            if part is not None and part.state is OperationState.RUNNING:
                self._operations.cancel(part.operation_id, now_s)
        for instance_id, role in (resize.roles or {}).items():
            instance = instances.get(instance_id)
            self._operations.forget(instance_id)
            if instance is None or instance.draining:
                back.append(PoolMember(instance_id=instance_id, role=role))
            else:
                self._operations.use_again(instance)
        if not wish.starts and not back:
            self._wanted = None
            return
        again = replace(
            wish,
            operation_id=OperationId(f"{wish.operation_id}/back"),
            pools=resize.before,
            again=True,
            actuator=None,
            flips=(),
            starts=tuple(back),
            leaves=tuple(member.instance_id for member in wish.starts),
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
        if detail != resize.detail:
            resize.detail, resize.num_left = detail, sum(len(names) for names, _ in parts)
            self.num_changes += 1

    def _end(self, resize: _Resize, state: OperationState, detail: str, now_s: float) -> None:
        self.num_changes += 1
        resize.end(state, detail, now_s)
        resize.num_left = 0
        if self._running is resize:
            self._running = None

    def _sizes(self) -> PoolCounts:
        counts = Counter(instance.role for instance in self._mesh.instances.values())
        return PoolCounts(prefill=counts[Role.PREFILL], decode=counts[Role.DECODE], mixed=counts[Role.MIXED])


def _is_free(instance: InstanceState) -> bool:
    """Whether nothing is left on an instance, and nothing comes."""
    return not instance.is_usable and not instance.allocations
