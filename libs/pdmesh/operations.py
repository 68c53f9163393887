"""Words of operators: operations on instances and pools, and the processes that an actuator keeps running."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, NewType

from pdmesh.model import InstanceId, Role
from pdmesh.ranges import ANY_COUNT

#: Name of an operator's operation, chosen by the caller, so that asking twice starts it once.
OperationId = NewType("OperationId", str)


class OperationKind(StrEnum):
    """Operations on an instance, or on the whole mesh.

    A drained instance gets nothing new, and its requests leave; undraining ends that. A change of role waits until
    requests that the new role does not serve have left. A restart ends the process once all requests have left, and its
    supervisor starts it again. A move continues a decoding request, with its KV, on the instance. A resize changes the
    pools: instances change roles, start and leave. A rolling restart restarts every process, one after the other.
    """

    DRAIN = "drain"
    UNDRAIN = "undrain"
    ROLE = "role"
    RESTART = "restart"
    MOVE = "move"
    RESIZE = "resize"
    ROLLING = "rolling"


class OperationState(StrEnum):
    """Progress or outcome of an operator's operation.

    A refused operation has changed nothing. After a cancelled one, the instance is used as before.
    """

    RUNNING = "running"
    DONE = "done"
    REFUSED = "refused"
    CANCELLED = "cancelled"
    FAILED = "failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolCounts:
    """Numbers of instances of each role."""

    prefill: Annotated[int, ANY_COUNT]
    decode: Annotated[int, ANY_COUNT]
    mixed: Annotated[int, ANY_COUNT] = 0

    def of(self, role: Role) -> int:
        match role:
            case Role.PREFILL:
                return self.prefill
            case Role.DECODE:
                return self.decode
            case Role.MIXED:
                return self.mixed

    @property
    def total(self) -> int:
        return self.prefill + self.decode + self.mixed

    @property
    def why_not(self) -> str | None:
        """Reason why such pools could serve no request; None if they could."""
        if not (self.prefill or self.mixed):
            return "no instance could prefill: --prefill or --mixed must be at least 1"
        if not (self.decode or self.mixed):
            return "no instance could decode: --decode or --mixed must be at least 1"
        return None

    def __str__(self) -> str:
        """Return, for instance, "2 prefill + 1 mixed"."""
        return " + ".join(f"{self.of(role)} {role}" for role in Role if self.of(role))


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolMember:
    """A wanted instance, and the role with which it starts, or which it gets."""

    instance_id: InstanceId
    role: Role


class ProcessKind(StrEnum):
    """Kind of a process that an actuator keeps running, in the order of a rolling restart.

    The scheduler is last, because all others dial it.
    """

    INSTANCE = "instance"
    GATEWAY = "gateway"
    SCHEDULER = "scheduler"


@dataclass(frozen=True, slots=True, kw_only=True)
class ManagedProcess:
    """A process that an actuator keeps running. An instance's name is its id, as in ``pdmesh status``.

    ``pid`` is a number that no other process of this name had, and is only compared. During a start, ``pid`` is 0.
    """

    name: str
    pid: int
    kind: ProcessKind = ProcessKind.INSTANCE
