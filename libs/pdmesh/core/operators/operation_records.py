"""The records of operators' operations of all kinds.

Operations on instances are `pdmesh.core.operators.instance_operations`, on one request
`pdmesh.core.operators.request_moves`, on pools `pdmesh.core.operators.pools`, on processes that are no instances
`pdmesh.core.operators.replacements`, and on all processes `pdmesh.core.operators.rolling`.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import NamedTuple

from pdmesh.model import InstanceId, OperationId, OperationKind, OperationState, PoolCounts, RequestId, Role

#: Operations that are over and still remembered.
MAX_ENDED = 256

#: Where an operation is that is on no single instance.
NO_INSTANCE = InstanceId("")

#: Why an operation was cancelled.
TAKEN_BACK = "an operator took it back"


class OperationView(NamedTuple):
    """An operation as others may see it."""

    operation_id: OperationId
    kind: OperationKind
    instance_id: InstanceId  # or `NO_INSTANCE`
    role: Role | None
    state: OperationState
    detail: str
    num_left: int  # requests that have to leave the instance; instances, or processes, of the whole mesh
    began_s: float
    ended_s: float | None
    timeout_s: float
    pools: PoolCounts | None = None  # of a resize
    needs_actuator: bool = False  # refused since nobody starts and stops processes
    request_id: RequestId | None = None  # of a move


@dataclass(slots=True, eq=False, kw_only=True)
class OperationRecord:
    """What is remembered of any operation; each kind adds what it needs."""

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


class OperationRecords:
    """Operations in the order in which they came: all that run, and the last `MAX_ENDED` that are over.

    ``num_changes`` counts what changes of them, and of what operators want, so that observers need not compare.
    """

    def __init__(self) -> None:
        self._records: dict[OperationId, OperationRecord] = {}
        self._ended: deque[OperationId] = deque()
        self.num_changes = 0

    def __contains__(self, operation_id: OperationId) -> bool:
        return operation_id in self._records

    def get(self, operation_id: OperationId) -> OperationRecord | None:
        """The operation, if it is remembered."""
        return self._records.get(operation_id)

    def add(self, record: OperationRecord) -> None:
        """Remember one more, which runs."""
        self._records[record.operation_id] = record
        self.num_changes += 1

    def note_change(self) -> None:
        """Take note that something else is wanted, of an operation or of what it left."""
        self.num_changes += 1

    def tell(self, record: OperationRecord, detail: str, num_left: int | None = None) -> None:
        """Say how far an operation is; ``num_left`` is as it was if it is None."""
        num_left = record.num_left if num_left is None else num_left
        if (detail, num_left) != (record.detail, record.num_left):
            record.detail, record.num_left = detail, num_left
            self.num_changes += 1

    def end(self, record: OperationRecord, state: OperationState, detail: str, now_s: float) -> None:
        """End an operation with this outcome, and forget the one that has been over for longest if there are many."""
        record.state, record.detail, record.ended_s, record.num_left = state, detail, now_s, 0
        self.num_changes += 1
        self._ended.append(record.operation_id)
        if len(self._ended) > MAX_ENDED:
            del self._records[self._ended.popleft()]

    @property
    def views(self) -> list[OperationView]:
        """What others see of them, in the order in which they began."""
        return sorted((record.view for record in self._records.values()), key=lambda view: view.began_s)

    @property
    def num_running(self) -> int:
        """Number of those that are not over."""
        return len(self._records) - len(self._ended)
