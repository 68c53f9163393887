"""Identities of a mesh's processes."""

from __future__ import annotations

import os
import select
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class ProcessId:
    """The identity of a process: pids are reused, but not the pair of pid and start time."""

    pid: int
    start_ticks: int

    @property
    def alive(self) -> bool:
        return process_id(self.pid) == self

    def age_s(self) -> float:
        """Return how long ago the process started."""
        uptime_s = float(Path("/proc/uptime").read_text().split()[0])
        return uptime_s - self.start_ticks / os.sysconf("SC_CLK_TCK")

    def memory_bytes(self) -> int:
        """Return the resident memory; 0 once the process has ended."""
        try:
            return int(Path(f"/proc/{self.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        except OSError:
            return 0


def process_id(pid: int) -> ProcessId | None:
    """Return the process that has ``pid`` now; None if none runs (a zombie does not)."""
    try:
        # The name, in brackets, may contain any text. The fields behind it start with the state (field 3 of proc(5)).
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else ProcessId(pid, int(fields[19]))


def wait_for_end(process: ProcessId, timeout_s: float) -> bool:
    """Block until ``process`` has ended. Return False if it still runs after ``timeout_s``."""
    try:
        pidfd = os.pidfd_open(process.pid)
    except ProcessLookupError:
        return True
    try:
        return not process.alive or bool(select.select([pidfd], [], [], timeout_s)[0])
    finally:
        os.close(pidfd)
