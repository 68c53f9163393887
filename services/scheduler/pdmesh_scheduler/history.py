"""What happened to the mesh (losses, joins, drains, policies), for ``pdmesh status`` and the web page.

All entries come from events that the core has handled, with the times of these events. The history is bounded. Each
scheduler begins a new one.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from pdmesh.core.events import (
    DrainRequested,
    GatewayJoined,
    GatewayLost,
    InstanceJoined,
    InstanceLost,
    InstanceSuspected,
    InstanceUnreachable,
)
from pdmesh.core.operator_events import (
    UNKNOWN_PID,
    ActuatorLost,
    ActuatorReported,
    BatchingChangeRequested,
    BundleChangeRequested,
    EndedProcess,
)
from pdmesh.core.operators.operation_records import OperationRecord
from pdmesh.core.scheduler import SchedulerCore
from pdmesh.model import InstanceId, InstanceProfile
from pdmesh.operations import OperationId, OperationKind, OperationState
from pdmesh.policy.views import InstanceView
from pdmesh.wire.messages import GoneInstance, InstanceNote, MeshEvent
from pdmesh_scheduler.observing import Handled

#: Number of remembered events.
MAX_EVENTS = 64
#: Number of remembered instances that were lost or left.
MAX_GONE = 32
#: Seconds for which an instance that left is listed.
LEFT_S = 600.0
#: Seconds for which a restart is shown beside the instance that serves again.
RESTARTED_S = 600.0
#: Largest delay, in seconds, of the report that a process ended after its successor has joined.
REPORT_S = 10.0
#: Longest cause, and longest name of an ended process, in characters.
MAX_CAUSE = 300

_SILENT = "fell silent"
_STREAM_BROKE = "lost its stream"
_STOPPING = "began to stop"


@dataclass(slots=True)
class _Absence:
    """A time in which an instance does not serve, or is about to stop. `pid` is the process that served before."""

    since_s: float
    cause: str
    is_planned: bool = False
    pid: int = 0
    ended_s: float | None = None

    def is_of(self, ended: EndedProcess, now_s: float) -> bool:
        """Return whether the process end reported at ``now_s`` caused this absence.

        The pids are compared. If the report has none, any absence that has just begun counts.
        """
        if ended.pid == UNKNOWN_PID:
            return self.ended_s is None or now_s < self.ended_s + REPORT_S
        return self.pid == ended.pid


@dataclass(slots=True)
class _Instance:
    """An instance that is connected, or was.

    `absence` is the latest one, and `failed_start` says why the last start of a new process failed.
    """

    profile: InstanceProfile
    joined_s: float
    num_restarts: int = 0
    absence: _Absence | None = None
    failed_start: str = ""

    @property
    def open_absence(self) -> _Absence | None:
        return None if self.absence is None or self.absence.ended_s is not None else self.absence


@dataclass(slots=True)
class _Event:
    """An event. The cause of an absence may become known after the event."""

    at_s: float
    what: str
    name: str = ""
    detail: str = ""
    absence: _Absence | None = None
    away_s: float = 0.0

    @property
    def text(self) -> str:
        cause = "" if self.absence is None else self.absence.cause
        return "; ".join(filter(None, (cause, self.detail)))


class MeshHistory:
    """Bounded history of the mesh; implements `pdmesh_scheduler.observing.Observer`."""

    def __init__(self, core: SchedulerCore, wall_time: Callable[[float], float], began_s: float) -> None:
        """Begin with the event that the scheduler started at ``began_s``, a time of the core's clock.

        ``wall_time`` turns a time of that clock into Unix time.
        """
        self._core = core
        self.wall_time = wall_time
        self._there: dict[InstanceId, _Instance] = {}
        self._gone: dict[InstanceId, _Instance] = {}  # ordered by time of loss
        self._events: deque[_Event] = deque(maxlen=MAX_EVENTS)
        self._reported: dict[str, Sequence[EndedProcess]] = {}
        self._operations: dict[OperationId, OperationState] = {}
        self._num_operation_changes = 0
        self._add(began_s, "started", "scheduler", "earlier events are only in logs")

    # --- what happens ---

    def observe(self, handled: Handled) -> None:
        """Add the event to the history if operators ask about events of this kind."""
        event, now_s = handled.event, handled.now_s
        match event:
            case InstanceJoined():
                self._joined(event, now_s)
            case InstanceUnreachable():
                self._absent(event.instance_id, now_s, _STREAM_BROKE)
            case InstanceSuspected(suspected=True):
                self._absent(event.instance_id, now_s, _SILENT)
            case InstanceSuspected():
                self._returned(event.instance_id, _SILENT)
            case InstanceLost():
                self._lost(event.instance_id, now_s)
            case DrainRequested(enabled=True):
                self._absent(event.instance_id, now_s, _STOPPING, is_planned=True)
            case DrainRequested():
                self._returned(event.instance_id, _STOPPING)
            case ActuatorReported():
                # A report that a change interrupts is sent again, with the ends that it had.
                for ended in (Counter(event.ended) - Counter(self._reported.get(event.actuator_id, ()))).elements():
                    self._ended(ended, now_s)
                self._reported[event.actuator_id] = event.ended
            case ActuatorLost():
                self._reported.pop(event.actuator_id, None)
                self._add(now_s, "supervisor lost", detail="no instance is started or stopped until it is back")
            case GatewayJoined():
                self._add(now_s, "gateway joined", event.gateway_id)
            case GatewayLost():
                self._add(now_s, "gateway lost", event.gateway_id, "its requests ended")
            case BundleChangeRequested():
                self._add(now_s, "policy set", detail=handled.bundle)
            case BatchingChangeRequested():
                self._add(now_s, "batching set", detail=event.batching or "as the policy chooses")
            case _:
                pass
        if self._core.num_operation_changes != self._num_operation_changes:
            self._num_operation_changes = self._core.num_operation_changes
            self._note_operations(now_s)

    def fell_silent(self, instance_id: InstanceId, now_s: float) -> None:
        """Note that an instance is lost for its silence though its stream is open."""
        self._absent(instance_id, now_s, _SILENT)

    def _add(
        self,
        at_s: float,
        what: str,
        name: str = "",
        detail: str = "",
        absence: _Absence | None = None,
        away_s: float = 0.0,
    ) -> None:
        self._events.append(_Event(at_s, what, name, detail, absence, away_s))

    def _joined(self, event: InstanceJoined, now_s: float) -> None:
        profile = event.profile
        instance_id = profile.instance_id
        before = self._gone.pop(instance_id, None) or self._there.get(instance_id)
        instance = self._there[instance_id] = _Instance(profile, now_s)
        if before is None:
            self._add(now_s, "joined", instance_id)
            return
        instance.num_restarts = before.num_restarts
        absence = before.open_absence or _Absence(now_s, _STREAM_BROKE, pid=before.profile.pid)
        absence.ended_s, away_s = now_s, now_s - absence.since_s
        if before.profile.is_process_of(profile):
            instance.joined_s = before.joined_s
            detail = f"the same process reconnected after {away_s:.1f} s"
            self._add(now_s, "joined again", instance_id, detail, absence, away_s)
        else:
            instance.num_restarts += 1
            instance.absence = absence
            detail = f"process {profile.pid} serves after {away_s:.1f} s"
            self._add(now_s, "restarted", instance_id, detail, absence, away_s)

    def _absent(self, instance_id: InstanceId, now_s: float, cause: str, *, is_planned: bool = False) -> None:
        instance = self._there.get(instance_id)
        if instance is None:
            return
        absence = instance.open_absence
        if absence is None:
            instance.absence = _Absence(now_s, cause, is_planned, instance.profile.pid)
        elif is_planned or absence.cause == _SILENT or (absence.is_planned and cause == _STREAM_BROKE):
            absence.cause, absence.is_planned = cause, is_planned

    def _returned(self, instance_id: InstanceId, cause: str) -> None:
        """End an instance's open absence if it has this cause."""
        instance = self._there.get(instance_id)
        if instance is not None and (absence := instance.open_absence) is not None and absence.cause == cause:
            instance.absence = None

    def _lost(self, instance_id: InstanceId, now_s: float) -> None:
        instance = self._there.pop(instance_id, None)
        if instance is None:
            return
        absence = instance.open_absence
        if absence is None:  # a goodbye: neither silent nor without a stream
            absence = _Absence(now_s, "", True, instance.profile.pid)
        if absence.is_planned:
            operation = self._operation_on(instance_id)
            why = f" for operation {operation.operation_id} ({operation.kind})" if operation is not None else ""
            absence.since_s, absence.cause = now_s, f"stopped{why}"
        instance.absence = absence
        self._gone[instance_id] = instance
        if len(self._gone) > MAX_GONE:
            del self._gone[next(iter(self._gone))]
        self._add(now_s, "left" if absence.is_planned else "lost", instance_id, absence=absence)

    def _ended(self, ended: EndedProcess, now_s: float) -> None:
        """Record why a process ended, as the cause of its instance's absence or as an event.

        A planned absence keeps its cause. An event is added for a process that never served or is no known instance.
        The report may come before or after the loss, or after the successor has joined.
        """
        cause = ended.cause[:MAX_CAUSE]
        name = InstanceId(ended.name[:MAX_CAUSE])
        instance = self._there.get(name) or self._gone.get(name)
        if instance is None:
            self._add(now_s, "ended", name, f"{cause}; its supervisor replaces it")
        elif not ended.has_served:
            instance.failed_start = cause
            self._add(now_s, "start failed", name, cause)
        elif (absence := instance.absence) is not None and absence.is_of(ended, now_s):
            if not absence.is_planned:
                absence.cause = cause
        elif instance.profile.pid == ended.pid:
            instance.absence = _Absence(now_s, cause, pid=ended.pid)

    def _note_operations(self, now_s: float) -> None:
        before, self._operations = self._operations, {}
        for each in self._core.operations:
            self._operations[each.operation_id] = each.state
            is_part = "/" in each.operation_id
            if not is_part and before.get(each.operation_id) is not each.state:
                is_new = each.state is OperationState.RUNNING
                detail = f"operation {each.operation_id} {'began' if is_new else each.state}"
                self._add(now_s, each.kind, each.instance_id, detail + (f": {each.detail}" if each.detail else ""))

    def _operation_on(self, instance_id: InstanceId) -> OperationRecord | None:
        """Return the latest operation on an instance if it drains or restarts the instance, or did; otherwise None."""
        kinds = (OperationKind.DRAIN, OperationKind.RESTART)
        states = (OperationState.RUNNING, OperationState.DONE)
        for each in reversed(self._core.operations):
            if each.instance_id == instance_id and each.state in states:
                return each if each.kind in kinds else None
        return None

    # --- the present state ---

    @property
    def events(self) -> tuple[MeshEvent, ...]:
        """The latest events, the newest last."""
        return tuple(
            MeshEvent(
                at=self.wall_time(event.at_s), what=event.what, name=event.name, detail=event.text, away_s=event.away_s
            )
            for event in self._events
        )

    def gone(self, silent: Collection[InstanceId], now_s: float) -> tuple[GoneInstance, ...]:
        """Return the instances that were lost or left.

        Forget instances that left more than `LEFT_S` ago, unless an actuator starts them again. ``silent`` are
        instances whose processes may still run: their notes say that requests wait for them.
        """
        told: list[GoneInstance] = []
        for instance_id, instance in list(self._gone.items()):
            absence = instance.absence
            assert absence is not None
            is_coming = self._is_coming(instance_id, absence)
            if absence.is_planned and not is_coming and now_s > absence.since_s + LEFT_S:
                del self._gone[instance_id]
                continue
            state = "restarting" if is_coming else "left" if absence.is_planned else "lost"
            profile = instance.profile
            told.append(
                GoneInstance(
                    instance_id=instance_id,
                    role=profile.role,
                    state=state,
                    note=self._note(absence, self._next(instance, is_coming, instance_id in silent)),
                    pid=profile.pid,
                    device=profile.device,
                    host=profile.host,
                )
            )
        return tuple(told)

    def _is_coming(self, instance_id: InstanceId, absence: _Absence) -> bool:
        """Return whether an actuator starts the instance again, even if its pod is not ready or its process ends."""
        actuators = self._core.actuators
        unsettled = any(instance_id in report.unsettled for report in actuators.there)
        return instance_id in actuators.instance_ids or (unsettled and not absence.is_planned)

    def _next(self, instance: _Instance, is_coming: bool, is_silent: bool) -> str:
        if is_coming:
            failed = f"; the last start failed: it {instance.failed_start}" if instance.failed_start else ""
            return f"its supervisor starts it again{failed}"
        if is_silent:
            return "requests wait for it, because its process may still run"
        if instance.absence is not None and instance.absence.is_planned:
            return "no process will replace it"
        if self._core.actuators.there:
            return "no supervisor starts it again: `pdmesh pool resize` starts another one"
        return "no supervisor is connected: start it again yourself"

    def _note(self, absence: _Absence, what_next: str) -> InstanceNote:
        return InstanceNote(at=self.wall_time(absence.since_s), cause=absence.cause, next=what_next)

    def joined_at(self, instance_id: InstanceId) -> float:
        """Return the Unix time at which the instance's process joined; 0 if the instance is unknown."""
        instance = self._there.get(instance_id)
        return 0.0 if instance is None else self.wall_time(instance.joined_s)

    def num_restarts(self, instance_id: InstanceId) -> int:
        """Return how many times a new process has replaced an instance's process."""
        instance = self._there.get(instance_id)
        return 0 if instance is None else instance.num_restarts

    def note(self, view: InstanceView, now_s: float) -> InstanceNote | None:
        """Return why an instance does not serve, or why it has a new process.

        Return None if neither holds, or if the new process has served for `RESTARTED_S`.
        """
        instance = self._there.get(view.instance_id)
        absence = None if instance is None else instance.absence
        if view.draining and (absence is None or absence.ended_s is not None):
            operation = self._operation_on(view.instance_id)
            began_s = now_s if operation is None else operation.began_s
            absence = _Absence(began_s, "began to drain", is_planned=True)
        if instance is None or absence is None:
            return None
        if absence.ended_s is not None:
            if now_s > absence.ended_s + RESTARTED_S:
                return None
            serves = f"process {instance.profile.pid} serves since {now_s - absence.ended_s:.0f} s ago"
            return self._note(absence, serves)
        if absence.is_planned:
            num_left = view.num_prefilling + view.num_decoding
            requests = "1 request has" if num_left == 1 else f"{num_left} requests have"
            return self._note(absence, f"{requests} to leave first" if num_left else "no request is left on it")
        if absence.cause == _SILENT:
            return self._note(absence, "nothing new is placed on it until it reports again")
        return self._note(absence, "it is removed unless it reconnects at once")


def safety(view: InstanceView, instances: Sequence[InstanceView]) -> tuple[bool, str]:
    """Return whether ending the instance's process would affect no request, and the reason."""
    rest = [each for each in instances if each is not view and each.reachable and not each.draining]
    lacking: list[str] = []
    if view.role.can_prefill and not any(each.role.can_prefill for each in rest):
        lacking.append("prefills")
    if view.role.can_decode and not any(each.role.can_decode for each in rest):
        lacking.append("decodes")
    only = f"no other instance {' or '.join(lacking)}" if lacking else ""
    work = [
        f"{number} {what}"
        for number, what in (
            (view.num_decoding, "decoding on it"),
            (view.num_prefilling, "in prefill on it"),
            (view.num_blocks - view.num_free_blocks, "KV blocks of requests on it"),
        )
        if number
    ]
    if work:
        return False, "; ".join(filter(None, (", ".join(work[:2]), only)))
    if not view.draining:
        return False, "; ".join(filter(None, (only, f"`pdmesh drain {view.instance_id}` first: it takes requests")))
    return True, "; ".join(filter(None, ("drained", only and f"{only}: new requests wait")))
