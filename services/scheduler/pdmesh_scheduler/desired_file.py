"""Storage of operators' wishes for the next scheduler: in a file, or beside the lease of several schedulers."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import anyio
import anyio.to_thread
import msgspec
import structlog

from pdmesh.core.operators.desired import DesiredState
from pdmesh.core.scheduler import SchedulerCore

log = structlog.get_logger()

#: Seconds until a failed write is tried again.
WRITE_AGAIN_S = 5.0

#: Largest file that is read. pdmesh writes a few hundred bytes an operation.
MAX_FILE_BYTES = 1 << 20

_UNREADABLE = "cannot read the operators' earlier changes; starting without them"


def read_desired(path: Path | None, *, now: float, patience_s: float) -> DesiredState:
    """Return the state that operators asked an earlier scheduler for; empty without a file, or if it cannot be read.

    Log why a file cannot be read. ``now`` is Unix time. A rolling restart continues when all instances have registered,
    after ``patience_s`` at the latest.
    """
    if path is None:
        return DesiredState()
    try:
        with path.open("rb") as file:
            content = file.read(MAX_FILE_BYTES)
    except FileNotFoundError:
        return DesiredState()
    except OSError as error:
        log.error(_UNREADABLE, where=str(path), reason=str(error))
        return DesiredState()
    return decode_desired(content, str(path), now=now, patience_s=patience_s)


def decode_desired(content: bytes, where: str, *, now: float, patience_s: float) -> DesiredState:
    """Return the state that JSON from ``where`` holds, as `read_desired` does; empty, and logged, if malformed."""
    try:
        desired = msgspec.json.decode(content, type=DesiredState)
    except (msgspec.MsgspecError, ValueError) as error:
        log.error(_UNREADABLE, where=where, reason=str(error))
        return DesiredState()
    if desired.rolling is None:
        return desired
    age_s = max(0.0, now - desired.rolling.began_at)
    return replace(desired, rolling=replace(desired.rolling, age_s=age_s, patience_s=patience_s))


#: Keeps the JSON of the desired state and returns whether that succeeded.
Keep = Callable[[bytes], Awaitable[bool]]


class DesiredKeeper:
    """Task that keeps a core's desired state whenever it has changed."""

    def __init__(self, core: SchedulerCore, keep: Keep | None, changed: Callable[[], anyio.Event]) -> None:
        """``changed`` returns an event that is set at the next change; without ``keep`` nothing is kept."""
        self._core = core
        self._keep_content = keep
        self._changed = changed
        self._kept = DesiredState()

    async def run(self) -> None:
        """Keep each change until cancelled, and the last one then. Try again after a failure."""
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
        """Keep the desired state until it no longer changes. Return False if keeping failed."""
        while (desired := self._core.desired) != self._kept:
            if self._keep_content is not None and not await self._keep_content(msgspec.json.encode(desired)):
                return False
            self._kept = desired
        return True


class DesiredFile:
    """The file of the desired state; `keep` replaces it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._is_complaining = False

    async def keep(self, content: bytes) -> bool:
        """Replace the file and return whether that succeeded. Log only the first of several failures."""
        return await anyio.to_thread.run_sync(self._write, content)

    def _write(self, content: bytes) -> bool:
        path, part = self._path, self._path.with_name(self._path.name + ".part")
        try:
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            with suppress(FileNotFoundError):
                part.unlink()
            descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            with os.fdopen(descriptor, "wb") as file:
                file.write(msgspec.json.format(content))
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
