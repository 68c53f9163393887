"""The file of what operators asked for, which the next scheduler reads."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import anyio
import anyio.to_thread
import msgspec
import structlog

from pdmesh.core.operators.desired import DesiredState
from pdmesh.core.scheduler import SchedulerCore
from pdmesh.ranges import out_of_range

log = structlog.get_logger()

#: Before what could not be written is tried again.
WRITE_AGAIN_S = 5.0

#: A larger file is none of ours: it holds a few hundred bytes an operation.
MAX_FILE_BYTES = 1 << 20


def read_desired(path: Path | None, *, now: float, patience_s: float) -> DesiredState:
    """Return what the scheduler before this one was asked for; if the file cannot be read, log that and return nothing.

    ``now`` is Unix time. A rolling restart goes on after ``patience_s`` at the latest, or when all have registered.
    """
    if path is None:
        return DesiredState()
    try:
        with path.open("rb") as file:
            desired = msgspec.json.decode(file.read(MAX_FILE_BYTES), type=DesiredState)
        if (problem := out_of_range(desired)) is not None:
            raise ValueError(problem)
    except FileNotFoundError:
        return DesiredState()
    except (OSError, msgspec.MsgspecError, ValueError) as error:
        log.error(
            "cannot read the operators' earlier changes; starting without them", path=str(path), reason=str(error)
        )
        return DesiredState()
    if desired.rolling is None:
        return desired
    age_s = max(0.0, now - desired.rolling.began_at)
    return replace(desired, rolling=replace(desired.rolling, age_s=age_s, patience_s=patience_s))


class DesiredFile:
    """Writes what operators want of a core whenever it has changed."""

    def __init__(self, core: SchedulerCore, path: Path | None, changed: Callable[[], anyio.Event]) -> None:
        """``changed`` returns an event that is set at the next change."""
        self._core = core
        self._path = path
        self._changed = changed
        self._written = DesiredState()
        self._is_complaining = False

    async def run(self) -> None:
        """Write until cancelled, and once more then. A failed write ends nothing; it is tried again."""
        try:
            while True:
                changed = self._changed()
                is_kept = await self._keep()
                with anyio.move_on_after(None if is_kept else WRITE_AGAIN_S):
                    await changed.wait()
        finally:
            with anyio.CancelScope(shield=True):
                await self._keep()

    async def _keep(self) -> bool:
        """Whether what is written is what is wanted."""
        while (desired := self._core.desired) != self._written:
            if self._path is not None and not await anyio.to_thread.run_sync(self._write, self._path, desired):
                return False
            self._written = desired
        return True

    def _write(self, path: Path, desired: DesiredState) -> bool:
        part = path.with_name(path.name + ".part")
        try:
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            with suppress(FileNotFoundError):
                part.unlink()
            descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            with os.fdopen(descriptor, "wb") as file:
                file.write(msgspec.json.format(msgspec.json.encode(desired)))
                file.flush()
                os.fsync(file.fileno())
            part.replace(path)
        except OSError as error:
            if not self._is_complaining:
                what = "cannot save the operators' changes; a restart will lose them"
                log.error(what, path=str(path), reason=error.strerror)
            self._is_complaining = True
            return False
        self._is_complaining = False
        return True
