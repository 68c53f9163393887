"""The records of operators' operations of all kinds.

Operations on instances are `pdmesh.core.operators.instance_operations`, on one request
`pdmesh.core.operators.request_moves`, on pools `pdmesh.core.operators.pools`, on processes that are no instances
`pdmesh.core.operators.replacements`, and on all processes `pdmesh.core.operators.rolling`.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from pdmesh.model import InstanceId, OperationId, OperationKind, OperationState, PoolCounts, RequestId, Role

#: Operations that are over and still remembered.
MAX_ENDED = 256

#: Where an operation is that is on no single instance.
NO_INSTANCE = InstanceId("")

#: Why an operation was cancelled.
TAKEN_BACK = "an operator took it back"


@dataclass(slots=True, eq=False, kw_only=True)
class OperationRecord:
    """Record of an operation. Each kind of operation adds fields. Only the core may change a record."""

    operation_id: OperationId
    kind: OperationKind
    timeout_s: float
    began_s: float
    instance_id: InstanceId = NO_INSTANCE
    role: Role | None = None
    pools: PoolCounts | None = None  # wanted sizes, if it is a resize
    request_id: RequestId | None = None  # request to move, if it is a move
    state: OperationState = OperationState.RUNNING
    detail: str = ""
    num_left: int = 0  # requests that have to leave the instance; instances, or processes, of the whole mesh
    ended_s: float | None = None
    needs_actuator: bool = False  # refused, because no actuator starts and stops processes

    @property
    def is_running(self) -> bool:
        """Whether it is not over."""
        return self.state is OperationState.RUNNING


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
    def all(self) -> list[OperationRecord]:
        """All remembered operations, in the order in which they began."""
        return sorted(self._records.values(), key=lambda record: record.began_s)

    @property
    def num_running(self) -> int:
        """Number of those that are not over."""
        return len(self._records) - len(self._ended)
