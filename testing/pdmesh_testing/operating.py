"""Asks a running scheduler what operators ask."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from itertools import cycle
from uuid import uuid4

import anyio

from pdmesh.config import SecurityConfig
from pdmesh.core.operator_events import OperationRequested
from pdmesh.errors import InstanceUnavailable, PdmeshError
from pdmesh.model import InstanceId, RequestId, Role
from pdmesh.operations import OperationId, OperationKind
from pdmesh.wire.admin import ask_scheduler
from pdmesh.wire.messages import (
    AdminRequest,
    AdminResponse,
    GetRequest,
    ListRequests,
    OperationStatus,
    RequestList,
    RequestRecord,
    StartOperation,
    WaitOperation,
)
from pdmesh_testing.mesh import RunningMesh

TIMEOUT_S = 120.0
#: Between two rounds of moves.
PAUSE_S = 0.01


class OperatorClient:
    """Operator's client of a scheduler. Each call raises PdmeshError if the scheduler refuses or does not answer."""

    def __init__(self, address: str, security: SecurityConfig) -> None:
        self._address = address
        self._security = security
        # Number of operations by outcome.
        self.operations: Counter[str] = Counter()

    async def ask(self, question: AdminRequest) -> AdminResponse:
        """Ask anything."""
        return await ask_scheduler(self._address, self._security, question)

    async def operate(
        self, kind: OperationKind, instance: str, request: str | None = None, role: Role | None = None
    ) -> OperationStatus:
        """Return an operation, once it is over."""
        requested = OperationRequested(
            operation_id=OperationId(uuid4().hex),
            kind=kind,
            instance_id=InstanceId(instance),
            timeout_s=TIMEOUT_S,
            request_id=None if request is None else RequestId(request),
            role=role,
        )
        status = await self.ask(StartOperation(requested=requested))
        assert isinstance(status, OperationStatus)
        while status.state == "running":
            question = WaitOperation(operation_id=status.operation_id, num_left=status.num_left, wait_s=4.0)
            answer = await self.ask(question)
            assert isinstance(answer, OperationStatus)
            status = answer
        self.operations[status.state] += 1
        return status

    async def running(self) -> list[str]:
        """Return the requests that decode."""
        answer = await self.ask(ListRequests(limit=256))
        assert isinstance(answer, RequestList)
        return [record.request_id for record in answer.requests if record.state == "decoding"]

    async def record(self, request_id: str) -> RequestRecord:
        """Return the scheduler's record of a request."""
        answer = await self.ask(GetRequest(request_id=request_id))
        assert isinstance(answer, RequestRecord)
        return answer


class Mover:
    """Moves all running decodes from one instance to the next, again and again, until cancelled."""

    def __init__(self, operator: OperatorClient, instances: Sequence[str]) -> None:
        self._operator = operator
        self._instances = instances

    @property
    def num_moved(self) -> int:
        """Moves that were made."""
        return self._operator.operations["done"]

    async def run(self) -> None:
        """Move until cancelled."""
        for target in cycle(self._instances):
            await anyio.sleep(PAUSE_S)
            with suppress(InstanceUnavailable):
                # A scheduler that had no time to answer is asked again.
                await self._move_all(target)

    async def _move_all(self, target: str) -> None:
        for request_id in await self._operator.running():
            with suppress(PdmeshError):
                # The request has ended meanwhile, or is on the target already.
                await self._operator.operate(OperationKind.MOVE, target, request_id)


def operator_of(mesh: RunningMesh) -> OperatorClient:
    """Return an operator of a mesh of this machine."""
    return OperatorClient(mesh.record.scheduler_address, mesh.record.security(SecurityConfig()))
