"""A file of keys that is read again once it has changed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from pdmesh.errors import ConfigError

#: Shortest interval between two looks at the file, in seconds.
LOOK_S = 1.0


class WatchedFile:
    """Watched file. ``setting`` names it in messages; ``clock`` returns seconds."""

    def __init__(self, path: Path, setting: str, clock: Callable[[], float]) -> None:
        self.path = path
        self.where = f"{setting} {path}"
        self._clock = clock
        self._looked_s = clock()
        self._seen = self._state()

    def text(self) -> str:
        """Return the file's content. Raises ConfigError if it cannot be read."""
        try:
            return self.path.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise ConfigError(f"cannot read {self.where}: {error}") from error

    def has_changed(self) -> bool:
        """Return whether the file has changed since the last look; False, without a look, within `LOOK_S` of it."""
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
        return stat.st_mtime_ns, stat.st_ctime_ns, stat.st_size, stat.st_ino  # ctime shows changed permissions
