"""What the services of a test's meshes warned of."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

#: Of each service: the last lines, and so many characters of each.
NUM_LINES, LINE_LENGTH = 8, 240

_QUIET = ('"level": "info"', '"level": "debug"')


def warnings_since(folder: Path, began_s: float) -> Iterator[str]:
    """Yield what services warned of, in logs under ``folder`` that were written since then, and who did.

    A line that is no record, as those of a traceback, counts as a warning.
    """
    for log in sorted(folder.glob("**/*.log")):
        if log.stat().st_mtime >= began_s:
            lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
            loud = [line for line in lines if not any(level in line for level in _QUIET)]
            yield from (f"{log.parent.name}/{log.stem}: {line[:LINE_LENGTH]}" for line in loud[-NUM_LINES:])
