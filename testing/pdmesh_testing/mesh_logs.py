"""What the services of a test's meshes warned of."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

#: Number of last lines of each service, and number of characters of each line.
NUM_LINES, LINE_LENGTH = 8, 240

_QUIET = ('"level": "info"', '"level": "debug"')


def warnings_since(folder: Path, began_s: float) -> Iterator[str]:
    """Yield the last warnings of each service, with its name, from logs under ``folder`` written since ``began_s``.

    A line that is no record, such as a line of a traceback, counts as a warning.
    """
    for log in sorted(folder.glob("**/*.log")):
        if log.stat().st_mtime >= began_s:
            lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
            loud = [line for line in lines if not any(level in line for level in _QUIET)]
            yield from (f"{log.parent.name}/{log.stem}: {line[:LINE_LENGTH]}" for line in loud[-NUM_LINES:])
