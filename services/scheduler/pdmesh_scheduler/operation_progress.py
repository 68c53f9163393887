"""The progress of operators' operations, for commands that ask and wait."""

from __future__ import annotations

from collections.abc import Callable

import anyio

from pdmesh.core.operators.operation_records import OperationView
from pdmesh.core.scheduler import SchedulerCore
from pdmesh.model import OperationId, OperationState, PoolCounts, Role
from pdmesh.wire.messages import OperationStatus
from pdmesh_scheduler.observing import Handled


class OperationStatuses:
    """Looks at the core after every event; implements `pdmesh_scheduler.observing.Observer`."""

    def __init__(
        self, core: SchedulerCore, wall_time: Callable[[float], float], resize_command: str | None = None
    ) -> None:
        self._core = core
        self._wall_time = wall_time
        self._resize_command = resize_command or ""
        self._views: dict[OperationId, OperationView] = {}
        self._seen = (0, core.bundle, core.batching)
        self._changed = anyio.Event()

    def observe(self, handled: Handled) -> None:
        """Take note of what has changed."""
        seen = self._core.num_operation_changes, handled.bundle, self._core.batching
        if seen != self._seen:
            self._seen = seen
            self._views = {view.operation_id: view for view in self._core.operations}
            self._changed.set()
            self._changed = anyio.Event()

    def changed(self) -> anyio.Event:
        """Return the event that is set at the next change of an operation, or of what operators want."""
        return self._changed

    def all(self) -> tuple[OperationStatus, ...]:
        """Return all operations that are remembered, the newest first."""
        return tuple(self._status(view) for view in reversed(self._views.values()))

    def of(self, operation_id: OperationId) -> OperationStatus | None:
        """Return an operation; None if it is not remembered."""
        view = self._views.get(operation_id)
        return None if view is None else self._status(view)

    async def wait(self, operation_id: OperationId, num_left: int, wait_s: float) -> OperationStatus | None:
        """Return an operation once it is over or has another number left than ``num_left``, or after ``wait_s``."""
        with anyio.move_on_after(wait_s):
            while (view := self._views.get(operation_id)) is not None:
                if view.state is not OperationState.RUNNING or view.num_left != num_left:
                    break
                await self._changed.wait()
        return self.of(operation_id)

    def _status(self, view: OperationView) -> OperationStatus:
        fields = view._asdict()
        began_s, ended_s = fields.pop("began_s"), fields.pop("ended_s")
        ended_at = None if ended_s is None else self._wall_time(ended_s)
        return OperationStatus(
            **fields,
            began_at=self._wall_time(began_s),
            ended_at=ended_at,
            resize_command=self._resize_command_for(view.pools) if view.needs_actuator and view.pools else "",
        )

    def _resize_command_for(self, pools: PoolCounts) -> str:
        command = self._resize_command
        for role in Role:
            command = command.replace(f"{{{role}}}", str(pools.of(role)))
        return command
