"""How much memory the host has left for this process: of the machine, and of the control groups that it is in."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

_UNLIMITED = 1 << 60  # version 1 says "no limit" with a number as large


def free_host_bytes(root: Path = Path("/")) -> int | None:
    """The least that any of them leaves; what caches of files take counts as free. None if nobody says."""
    found = [*_of_machine(root / "proc/meminfo"), *_of_groups(root)]
    return max(0, min(found)) if found else None


def _of_machine(meminfo: Path) -> Iterator[int]:
    for line in _lines(meminfo):
        name, _, rest = line.partition(":")
        if name == "MemAvailable":
            yield int(rest.split()[0]) * 1024


def _of_groups(root: Path) -> Iterator[int]:
    """Each group's limit less what is used of it, up to the root: the nearest need not be the tightest."""
    for line in _lines(root / "proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            base, limit, usage, cache = root / "sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"
        elif "memory" in controllers.split(","):
            base, limit = root / "sys/fs/cgroup/memory", "memory.limit_in_bytes"
            usage, cache = "memory.usage_in_bytes", "total_inactive_file"
        else:
            continue
        group = base / path.lstrip("/")
        while True:
            limits, usages = _lines(group / limit), _lines(group / usage)
            if limits and usages and limits[0].isdigit() and int(limits[0]) < _UNLIMITED:
                cached = [int(entry.split()[1]) for entry in _lines(group / "memory.stat") if entry.split()[0] == cache]
                yield int(limits[0]) - int(usages[0]) + sum(cached)
            if group == base:
                break
            group = group.parent


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text(encoding="ascii").splitlines()
    except OSError:
        return []
