"""Restarts of processes that are no instances: gateways, and the scheduler itself. Their actuators replace them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf

from pdmesh.core.operator_events import ActuatorReported, OperationRequested
from pdmesh.core.operators.actuators import Actuators
from pdmesh.core.operators.instance_operations import COME_BACK_S
from pdmesh.core.operators.operation_records import TAKEN_BACK, OperationRecord, OperationRecords
from pdmesh.operations import ManagedProcess, OperationId, OperationState

#: A replacement fails after this time without a report of any actuator.
SILENCE_LIMIT_S = 60.0


@dataclass(slots=True, eq=False, kw_only=True)
class _Replacement(OperationRecord):
    """A replacement. `requested` names the pid of the process to replace."""

    requested: OperationRequested


class Replacements:
    """Replacements of processes, at most one per name at a time."""

    def __init__(self, records: OperationRecords, actuators: Actuators) -> None:
        self._records = records
        self._actuators = actuators
        self._running: dict[OperationId, _Replacement] = {}

    @property
    def desired(self) -> tuple[OperationRequested, ...]:
        """Replacements under way, for the next scheduler: often the scheduler itself is replaced."""
        return tuple(each.requested for each in self._running.values())

    def replaced_by(self, report: ActuatorReported) -> tuple[ManagedProcess, ...]:
        """Return the processes of the report that its actuator should replace."""
        pids = {str(each.instance_id): each.requested.stopped_pid for each in self._running.values()}
        return tuple(replace(each, pid=pids[each.name] or 0) for each in report.processes if each.name in pids)

    @property
    def next_deadline_s(self) -> float:
        """Earliest time at which a running replacement fails unless it is done by then; infinite if none runs."""
        return min((self._deadline_s(each) for each in self._running.values()), default=inf)

    def _deadline_s(self, each: _Replacement) -> float:
        silent_s = max(self._actuators.heard_s, each.began_s) + SILENCE_LIMIT_S
        return min(silent_s, each.began_s + each.timeout_s + COME_BACK_S)

    def _pids(self, name: str) -> Sequence[int]:
        return [each.pid for each in self._actuators.services if each.name == name and each.pid]

    # --- events ---

    def takes(self, name: str) -> bool:
        """Whether a process that is no instance has this name."""
        return any(each.name == name for each in self._actuators.services)

    def request(self, requested: OperationRequested, now_s: float) -> None:
        """Let an actuator replace the named process: ``requested.pid``, or the present one.

        Refused while another replacement of the process runs. Done at once if another process is there already.
        """
        pids = self._pids(requested.instance_id)
        if not requested.again:
            pid = requested.pid or (pids[0] if pids else 0)
            requested = replace(requested, stopped_pid=pid, of_service=True)
        added = _Replacement(
            operation_id=requested.operation_id,
            kind=requested.kind,
            timeout_s=requested.timeout_s,
            began_s=now_s,
            instance_id=requested.instance_id,
            detail="its process is being replaced",
            requested=requested,
        )
        self._records.add(added)
        other = next((each for each in self._running.values() if each.instance_id == requested.instance_id), None)
        if other is not None:
            what = f"operation {other.operation_id} ({other.kind}) runs on {other.instance_id}: wait for it"
            self._records.end(added, OperationState.REFUSED, what, now_s)
        elif pids and requested.stopped_pid not in pids:
            self._records.end(added, OperationState.DONE, "another process registered as this instance first", now_s)
        else:
            self._running[added.operation_id] = added

    def cancel(self, operation_id: OperationId, now_s: float) -> bool:
        """Cancel a replacement; return whether it ran here. The actuator completes a replacement that has begun."""
        found = self._running.pop(operation_id, None)
        if found is not None:
            self._records.end(found, OperationState.CANCELLED, TAKEN_BACK, now_s)
        return found is not None

    def advance(self, now_s: float) -> None:
        """End the replacements that are done, or have taken too long."""
        for each in list(self._running.values()):
            pids = self._pids(each.instance_id)
            if pids and each.requested.stopped_pid not in pids:
                self._end(each, OperationState.DONE, "", now_s)
            elif self._deadline_s(each) <= now_s:
                silent_s = now_s - max(self._actuators.heard_s, each.began_s)
                is_silent = silent_s >= SILENCE_LIMIT_S
                why = (
                    f"the supervisor has been silent for {silent_s:.0f} s"
                    if is_silent
                    else "no successor process serves"
                )
                self._end(each, OperationState.FAILED, why, now_s)

    def _end(self, each: _Replacement, state: OperationState, detail: str, now_s: float) -> None:
        del self._running[each.operation_id]
        self._records.end(each, state, detail, now_s)
