"""Operators' operations as they are remembered, whoever carries them out.

Operations on instances are `pdmesh.core.operators.operations`, on pools `pdmesh.core.operators.pools`; the service
replaces processes of its own and restarts all of them, one after the other.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum, auto
from typing import Generic, NamedTuple, TypeVar

from pdmesh.model import InstanceId, OperationId, OperationKind, PoolCounts, RequestId, Role

#: Operations that are over and still remembered.
MAX_ENDED = 256

#: Where an operation is that is on no single instance.
NO_INSTANCE = InstanceId("")

#: Why an operation was cancelled.
TAKEN_BACK = "an operator took it back"


class OperationState(StrEnum):
    RUNNING = auto()
    DONE = auto()
    REFUSED = auto()  # nothing was changed
    CANCELLED = auto()  # the instance is used as before
    FAILED = auto()


class OperationView(NamedTuple):
    """An operation as others may see it."""

    operation_id: OperationId
    kind: OperationKind
    instance_id: InstanceId  # or `NO_INSTANCE`
    role: Role | None
    state: OperationState
    detail: str
    num_left: int  # requests that have to leave the instance
    began_s: float
    ended_s: float | None
    timeout_s: float
    pools: PoolCounts | None = None  # of a resize
    needs_actuator: bool = False  # refused since nobody starts and stops processes
    request_id: RequestId | None = None  # of a move


@dataclass(slots=True, eq=False, kw_only=True)
class OperationRecord:
    """What is remembered of any operation; who carries it out adds what it needs."""

    operation_id: OperationId
    kind: OperationKind
    timeout_s: float
    began_s: float
    instance_id: InstanceId = NO_INSTANCE
    role: Role | None = None
    pools: PoolCounts | None = None
    request_id: RequestId | None = None
    state: OperationState = OperationState.RUNNING
    detail: str = ""
    num_left: int = 0
    ended_s: float | None = None
    needs_actuator: bool = False

    @property
    def is_running(self) -> bool:
        """Whether it is not over."""
        return self.state is OperationState.RUNNING

    @property
    def view(self) -> OperationView:
        """What others see of it now."""
        return OperationView(
            operation_id=self.operation_id,
            kind=self.kind,
            instance_id=self.instance_id,
            role=self.role,
            state=self.state,
            detail=self.detail,
            num_left=self.num_left,
            began_s=self.began_s,
            ended_s=self.ended_s,
            timeout_s=self.timeout_s,
            pools=self.pools,
            needs_actuator=self.needs_actuator,
            request_id=self.request_id,
        )

    def end(self, state: OperationState, detail: str, now_s: float) -> None:
        """End the operation with this outcome."""
        self.state, self.detail, self.ended_s = state, detail, now_s


_RecordT = TypeVar("_RecordT", bound=OperationRecord)


class OperationRecords(Generic[_RecordT]):
    """Operations in the order in which they came: all that run, and the last `MAX_ENDED` that are over."""

    def __init__(self) -> None:
        self._records: dict[OperationId, _RecordT] = {}

    def __contains__(self, operation_id: OperationId) -> bool:
        return operation_id in self._records

    def __iter__(self) -> Iterator[_RecordT]:
        return iter(self._records.values())

    def get(self, operation_id: OperationId) -> _RecordT | None:
        """The operation, if it is remembered."""
        return self._records.get(operation_id)

    def add(self, record: _RecordT) -> None:
        """Remember one more, and forget the oldest that are over and too many."""
        self._records[record.operation_id] = record
        ended = [key for key, each in self._records.items() if not each.is_running]
        for key in ended[: max(0, len(ended) - MAX_ENDED)]:
            del self._records[key]

    @property
    def views(self) -> list[OperationView]:
        """What others see of them."""
        return [record.view for record in self._records.values()]

    @property
    def running(self) -> list[_RecordT]:
        """Return the operations that are not over."""
        return [record for record in self._records.values() if record.is_running]
