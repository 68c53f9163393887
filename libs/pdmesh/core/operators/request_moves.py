"""Operators' moves of single requests: each operation ends with its move, or with its request."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from pdmesh.core.copies.decode_moves import Moves
from pdmesh.core.mesh_state import MeshState
from pdmesh.core.operator_events import OperationRequested
from pdmesh.core.operators.operation_records import OperationRecord, OperationRecords
from pdmesh.core.requests.copy import Copy
from pdmesh.core.requests.request import RequestState
from pdmesh.model import RequestId
from pdmesh.operations import OperationId, OperationState


@dataclass(slots=True, eq=False)
class _RequestMove:
    """An operation that runs, with the request and its move."""

    record: OperationRecord
    request: RequestState
    move: Copy
    is_overdue: bool = False
    is_taken_back: bool = False

    @property
    def deadline_s(self) -> float:
        """Time limit of the operation; infinite once it has passed and the move is being cancelled."""
        return inf if self.is_overdue else self.record.began_s + self.record.timeout_s


class RequestMoves:
    """Operations that each move one request."""

    def __init__(self, mesh: MeshState, records: OperationRecords, moves: Moves) -> None:
        self._mesh = mesh
        self._records = records
        self._moves = moves
        self._running: dict[OperationId, _RequestMove] = {}

    @property
    def next_deadline_s(self) -> float:
        """Earliest time limit of a running operation; infinite if none runs."""
        return min([operation.deadline_s for operation in self._running.values()], default=inf)

    def request(self, requested: OperationRequested, now_s: float) -> None:
        """Begin to move a request, or refuse it before anything has changed."""
        record = OperationRecord(
            operation_id=requested.operation_id,
            kind=requested.kind,
            timeout_s=requested.timeout_s,
            began_s=now_s,
            instance_id=requested.instance_id,
            request_id=requested.request_id,
        )
        self._records.add(record)
        request = self._mesh.requests.get(RequestId(requested.request_id or ""))
        target = self._mesh.instances.get(requested.instance_id)
        refusal = None
        if request is None:
            refusal = f"request {requested.request_id!r} is not running"
        elif target is None:
            refusal = f"no instance is called {requested.instance_id!r}"
        elif (why_not := self._moves.why_not(request, target)) is not None:
            refusal = f"request {requested.request_id} {why_not}"
        else:
            record.num_left = 1
            move = self._moves.begin(request, target)
            self._running[record.operation_id] = _RequestMove(record, request, move)
        if refusal is not None:
            self._records.end(record, OperationState.REFUSED, refusal, now_s)

    def cancel(self, operation_id: OperationId, _: float) -> bool:
        """Cancel the move of an operation, though its KV may have landed. Return False if it does not run here."""
        operation = self._running.get(operation_id)
        if operation is None:
            return False
        self._moves.cancel(operation.request)
        operation.is_taken_back = True
        return True

    def advance(self, now_s: float) -> None:
        """Look what became of each move; after any event."""
        for operation in list(self._running.values()):
            self._look_at(operation, now_s)

    def _look_at(self, operation: _RequestMove, now_s: float) -> None:
        request, move = operation.request, operation.move
        if self._mesh.find(request.key) is not request:
            detail = "the request ended or restarted before its move was complete"
            self._end(operation, OperationState.FAILED, detail, now_s)
        elif request.move is not move and request.decode_id == move.target_id:
            self._end(operation, OperationState.DONE, "", now_s)
        elif request.move is not move:
            outcome = OperationState.CANCELLED if operation.is_taken_back else OperationState.FAILED
            self._end(operation, outcome, f"the request stays on {request.decode_id}", now_s)
        elif operation.deadline_s <= now_s:
            operation.is_overdue = True
            self._moves.cancel(request)

    def _end(self, operation: _RequestMove, outcome: OperationState, detail: str, now_s: float) -> None:
        self._records.end(operation.record, outcome, detail, now_s)
        del self._running[operation.record.operation_id]

    def check_integrity(self) -> None:
        """Assert that each operation here still runs."""
        for operation_id, operation in self._running.items():
            assert operation.record.is_running, f"{operation_id}, a move, is over"
