"""The host of this process: memory and cores within the limits of machine and control groups, and own addresses."""

from __future__ import annotations

import ipaddress
import os
import resource
from collections.abc import Iterator
from pathlib import Path

_UNLIMITED = 1 << 60  # version 1 reports a number about this large for "no limit"


def is_loopback(address: str) -> bool:
    """Return whether only this host reaches ``address``. Names other than ``localhost`` are not looked up."""
    if address == "localhost":
        return True
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False


def free_host_bytes(root: Path = Path("/")) -> int | None:
    """Return the free memory within the tightest limit of machine and control groups; None if none reports it.

    Caches of files count as free.
    """
    found = [*_of_machine(root / "proc/meminfo"), *_of_groups(root)]
    return max(0, min(found)) if found else None


def memory_limit_bytes(root: Path = Path("/")) -> int | None:
    """Return the tightest memory limit of the control groups; None if they set none."""
    limits = [limit for group in _groups(root, "memory") if (limit := _memory_limit(group)) is not None]
    return min(limits, default=None)


def num_usable_cores(root: Path = Path("/")) -> int:
    """Return the number of cores that this process may keep busy, within affinity and control groups; at least 1.

    The fraction of a core is left idle: threads that wait for each other all pause when one is stopped.
    """
    quotas = [quota for group in _groups(root, "cpu") if (quota := _quota(group)) is not None]
    return max(1, min([len(os.sched_getaffinity(0)), *map(int, quotas)]))


def num_startable_threads(root: Path = Path("/")) -> int | None:
    """Return how many threads and processes control groups and `ulimit -u` still permit; None without limits."""
    left = [
        limit - used
        for group in _groups(root, "pids")
        if (limit := _number(group / "pids.max")) is not None and (used := _number(group / "pids.current")) is not None
    ]
    limit, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    if limit != resource.RLIM_INFINITY and os.geteuid() != 0:  # root is exempt
        left.append(limit - _num_threads_of_user(root))
    return min(left, default=None)


def _num_threads_of_user(root: Path) -> int:
    status_files = (root / "proc").glob("[0-9]*/status")
    return sum(_field(file, "Threads:") or 0 for file in status_files if _field(file, "Uid:") == os.getuid())


def num_oom_kills(root: Path = Path("/")) -> int:
    """Return how many processes the kernel killed for lack of memory: in our control group, else on the machine."""
    for group in _groups(root, "memory"):
        for name in ("memory.events", "memory.oom_control"):
            if (count := _field(group / name, "oom_kill")) is not None:
                return count
    return _field(root / "proc/vmstat", "oom_kill") or 0


def _of_machine(meminfo: Path) -> Iterator[int]:
    if (available_kib := _field(meminfo, "MemAvailable:")) is not None:
        yield available_kib * 1024


def _of_groups(root: Path) -> Iterator[int]:
    """Yield the bytes left in each control group of this process that limits memory.

    Inactive file pages count as free, because the kernel can reclaim them.
    """
    for group in _groups(root, "memory"):
        limit = _memory_limit(group)
        usage = _number(group / "memory.current", group / "memory.usage_in_bytes")
        if limit is not None and usage is not None:
            stat = group / "memory.stat"
            yield limit - usage + (_field(stat, "total_inactive_file") or _field(stat, "inactive_file") or 0)


def _memory_limit(group: Path) -> int | None:
    limit = _number(group / "memory.max", group / "memory.limit_in_bytes")
    return limit if limit is not None and limit < _UNLIMITED else None


def _quota(group: Path) -> float | None:
    """Return the CPU limit of a control group, in cores; None if there is no limit."""
    quota, period = (*_words(group / "cpu.max"), "", "")[:2]
    if not quota:
        quota, period = (" ".join(_words(group / f"cpu.cfs_{name}_us")) for name in ("quota", "period"))
    return int(quota) / int(period) if quota.isdigit() and period.isdigit() and int(period) else None


def _groups(root: Path, controller: str) -> Iterator[Path]:
    """Yield the folders of our control groups, up to the root: the nearest need not be the tightest."""
    for line in _lines(root / "proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            base = root / "sys/fs/cgroup"
        elif controller in controllers.split(","):
            base = root / "sys/fs/cgroup" / controllers
            base = base if base.is_dir() else root / "sys/fs/cgroup" / controller
        else:
            continue
        group = base / path.lstrip("/")
        while True:
            yield group
            if group == base:
                break
            group = group.parent


def _field(file: Path, name: str) -> int | None:
    """Return the number after ``name`` on its line; None if there is none."""
    found = (line.split() for line in _lines(file))
    return next((int(words[1]) for words in found if len(words) > 1 and words[0] == name and words[1].isdigit()), None)


def _number(*files: Path) -> int | None:
    """Return the number in the first of the files that holds one; None if none does."""
    return next((int(text) for file in files if (text := " ".join(_words(file))).isdigit()), None)


def _words(file: Path) -> list[str]:
    return " ".join(_lines(file)).split()


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text(encoding="ascii").splitlines()
    except (OSError, UnicodeError):
        return []
