"""What the scheduling core is told by operators, and by the actuator that starts and stops processes for them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta

from pdmesh.model import (
    InstanceId,
    ManagedProcess,
    OperationId,
    OperationKind,
    OperationState,
    PoolCounts,
    PoolMember,
    RequestId,
    Role,
)
from pdmesh.ranges import ANY_COUNT, SECONDS

#: Of a process in a container, which has pids of its own.
UNKNOWN_PID = 0

#: Ends of processes that an actuator keeps for the scheduler while it does not answer.
MAX_ENDED = 64

#: No operator waits longer for requests to leave an instance by themselves.
MAX_OPERATION_S = 86_400.0
OperationTime = Annotated[float, Meta(ge=0, le=MAX_OPERATION_S)]


@dataclass(frozen=True, slots=True, kw_only=True)
class OperationRequested:
    """An operator asks for an operation on an instance, or (``again``) a scheduler that is gone had taken it on.

    A move brings ``request_id``, which decodes elsewhere, to the instance. Of others: what has not left the instance
    ``timeout_s`` after it began starts again elsewhere. ``force`` is for the last instance of its kind.
    """

    operation_id: OperationId
    kind: OperationKind
    instance_id: InstanceId
    timeout_s: OperationTime
    role: Role | None = None  # of an operation that changes it
    force: bool = False
    again: bool = False
    pid: int | None = None  # of the process that a restart is to end: once another one is there, it is done
    stopped_pid: int | None = None  # of the process that a restart had stopped already
    by_actuator: bool = False  # the same: to end that process was left to its actuator
    request_id: RequestId | None = None  # of a move
    role_before: Role | None = None  # of one that is asked for again: the instance may have its new role already
    of_service: bool = False  # the same, of a restart: it is of a process that is no instance


@dataclass(frozen=True, slots=True)
class OperationCancelled:
    """An operator takes an operation back."""

    operation_id: OperationId


@dataclass(frozen=True, slots=True, kw_only=True)
class ResizeRequested:
    """An operator wants pools of other sizes, or (``again``) a scheduler that is gone had taken that on.

    Instances that are to leave are drained as `OperationRequested` does, with ``timeout_s``. One that is to be started
    has ``start_timeout_s`` to register.
    """

    operation_id: OperationId
    pools: PoolCounts
    timeout_s: OperationTime
    start_timeout_s: OperationTime
    again: bool = False
    # What was decided, of one that is asked for again. Of another one ``leaves`` says who goes before others.
    flips: tuple[PoolMember, ...] = ()
    starts: tuple[PoolMember, ...] = ()
    leaves: tuple[InstanceId, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class OldProcess:
    """A process that a rolling restart has still to replace."""

    name: str
    pid: int
    is_instance: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class RollingPart:
    """What of a rolling restart is under way: a process is replaced, or (None) the pools get other sizes."""

    operation_id: OperationId
    restarts: OldProcess | None = None
    grows: Role | None = None  # else they shrink


@dataclass(frozen=True, slots=True, kw_only=True)
class RollingRequested:
    """An operator wants every process replaced, one after the other, or (``again``) a scheduler had taken that on.

    All that the next scheduler has to know of it is here: what is ``left``, and what is under way.
    """

    operation_id: OperationId
    timeout_s: OperationTime  # limit for requests to leave an instance
    start_timeout_s: OperationTime  # limit for an instance that is started beside the last of a kind
    force: bool = False  # though nobody does meanwhile what the last of a kind does
    again: bool = False
    began_at: float = 0.0  # Unix time, seconds
    age_s: Annotated[float, SECONDS] = 0.0  # since it began, of one that is asked for again
    patience_s: Annotated[float, SECONDS] = 0.0  # of the same: time for all others to register before it goes on
    # What was decided, of one that is asked for again.
    left: tuple[OldProcess, ...] = ()  # still to be replaced, in this order
    beside: tuple[InstanceId, ...] = ()  # started for a while
    part: RollingPart | None = None
    ends_as: OperationState | None = None  # nothing more is replaced: what was started beside leaves, and it is over
    why: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class FailedStart:
    """An instance that is wanted and could not be started, or whose process could not be replaced."""

    instance_id: InstanceId
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EndedProcess:
    """A process that ended and that its actuator starts again.

    ``cause`` completes a sentence about the process, such as "was killed by SIGKILL". ``pid`` is `UNKNOWN_PID` if the
    actuator does not know the number that the process registered with.
    """

    name: str
    pid: int
    cause: str
    has_served: bool = True  # False: the start failed


@dataclass(frozen=True, slots=True, kw_only=True)
class ActuatorReported:
    """Whoever starts and stops processes, on one host or in a cluster, says what runs: all of it, again and again.

    There may be several of them, one on each host. What is to be started under a name that begins with ``name_prefix``
    is this one's to start.
    """

    actuator_id: str
    processes: tuple[ManagedProcess, ...]  # all that it keeps running
    unsettled: tuple[InstanceId, ...] = ()  # besides: their processes are being started, or end
    coming: tuple[InstanceId, ...] = ()  # instances that served, and whose processes are started again
    available_bytes: Annotated[int, ANY_COUNT]  # of its host's memory
    name_prefix: str = ""  # of the ids of its instances
    failed: tuple[FailedStart, ...] = ()  # since it was last heard
    ended: tuple[EndedProcess, ...] = ()  # ends since the last report that the scheduler answered
    last_leaves_first: bool = False  # of instances whose names differ by their number alone, only the last can leave
    outdated: tuple[InstanceId, ...] = ()  # would start again as they are: it has to replace their processes itself
    grace_s: Annotated[float, SECONDS] = 0.0  # that a process which is told to end has; then it is killed


@dataclass(frozen=True, slots=True)
class ActuatorLost:
    """An actuator was not heard of for long: nobody starts and stops what it did."""

    actuator_id: str


@dataclass(frozen=True, slots=True)
class BundleChangeRequested:
    """An operator switches the policy bundle."""

    bundle: str


@dataclass(frozen=True, slots=True)
class BatchingChangeRequested:
    """An operator switches the batching mode, until the next change of bundles; empty: the bundle's own.

    ``threshold`` is the share of idle seats at which `eb` ends a decode phase; None: the best in theory.
    """

    batching: str
    threshold: float | None = None


OperatorEvent = (
    OperationRequested
    | OperationCancelled
    | ResizeRequested
    | RollingRequested
    | ActuatorReported
    | ActuatorLost
    | BundleChangeRequested
    | BatchingChangeRequested
)
