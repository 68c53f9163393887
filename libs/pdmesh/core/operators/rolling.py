"""Rolling restart of every process in turn: instances, gateways, the scheduler. No stream breaks.

A rolling restart is an operation that consists of others, whose ids begin with its own. Before the last instance of a
kind restarts, a temporary one is started, and leaves once that kind is done. New weights may work with none of the old
ones. Then the order ensures that instances of one identity can serve at any time. The remaining work is a list of
processes, and each part names the process to end, so nothing is restarted twice. The restart continues under the next
scheduler, which is the last process.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from math import inf
from typing import Any

from pdmesh.core.instances.instance import InstanceState
from pdmesh.core.instances.revisions import is_needed, role_that_new_weights_lack
from pdmesh.core.mesh_state import MeshState
from pdmesh.core.operator_events import (
    OldProcess,
    OperationRequested,
    ResizeRequested,
    RollingPart,
    RollingRequested,
)
from pdmesh.core.operators.actuators import Actuators
from pdmesh.core.operators.instance_operations import Operations
from pdmesh.core.operators.operation_records import TAKEN_BACK, OperationRecord, OperationRecords
from pdmesh.core.operators.pools import Pools
from pdmesh.core.operators.replacements import Replacements
from pdmesh.model import InstanceId, Role
from pdmesh.operations import OperationId, OperationKind, OperationState, PoolCounts, ProcessKind

_ROLES, _KINDS = tuple(Role), tuple(ProcessKind)

#: Largest number of temporary instances: one to prefill and one to decode, if they have new weights.
_MOST_BESIDE = 2


@dataclass(slots=True, eq=False, kw_only=True)
class _Rolling(OperationRecord):
    """A rolling restart. `requested` includes its remaining work.

    Until `settles_by_s`, some processes may not have registered with a new scheduler. `waits_by_s` limits the wait for
    an absent instance.
    """

    requested: RollingRequested
    settles_by_s: float = -inf
    waits_by_s: float | None = None


class RollingRestarts:
    """Restarts of every process, in one operation at a time."""

    def __init__(
        self,
        mesh: MeshState,
        records: OperationRecords,
        actuators: Actuators,
        operations: Operations,
        pools: Pools,
        replacements: Replacements,
    ) -> None:
        self._mesh = mesh
        self._records = records
        self._actuators = actuators
        self._operations = operations
        self._pools = pools
        self._replacements = replacements
        self._running: _Rolling | None = None

    @property
    def desired(self) -> RollingRequested | None:
        """The request of the rolling restart that runs, for the next scheduler; None if none runs."""
        return None if self._running is None else self._running.requested

    @property
    def temporary(self) -> tuple[InstanceId, ...]:
        """Instances that are here, or start, only while a rolling restart needs them."""
        requested, pools = self.desired, self._pools.desired
        if requested is None:
            return ()
        grows = requested.part is not None and requested.part.grows is not None
        starting = () if pools is None or not grows else pools.starts
        return (*requested.beside, *(each.instance_id for each in starting))

    @property
    def next_deadline_s(self) -> float:
        """Time when a waiting rolling restart stops waiting; infinite if it does not wait."""
        rolling = self._running
        if rolling is None:
            return inf
        part = rolling.requested.part
        has_begun = part is not None and self._records.get(part.operation_id) is not None
        waits_by_s = inf if rolling.waits_by_s is None or has_begun else rolling.waits_by_s
        return waits_by_s if rolling.settles_by_s == -inf else min(waits_by_s, rolling.settles_by_s)

    # --- requests ---

    def request(self, requested: RollingRequested, now_s: float) -> None:
        """Begin a rolling restart, or refuse it before anything has changed; or continue an earlier scheduler's."""
        if not requested.again:
            requested = replace(requested, left=self._processes())
        rolling = _Rolling(
            operation_id=requested.operation_id,
            kind=OperationKind.ROLLING,
            timeout_s=requested.timeout_s,
            began_s=now_s - requested.age_s,
            num_left=len(requested.left),
            requested=requested,
        )
        self._records.add(rolling)
        refusal = None if requested.again else self._refusal(rolling)
        if refusal is not None:
            self._records.end(rolling, OperationState.REFUSED, refusal, now_s)
            return
        if requested.again:
            rolling.settles_by_s = now_s + requested.patience_s
        self._running = rolling

    def cancel(self, operation_id: OperationId, now_s: float) -> bool:
        """Cancel the rolling restart. Return False if it does not run here.

        The process under restart is still restarted, and temporary instances leave.
        """
        rolling = self._running
        if rolling is None or rolling.operation_id != operation_id:
            return False
        if rolling.requested.ends_as is None:
            part = rolling.requested.part
            self._records.tell(rolling, _both(TAKEN_BACK, rolling.detail))
            self._change(rolling, ends_as=OperationState.CANCELLED, why=TAKEN_BACK)
            if part is not None and part.grows is not None:
                self._pools.cancel(part.operation_id, now_s)
        return True

    def _processes(self) -> tuple[OldProcess, ...]:
        """Return all processes in the order of their restarts."""
        instances = sorted(self._mesh.instances.values(), key=lambda each: (_ROLES.index(each.role), each.instance_id))
        services = sorted(self._actuators.services, key=lambda each: (_KINDS.index(each.kind), each.name))
        return (
            *(OldProcess(name=each.instance_id, pid=each.profile.pid, is_instance=True) for each in instances),
            *(OldProcess(name=each.name, pid=each.pid, is_instance=False) for each in services if each.pid),
        )

    def _refusal(self, rolling: _Rolling) -> str | None:
        running = [each for each in (self._running, self._pools.running) if each is not None]
        for other in running:
            return f"operation {other.operation_id} ({other.kind}) runs: wait for it"
        instances, actuators = self._mesh.instances, self._actuators
        if not instances:
            return "the mesh has no instances"
        if away := actuators.away:
            return f"{', '.join(away)} is restarting: try again when it is back"
        last = next((each for each in instances.values() if self._is_last(each)), None)
        if rolling.requested.force or last is None:
            return None
        if not actuators.there:
            rolling.needs_actuator = True
            return (
                f"without {last.instance_id} no request can be served, and no supervisor is connected to start "
                "another: start one first, or use --force"
            )
        available_bytes = max(report.available_bytes for report in actuators.there)
        if actuators.instance_bytes > available_bytes:
            return (
                f"another instance beside {last.instance_id} takes about {actuators.instance_bytes / 2**30:.1f} GiB of "
                f"memory, and {available_bytes / 2**30:.1f} GiB are free: free some, or --force"
            )
        return None

    def _is_last(self, instance: InstanceState) -> bool:
        """Whether the usable instances can serve, and could not without this one, or only by decodes beside prompts."""
        others = [each for each in self._mesh.instances.values() if each.is_usable and each is not instance]
        return instance.is_usable and is_needed(instance, others)

    # --- progress ---

    def advance(self, now_s: float) -> bool:
        """Note finished parts, and ask for the next ones; return whether anything was asked for."""
        rolling, has_asked = self._running, False
        while rolling is not None and rolling.is_running and not self._settles(rolling, now_s):
            part = rolling.requested.part or self._next(rolling.requested)
            if part is None:
                self._end(rolling, now_s)
                break
            if self._has_too_many(rolling.requested, part):
                why = f"{', '.join(rolling.requested.beside)} loaded different weights: start the rolling restart again"
                self._change(rolling, ends_as=OperationState.FAILED, why=_both(rolling.requested.why, why))
                continue
            self._change(rolling, part=part)
            record = self._records.get(part.operation_id)
            if record is None:
                if part.grows is not None and rolling.requested.ends_as is not None:
                    self._change(rolling, part=None)
                    continue
                if part.restarts is None and self._waits(rolling, now_s):
                    break
                self._ask(rolling.requested, part, now_s)
                has_asked = True
                record = self._records.get(part.operation_id)
            if record is not None and record.is_running:
                self._say(rolling, part, record)
                break
            self._note(rolling, part, record)
        return has_asked

    def _settles(self, rolling: _Rolling, now_s: float) -> bool:
        """Whether to wait for all processes to register with a new scheduler: missing ones would count as absent."""
        is_whole = self._actuators.there and not self._actuators.away
        if rolling.settles_by_s > now_s and not is_whole:
            self._records.tell(rolling, "waiting for all processes to register with the scheduler")
            return True
        rolling.settles_by_s = -inf
        return False

    def _waits(self, rolling: _Rolling, now_s: float) -> bool:
        """Whether to wait for absent instances to register, or for an actuator to report a temporary instance.

        Pools cannot change during the wait. The first call begins the wait, which ends after the time limit of a start.
        """
        followed = self._actuators.instance_ids
        strange = [each for each in rolling.requested.beside if each in self._mesh.instances and each not in followed]
        away = [*self._actuators.away, *strange]
        if not away:
            rolling.waits_by_s = None
            return False
        if rolling.waits_by_s is None:
            rolling.waits_by_s = now_s + rolling.requested.start_timeout_s
        self._records.tell(rolling, f"waiting for {', '.join(away)} to come back")
        return now_s < rolling.waits_by_s

    def _next(self, requested: RollingRequested) -> RollingPart | None:
        """Return the next part: replace a process, or add or remove a temporary instance. None if nothing is left.

        A temporary instance is added before a process that the mesh cannot serve without, unless ``force`` is set. It
        leaves when no process is left of its role, and the new weights do not lack that role without it.
        """
        instances = self._mesh.instances
        left = () if requested.ends_as is not None else requested.left
        there = {each: instances[InstanceId(each.name)] for each in left if each.name in instances}
        lasting = [each for each in instances.values() if each.instance_id not in requested.beside]
        roles = {instances[each].role for each in requested.beside if each in instances}
        needed = {instance.role for instance in there.values()}
        if there and (role := role_that_new_weights_lack(lasting)) is not None:
            needed.add(role)
        if requested.beside and roles.isdisjoint(needed):
            return RollingPart(operation_id=self._new_name(requested, "fewer", requested.beside[0]))
        if not left:
            return None
        process, lacking = left[0], role_that_new_weights_lack(instances.values())
        if lacking is not None:
            # The first process that is not needed brings the new weights nearer to serving.
            process = next((each for each in there if not self._is_last(there[each])), process)
        if process in there and not requested.force and self._is_last(there[process]):
            role = lacking or there[process].role
            return RollingPart(operation_id=self._new_name(requested, "more", role), grows=role)
        return RollingPart(operation_id=_name(requested, process.name), restarts=process)

    def _new_name(self, requested: RollingRequested, *parts: str) -> OperationId:
        """Return an id that no recorded operation has, since the pools may change twice in the same way."""
        name, number = _name(requested, *parts), 1
        while self._records.get(name) is not None:
            number += 1
            name = _name(requested, *parts, str(number))
        return name

    @staticmethod
    def _has_too_many(requested: RollingRequested, part: RollingPart) -> bool:
        """Whether the part would start another temporary instance although `_MOST_BESIDE` are there."""
        return requested.part is None and part.grows is not None and len(requested.beside) >= _MOST_BESIDE

    def _ask(self, requested: RollingRequested, part: RollingPart, now_s: float) -> None:
        if (process := part.restarts) is not None:
            restart = OperationRequested(
                operation_id=part.operation_id,
                kind=OperationKind.RESTART,
                instance_id=InstanceId(process.name),
                timeout_s=requested.timeout_s,
                force=requested.force,
                pid=process.pid,
            )
            carrier = self._operations if process.is_instance else self._replacements
            carrier.request(restart, now_s)
            return
        there = Counter(each.role for each in self._mesh.instances.values())
        if part.grows is None:
            there.subtract(each.role for each in self._mesh.instances.values() if each.instance_id in requested.beside)
        else:
            there[part.grows] += 1
        resize = ResizeRequested(
            operation_id=part.operation_id,
            pools=PoolCounts(**{str(role): max(0, there[role]) for role in Role}),
            timeout_s=requested.timeout_s,
            start_timeout_s=requested.start_timeout_s,
            leaves=() if part.grows else requested.beside,
        )
        self._pools.request(resize, now_s)

    def _note(self, rolling: _Rolling, part: RollingPart, record: OperationRecord | None) -> None:
        """Note the end of a part; without a record it was never begun."""
        requested = replace(rolling.requested, part=None)
        done = record is not None and record.state is OperationState.DONE
        if part.restarts is not None:
            if done:
                left = tuple(each for each in requested.left if each != part.restarts)
                requested = replace(requested, left=left)
        elif part.grows is None:
            # A failed shrink is not tried again.
            requested = replace(requested, beside=())
        elif done:
            # Without a started instance, the same part would be next, and without end.
            grown = self._pools.desired
            started = () if grown is None else tuple(each.instance_id for each in grown.starts)
            requested, done = replace(requested, beside=(*requested.beside, *started)), bool(started)
        is_last = part.restarts is None and part.grows is None
        # A part that was cancelled with the restart counts as done.
        if not done and (is_last or requested.ends_as is None):
            outcome = "not recorded" if record is None else f"{record.state}: {record.detail}".rstrip(": ")
            what = f"the restart of {part.restarts.name}" if part.restarts else "the change of the pools"
            why = f"{what} was {outcome}"
            if is_last:
                beside = ", ".join(rolling.requested.beside)
                why += f"; temporary instance {beside} may still run: remove it with `pdmesh pool resize`"
            requested = replace(requested, ends_as=OperationState.FAILED, why=_both(requested.why, why))
        self._set(rolling, requested)

    def _change(self, rolling: _Rolling, **changes: Any) -> None:
        self._set(rolling, replace(rolling.requested, **changes))

    def _set(self, rolling: _Rolling, requested: RollingRequested) -> None:
        if requested != rolling.requested:
            rolling.requested, rolling.num_left = requested, len(requested.left)
            self._records.note_change()

    def _say(self, rolling: _Rolling, part: RollingPart, record: OperationRecord) -> None:
        if part.restarts is not None:
            detail = f"{part.restarts.name}: {record.detail or f'{record.num_left} requests leave it'}"
        elif part.grows is not None:
            detail = f"temporary instance beside the last {part.grows} instance: {record.detail}"
        else:
            detail = f"removal of the temporary instance: {record.detail}"
        self._records.tell(rolling, _both(rolling.requested.why, detail))

    def _end(self, rolling: _Rolling, now_s: float) -> None:
        requested, self._running = rolling.requested, None
        self._records.end(rolling, requested.ends_as or OperationState.DONE, requested.why, now_s)


def _name(requested: RollingRequested, *parts: str) -> OperationId:
    return OperationId("/".join((requested.operation_id, *parts)))


def _both(why: str, detail: str) -> str:
    return "; ".join(filter(None, (why, detail)))
