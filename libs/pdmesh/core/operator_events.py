"""Events from operators to the scheduling core, and from the actuators that start and stop processes for them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta

from pdmesh.model import InstanceId, RequestId, Role
from pdmesh.operations import ManagedProcess, OperationId, OperationKind, OperationState, PoolCounts, PoolMember
from pdmesh.ranges import ANY_COUNT, SECONDS

#: Pid of a process in a container, which has pids of its own.
UNKNOWN_PID = 0

#: Largest number of process ends that an actuator keeps for a scheduler that does not answer.
MAX_ENDED = 64

#: Longest time that an operator may wait for requests to leave an instance by themselves.
MAX_OPERATION_S = 86_400.0
OperationTime = Annotated[float, Meta(ge=0, le=MAX_OPERATION_S)]


@dataclass(frozen=True, slots=True, kw_only=True)
class OperationRequested:
    """Request of an operator for an operation on an instance, or (``again``) of an earlier scheduler's operation.

    A move brings ``request_id``, which decodes elsewhere, to the instance. In other operations, requests still on the
    instance ``timeout_s`` after the beginning start again elsewhere. ``force`` allows the operation on the last
    instance of its kind. ``role`` is the new role, if the operation changes it.

    ``pid`` is the process that a restart should end: the restart is done once another process is there. The other
    fields describe an operation that is asked for again:

    - `stopped_pid`: the process that the restart had stopped already.
    - `by_actuator`: the actuator was to end that process.
    - `role_before`: the role before the operation, since the instance may have its new role already.
    - `of_service`: the restart is of a process that is no instance.
    """

    operation_id: OperationId
    kind: OperationKind
    instance_id: InstanceId
    timeout_s: OperationTime
    role: Role | None = None
    force: bool = False
    again: bool = False
    pid: int | None = None
    stopped_pid: int | None = None
    by_actuator: bool = False
    request_id: RequestId | None = None
    role_before: Role | None = None
    of_service: bool = False


@dataclass(frozen=True, slots=True)
class OperationCancelled:
    """Cancellation of an operation by an operator."""

    operation_id: OperationId


@dataclass(frozen=True, slots=True, kw_only=True)
class ResizeRequested:
    """Request of an operator for pools of other sizes, or (``again``) for an earlier scheduler's resize.

    Surplus instances are drained as by `OperationRequested`, with ``timeout_s``. A started instance has
    ``start_timeout_s`` to register. If asked for again, ``flips``, ``starts`` and ``leaves`` are the decisions taken
    then. Otherwise ``leaves`` names instances that leave before others.
    """

    operation_id: OperationId
    pools: PoolCounts
    timeout_s: OperationTime
    start_timeout_s: OperationTime
    again: bool = False
    flips: tuple[PoolMember, ...] = ()
    starts: tuple[PoolMember, ...] = ()
    leaves: tuple[InstanceId, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class OldProcess:
    """Process that a rolling restart has not yet replaced."""

    name: str
    pid: int
    is_instance: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class RollingPart:
    """Part of a rolling restart under way: replaces the process `restarts`, or (None) resizes the pools.

    A resize adds an instance of role `grows`, or (None) removes the temporary ones.
    """

    operation_id: OperationId
    restarts: OldProcess | None = None
    grows: Role | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RollingRequested:
    """Request of an operator to replace every process in turn, or (``again``) for an earlier scheduler's restart.

    The event holds all state that the next scheduler needs, in the fields after ``again``.

    - `timeout_s` limits how long requests may take to leave an instance.
    - `start_timeout_s` limits the start of a temporary instance.
    - `force`: restart the last instance of a kind without a temporary one.
    - `began_at` is Unix time in seconds.
    - `age_s` is the time since the beginning, and `patience_s` the time for all processes to register before it
      continues.
    - `left` are the processes still to be replaced, in this order.
    - `beside` are the temporary instances.
    - `ends_as`: no more processes are replaced, the temporary instances leave, and this is the outcome, because of
      `why`.
    """

    operation_id: OperationId
    timeout_s: OperationTime
    start_timeout_s: OperationTime
    force: bool = False
    again: bool = False
    began_at: float = 0.0
    age_s: Annotated[float, SECONDS] = 0.0
    patience_s: Annotated[float, SECONDS] = 0.0
    left: tuple[OldProcess, ...] = ()
    beside: tuple[InstanceId, ...] = ()
    part: RollingPart | None = None
    ends_as: OperationState | None = None
    why: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class FailedStart:
    """Instance that could not be started, or whose process could not be replaced."""

    instance_id: InstanceId
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EndedProcess:
    """Process that ended and that its actuator starts again.

    ``cause`` completes a sentence about the process, such as "was killed by SIGKILL". ``pid`` is `UNKNOWN_PID` if the
    actuator does not know the number that the process registered with. Without ``has_served``, the start failed.
    """

    name: str
    pid: int
    cause: str
    has_served: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class ActuatorReported:
    """Complete periodic report of an actuator, which starts and stops processes on one host or in a cluster.

    There may be several actuators, one on each host. An actuator starts the instances whose names begin with its
    ``name_prefix``.

    - `processes`: all processes that it keeps running.
    - `unsettled`: further instances, whose processes are starting or ending.
    - `coming`: instances that served, and whose processes are started again.
    - `available_bytes`: available memory of its host.
    - `failed`: failed starts since the last report.
    - `ended`: ends of processes since the last report that the scheduler answered.
    - `last_leaves_first`: among instances whose names differ by their number alone, only the last can leave.
    - `outdated`: instances that would start again unchanged, so the actuator itself has to replace their processes.
    - `grace_s`: time for a process to end once told; then it is killed.
    """

    actuator_id: str
    processes: tuple[ManagedProcess, ...]
    unsettled: tuple[InstanceId, ...] = ()
    coming: tuple[InstanceId, ...] = ()
    available_bytes: Annotated[int, ANY_COUNT]
    name_prefix: str = ""
    failed: tuple[FailedStart, ...] = ()
    ended: tuple[EndedProcess, ...] = ()
    last_leaves_first: bool = False
    outdated: tuple[InstanceId, ...] = ()
    grace_s: Annotated[float, SECONDS] = 0.0


@dataclass(frozen=True, slots=True)
class ActuatorLost:
    """Loss of an actuator, which was silent for long: its processes are started and stopped by no one else."""

    actuator_id: str


@dataclass(frozen=True, slots=True)
class BundleChangeRequested:
    """Switch of the policy bundle by an operator."""

    bundle: str


@dataclass(frozen=True, slots=True)
class BatchingChangeRequested:
    """Switch of the batching mode by an operator, until the next change of bundles; empty: the bundle's own.

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
