"""The records of operators' operations of all kinds.

Operations on instances are `pdmesh.core.operators.instance_operations`, on one request
`pdmesh.core.operators.request_moves`, on pools `pdmesh.core.operators.pools`, on processes that are no instances
`pdmesh.core.operators.replacements`, and on all processes `pdmesh.core.operators.rolling`.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from pdmesh.model import InstanceId, RequestId, Role
from pdmesh.operations import OperationId, OperationKind, OperationState, PoolCounts

#: Number of ended operations that are remembered.
MAX_ENDED = 256

#: Instance id in the record of an operation that is on no single instance.
NO_INSTANCE = InstanceId("")

#: Detail of an operation that an operator cancelled.
TAKEN_BACK = "an operator cancelled it"


@dataclass(slots=True, eq=False, kw_only=True)
class OperationRecord:
    """Record of an operation. Each kind of operation adds fields. Only the core may change a record.

    `pools` are a resize's wanted sizes, and `request_id` is a move's request. `num_left` counts the requests that must
    leave the instance, or the instances or processes left for an operation on the whole mesh. `needs_actuator`: the
    operation was refused because no actuator starts and stops processes.
    """

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
        """Whether the operation is not over."""
        return self.state is OperationState.RUNNING


class OperationRecords:
    """Operations in the order in which they came: all that run, and the last `MAX_ENDED` that are over.

    ``num_changes`` counts their changes, and changes of operators' wishes, so that observers need not compare.
    """

    def __init__(self) -> None:
        self._records: dict[OperationId, OperationRecord] = {}
        self._ended: deque[OperationId] = deque()
        self.num_changes = 0

    def __contains__(self, operation_id: OperationId) -> bool:
        return operation_id in self._records

    def get(self, operation_id: OperationId) -> OperationRecord | None:
        """Return the operation; None if it is not remembered."""
        return self._records.get(operation_id)

    def add(self, record: OperationRecord) -> None:
        """Add the record of an operation that begins."""
        self._records[record.operation_id] = record
        self.num_changes += 1

    def note_change(self) -> None:
        """Count a change of operators' wishes."""
        self.num_changes += 1

    def tell(self, record: OperationRecord, detail: str, num_left: int | None = None) -> None:
        """Set the progress of an operation; None keeps ``num_left``."""
        num_left = record.num_left if num_left is None else num_left
        if (detail, num_left) != (record.detail, record.num_left):
            record.detail, record.num_left = detail, num_left
            self.num_changes += 1

    def end(self, record: OperationRecord, state: OperationState, detail: str, now_s: float) -> None:
        """End an operation with this outcome, and forget the longest ended one beyond `MAX_ENDED`."""
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
        """Number of operations that are not over."""
        return len(self._records) - len(self._ended)
