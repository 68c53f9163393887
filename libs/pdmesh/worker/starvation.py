"""Detection of processes that hang only because they get no processor time."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

#: States (proc(5)) of a thread that waits for a processor or a memory page. Other threads wait for an event, or are
#: stopped.
_WAITING_STATES = frozenset("RD")

#: Run time between two looks, 0.1 s apart, below which a ready thread is starved.
_SOME_NS = 2_000_000


class Thread(NamedTuple):
    """A thread's state and processor time, as the kernel reports them."""

    state: str
    run_ns: int


def threads_of(pid: int, proc: Path = Path("/proc")) -> dict[int, Thread]:
    """Return the threads of a process by id; empty if the process has ended or the system does not report them."""
    found: dict[int, Thread] = {}
    with suppress(OSError, ValueError, IndexError):
        for task in (proc / str(pid) / "task").iterdir():
            with suppress(FileNotFoundError, ProcessLookupError):
                state = (task / "stat").read_text().rpartition(")")[2].split()[0]
                run_ns = int((task / "schedstat").read_text().split()[0])
                found[int(task.name)] = Thread(state, run_ns)
    return found


def is_starved(before: Mapping[int, Thread], now: Mapping[int, Thread]) -> bool:
    """Whether any thread was ready to run at both looks, and hardly ran in between."""
    return any(
        thread.state in _WAITING_STATES
        and (earlier := before.get(thread_id)) is not None
        and earlier.state in _WAITING_STATES
        and thread.run_ns - earlier.run_ns < _SOME_NS
        for thread_id, thread in now.items()
    )
