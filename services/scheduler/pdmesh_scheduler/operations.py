"""Operators' operations, as the service keeps them: for those who wait for one, and for the next scheduler."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import anyio
import anyio.to_thread
import msgspec
import structlog

from pdmesh.core.operator_events import BatchingChangeRequested, OperationRequested, ResizeRequested
from pdmesh.core.operators.records import OperationState, OperationView
from pdmesh.core.scheduler import SchedulerCore
from pdmesh.model import OperationId
from pdmesh.ranges import out_of_range
from pdmesh.wire.messages import OperationStatus
from pdmesh_scheduler.actuators import ActuatorDesk
from pdmesh_scheduler.observing import Handled
from pdmesh_scheduler.rolling import RollingDesk, RollingWish

log = structlog.get_logger()

#: Before what could not be written is tried again.
WRITE_AGAIN_S = 5.0

#: A larger file is none of ours: it holds a few hundred bytes an operation.
MAX_FILE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Wishes:
    """What operators asked for that still holds."""

    bundle: str | None = None  # None: the configured one
    batching: BatchingChangeRequested | None = None  # None: as configured, or the bundle's own
    operations: tuple[OperationRequested, ...] = ()
    pools: ResizeRequested | None = None  # None: as they were started
    replacements: tuple[OperationRequested, ...] = ()  # of services that are no instances
    rolling: RollingWish | None = None


def read_wishes(path: Path | None) -> Wishes:
    """What the scheduler before this one was asked for; nothing, said in the log, if the file cannot be read."""
    if path is None:
        return Wishes()
    try:
        with path.open("rb") as file:
            wishes = msgspec.json.decode(file.read(MAX_FILE_BYTES), type=Wishes)
    except FileNotFoundError:
        return Wishes()
    except (OSError, msgspec.MsgspecError, ValueError) as error:
        log.error(
            "cannot read the operators' earlier changes; starting without them", path=str(path), reason=str(error)
        )
        return Wishes()
    if (problem := out_of_range(wishes)) is not None:
        log.error("cannot read the operators' earlier changes; starting without them", path=str(path), reason=problem)
        return Wishes()
    return replace(
        wishes,
        operations=tuple(replace(wish, again=True) for wish in wishes.operations),
        pools=None if wishes.pools is None else replace(wishes.pools, again=True),
        replacements=tuple(replace(wish, again=True) for wish in wishes.replacements),
    )


class OperationsDesk:
    """Looks at the core after every event; implements `pdmesh_scheduler.observing.Observer`."""

    def __init__(
        self,
        core: SchedulerCore,
        *,
        actuators: ActuatorDesk,
        rolling: RollingDesk,
        configured_bundle: str,
        path: Path | None,
        wall_time: Callable[[float], float],
    ) -> None:
        self._core = core
        self._actuators = actuators
        self._rolling = rolling
        actuators.on_change = rolling.on_change = self._look
        self._configured_bundle = configured_bundle
        self._path = path
        self._wall_time = wall_time
        self._views: dict[OperationId, OperationView] = {}
        self._seen = (0, core.bundle, core.batching_wish)
        self._written = Wishes()
        self._changed = anyio.Event()
        self._is_complaining = False

    # --- what the core did ---

    def observe(self, handled: Handled) -> None:
        seen = self._core.num_operation_changes, handled.bundle, self._core.batching_wish
        if seen != self._seen:
            self._seen = seen
            self._look()

    def _look(self) -> None:
        views = [*self._core.operations, *self._actuators.views, *self._rolling.views]
        views.sort(key=lambda view: view.began_s)
        self._views = {view.operation_id: view for view in views}
        self._changed.set()
        self._changed = anyio.Event()

    @property
    def changed(self) -> anyio.Event:
        """Set at the next change of an operation, or of what is wanted."""
        return self._changed

    @property
    def _wishes(self) -> Wishes:
        bundle = self._core.bundle
        return Wishes(
            bundle=None if bundle == self._configured_bundle else bundle,
            batching=self._core.batching_wish,
            operations=tuple(self._core.wishes),
            pools=self._core.resize_wish,
            replacements=self._actuators.wishes,
            rolling=self._rolling.wish,
        )

    # --- those who ask ---

    def statuses(self) -> tuple[OperationStatus, ...]:
        """All that are remembered, the newest first."""
        return tuple(self._status(view) for view in reversed(self._views.values()))

    def status(self, operation_id: OperationId) -> OperationStatus | None:
        view = self._views.get(operation_id)
        return None if view is None else self._status(view)

    async def wait(self, operation_id: OperationId, num_left: int, wait_s: float) -> OperationStatus | None:
        """An operation once it is over or has another number of requests left, or after ``wait_s``."""
        with anyio.move_on_after(wait_s):
            while (view := self._views.get(operation_id)) is not None:
                if view.state is not OperationState.RUNNING or view.num_left != num_left:
                    break
                await self._changed.wait()
        self._actuators.expire()
        return self.status(operation_id)

    def _status(self, view: OperationView) -> OperationStatus:
        return OperationStatus(
            operation_id=view.operation_id,
            kind=view.kind,
            instance_id=view.instance_id,
            role=view.role,
            state=view.state,
            detail=view.detail,
            num_left=view.num_left,
            began_at=self._wall_time(view.began_s),
            ended_at=None if view.ended_s is None else self._wall_time(view.ended_s),
            timeout_s=view.timeout_s,
            pools=view.pools,
            needs_actuator=view.needs_actuator,
            request_id=view.request_id,
        )

    # --- the next scheduler ---

    async def run(self) -> None:
        """Write what operators asked for whenever it has changed, until cancelled.

        A disk that fails ends nothing; it is tried again.
        """
        try:
            while True:
                changed = self._changed
                is_kept = await self._keep()
                with anyio.move_on_after(None if is_kept else WRITE_AGAIN_S):
                    await changed.wait()
        finally:
            with anyio.CancelScope(shield=True):
                await self._keep()

    async def _keep(self) -> bool:
        """Whether what is written is what is wanted."""
        while (wishes := self._wishes) != self._written:
            if self._path is not None and not await anyio.to_thread.run_sync(self._write, self._path, wishes):
                return False
            self._written = wishes
        return True

    def _write(self, path: Path, wishes: Wishes) -> bool:
        part = path.with_name(path.name + ".part")
        try:
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            with suppress(FileNotFoundError):
                part.unlink()
            descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            with os.fdopen(descriptor, "wb") as file:
                file.write(msgspec.json.format(msgspec.json.encode(wishes)))
                file.flush()
                os.fsync(file.fileno())
            part.replace(path)
        except OSError as error:
            if not self._is_complaining:
                log.error(
                    "cannot save the operators' changes; a restart will lose them",
                    path=str(path),
                    reason=error.strerror,
                )
            self._is_complaining = True
            return False
        self._is_complaining = False
        return True
