"""Which processes stand still because the machine does not let them run."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from pdmesh.worker.starvation import Thread, is_starved, threads_of

WAITS, SLEEPS, STOPPED = "R", "S", "T"


@pytest.mark.parametrize(
    ("before", "now", "expected"),
    [
        ({1: Thread(WAITS, 10)}, {1: Thread(WAITS, 10)}, True),
        ({1: Thread("D", 10)}, {1: Thread("D", 10)}, True),  # a page of it is read again
        ({1: Thread(WAITS, 0)}, {1: Thread(WAITS, 90_000_000)}, False),  # it runs, and does not get on
        ({1: Thread(SLEEPS, 10)}, {1: Thread(SLEEPS, 10)}, False),
        ({1: Thread(STOPPED, 10)}, {1: Thread(STOPPED, 10)}, False),
        ({1: Thread(SLEEPS, 10)}, {1: Thread(WAITS, 10)}, False),  # for no longer than since the last look
        ({1: Thread(SLEEPS, 10), 2: Thread(WAITS, 7)}, {1: Thread(SLEEPS, 10), 2: Thread(WAITS, 8)}, True),
        ({}, {1: Thread(WAITS, 10)}, False),  # the first look
        ({1: Thread(WAITS, 10)}, {}, False),  # the system does not say
    ],
)
def test_a_thread_that_is_ready_and_does_not_run_is_starved(
    before: dict[int, Thread], now: dict[int, Thread], expected: bool
) -> None:
    assert is_starved(before, now) is expected


def test_the_kernel_shows_who_runs_and_who_was_stopped() -> None:
    program = "print('ready', flush=True)\nwhile True: pass"
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            if not (threads := threads_of(process.pid)):
                pytest.skip("this system does not say how long a thread ran")
            (runs,) = threads.values()
            assert runs.state == "R"
            assert runs.run_ns > 0
            os.kill(process.pid, signal.SIGSTOP)
            os.waitpid(process.pid, os.WUNTRACED)
            before, now = threads_of(process.pid), threads_of(process.pid)
            assert [thread.state for thread in now.values()] == ["T"]
            assert not is_starved(before, now)
        finally:
            process.kill()


def test_nothing_is_said_of_a_process_that_has_ended_or_where_the_system_says_nothing(tmp_path: Path) -> None:
    assert threads_of(1, proc=tmp_path) == {}
    task = tmp_path / "7" / "task" / "7"
    task.mkdir(parents=True)
    (task / "stat").write_text("7 (a name) with) R 1 2")
    assert threads_of(7, proc=tmp_path) == {}
    (task / "schedstat").write_text("12 3 4\n")
    assert threads_of(7, proc=tmp_path) == {7: Thread("R", 12)}
