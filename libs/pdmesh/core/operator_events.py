"""What the scheduling core is told by operators, and by the actuator that starts and stops processes for them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from pdmesh.model import InstanceId, OperationId, OperationKind, PoolCounts, PoolMember, RequestId, Role
from pdmesh.ranges import ANY_COUNT, Range

#: No operator waits longer for requests to leave an instance by themselves.
MAX_OPERATION_S = 86_400.0


@dataclass(frozen=True, slots=True, kw_only=True)
class OperationRequested:
    """An operator asks for an operation on an instance, or (``again``) a scheduler that is gone had taken it on.

    A move brings ``request_id``, which decodes elsewhere, to the instance. Of others: what has not left the instance
    ``timeout_s`` after it began starts again elsewhere. ``force`` is for the last instance of its kind.
    """

    operation_id: OperationId
    kind: OperationKind
    instance_id: InstanceId
    timeout_s: Annotated[float, Range(0, MAX_OPERATION_S)]
    role: Role | None = None  # of an operation that changes it
    force: bool = False
    again: bool = False
    pid: int | None = None  # of the process that a restart is to end: once another one is there, it is done
    stopped_pid: int | None = None  # of the process that a restart had stopped already
    request_id: RequestId | None = None  # of a move
    judged: bool = False  # a change of roles that makes things worse is taken back
    role_before: Role | None = None  # of one that is asked for again: the instance may have its new role already


@dataclass(frozen=True, slots=True)
class OperationCancelled:
    """An operator takes an operation back."""

    operation_id: OperationId


@dataclass(frozen=True, slots=True, kw_only=True)
class ActuatorFacts:
    """The actuator as it was when an operator asked for something."""

    instance_ids: tuple[InstanceId, ...]  # that it looks after
    available_bytes: Annotated[int, ANY_COUNT]  # of the host's memory
    instance_bytes: Annotated[int, ANY_COUNT]  # that another instance would take; 0: not known
    name_prefix: str = ""  # of the ids of instances


@dataclass(frozen=True, slots=True, kw_only=True)
class ResizeRequested:
    """An operator wants pools of other sizes, or (``again``) a scheduler that is gone had taken that on.

    Instances that are to leave are drained as `OperationRequested` does, with ``timeout_s``. One that is to be started
    has ``start_timeout_s`` to register. ``actuator`` is None where nobody starts and stops processes.
    """

    operation_id: OperationId
    pools: PoolCounts
    timeout_s: Annotated[float, Range(0, MAX_OPERATION_S)]
    start_timeout_s: Annotated[float, Range(0, MAX_OPERATION_S)]
    actuator: ActuatorFacts | None = None
    again: bool = False
    # What was decided, of one that is asked for again. Of another one ``leaves`` says who goes before others.
    flips: tuple[PoolMember, ...] = ()
    starts: tuple[PoolMember, ...] = ()
    leaves: tuple[InstanceId, ...] = ()


@dataclass(frozen=True, slots=True)
class InstanceStartFailed:
    """The actuator could not start an instance that is wanted."""

    instance_id: InstanceId
    reason: str


@dataclass(frozen=True, slots=True)
class ProcessesReported:
    """The actuator has another set of processes: of instances that run, are being started, or end."""

    instance_ids: tuple[InstanceId, ...]


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
