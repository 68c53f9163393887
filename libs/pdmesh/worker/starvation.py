"""Whether a process stands still because the machine does not let it run: it is not at fault then."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

#: States of a thread that waits for a processor, or for a page of its memory, as proc(5) has them. Others wait for
#: somebody, or were stopped.
_WAITING_STATES = frozenset("RD")

#: What has run for less than this between two looks has not done so by itself: looks are 0.1 s apart.
_SOME_NS = 2_000_000


class Thread(NamedTuple):
    """A thread of a process, as the kernel shows it."""

    state: str
    run_ns: int  # time that it had a processor


def threads_of(pid: int, proc: Path = Path("/proc")) -> dict[int, Thread]:
    """Return the threads of a process by their ids; empty if the system does not say, or the process has ended."""
    found: dict[int, Thread] = {}
    with suppress(OSError, ValueError, IndexError):
        for task in (proc / str(pid) / "task").iterdir():
            with suppress(FileNotFoundError, ProcessLookupError):  # it has ended meanwhile
                state = (task / "stat").read_text().rpartition(")")[2].split()[0]
                run_ns = int((task / "schedstat").read_text().split()[0])
                found[int(task.name)] = Thread(state, run_ns)
    return found


def is_starved(before: Mapping[int, Thread], now: Mapping[int, Thread]) -> bool:
    """Whether some thread was ready to run at both looks, and hardly ran in between."""
    return any(
        thread.state in _WAITING_STATES
        and (earlier := before.get(thread_id)) is not None
        and earlier.state in _WAITING_STATES
        and thread.run_ns - earlier.run_ns < _SOME_NS
        for thread_id, thread in now.items()
    )
