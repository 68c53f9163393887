"""The progress of operators' operations, for commands that ask and wait."""

from __future__ import annotations

from collections.abc import Callable

import anyio

from pdmesh.core.operators.operation_records import OperationRecord
from pdmesh.core.scheduler import SchedulerCore
from pdmesh.model import Role
from pdmesh.operations import OperationId, PoolCounts
from pdmesh.wire.messages import OperationStatus
from pdmesh_scheduler.observing import Handled


class OperationStatuses:
    """Operations' latest statuses; implements `pdmesh_scheduler.observing.Observer`."""

    def __init__(
        self, core: SchedulerCore, wall_time: Callable[[float], float], resize_command: str | None = None
    ) -> None:
        self._core = core
        self._wall_time = wall_time
        self._resize_command = resize_command or ""
        self._records: dict[OperationId, OperationRecord] = {}
        self._seen = (0, core.bundle, core.batching)
        self._changed = anyio.Event()

    def observe(self, handled: Handled) -> None:
        """Read the operations from the core and wake waiters if operations, bundle or batching have changed."""
        seen = self._core.num_operation_changes, handled.bundle, self._core.batching
        if seen != self._seen:
            self._seen = seen
            self._records = {each.operation_id: each for each in self._core.operations}
            self._changed.set()
            self._changed = anyio.Event()

    def changed(self) -> anyio.Event:
        """Return the event that is set at the next change of an operation, the bundle or the batching."""
        return self._changed

    def all(self) -> tuple[OperationStatus, ...]:
        """Return all remembered operations, the newest first."""
        return tuple(self._status(each) for each in reversed(self._records.values()))

    def of(self, operation_id: OperationId) -> OperationStatus | None:
        """Return an operation; None if it is not remembered."""
        record = self._records.get(operation_id)
        return None if record is None else self._status(record)

    async def wait(self, operation_id: OperationId, num_left: int, wait_s: float) -> OperationStatus | None:
        """Return an operation once it is over, or ``record.num_left`` differs from ``num_left``, or after ``wait_s``.

        Return None if the operation is not remembered.
        """
        with anyio.move_on_after(wait_s):
            while (record := self._records.get(operation_id)) is not None:
                if not record.is_running or record.num_left != num_left:
                    break
                await self._changed.wait()
        return self.of(operation_id)

    def _status(self, record: OperationRecord) -> OperationStatus:
        pools, ended_s = record.pools, record.ended_s
        return OperationStatus(
            operation_id=record.operation_id,
            kind=record.kind,
            instance_id=record.instance_id,
            role=record.role,
            state=record.state,
            detail=record.detail,
            num_left=record.num_left,
            began_at=self._wall_time(record.began_s),
            ended_at=None if ended_s is None else self._wall_time(ended_s),
            timeout_s=record.timeout_s,
            pools=pools,
            needs_actuator=record.needs_actuator,
            resize_command=self._resize_command_for(pools) if record.needs_actuator and pools else "",
            request_id=record.request_id,
        )

    def _resize_command_for(self, pools: PoolCounts) -> str:
        command = self._resize_command
        for role in Role:
            command = command.replace(f"{{{role}}}", str(pools.of(role)))
        return command
