"""A file of keys that is read again once it has changed, which is looked at when a key is checked."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from pdmesh.errors import ConfigError

#: At most so often it is looked at.
LOOK_S = 1.0


class WatchedFile:
    """``setting`` is what names it, for messages; ``clock`` tells seconds."""

    def __init__(self, path: Path, setting: str, clock: Callable[[], float]) -> None:
        self.path = path
        self.where = f"{setting} {path}"
        self._clock = clock
        self._looked_s = clock()
        self._seen = self._state()

    def text(self) -> str:
        """What it holds. Raises ConfigError if it cannot be read."""
        try:
            return self.path.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise ConfigError(f"cannot read {self.where}: {error}") from error

    def has_changed(self) -> bool:
        """Whether it has since this was last asked, as far as it was looked at."""
        now_s = self._clock()
        if now_s < self._looked_s + LOOK_S:
            return False
        self._looked_s = now_s
        before, self._seen = self._seen, self._state()
        return self._seen != before

    def _state(self) -> tuple[int, ...] | None:
        try:
            stat = self.path.stat()
        except OSError:
            return None
        return stat.st_mtime_ns, stat.st_ctime_ns, stat.st_size, stat.st_ino  # a change of who may read it counts
