"""What the machine and its control groups leave a process, of both versions."""

from __future__ import annotations

import os
import resource
from collections.abc import Callable
from pathlib import Path

import pytest

from pdmesh.host import free_host_bytes, memory_limit_bytes, num_oom_kills, num_startable_threads, num_usable_cores

Write = Callable[[str, str], None]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Writes a file of a machine whose root is ``tmp_path``."""

    def write_file(name: str, text: str) -> None:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)

    return write_file


def test_the_tightest_control_group_says_what_is_free(tmp_path: Path, write: Write) -> None:
    assert free_host_bytes(tmp_path) is None
    assert memory_limit_bytes(tmp_path) is None
    write("proc/meminfo", "MemTotal: 2000 kB\nMemAvailable: 1000 kB\n")
    assert free_host_bytes(tmp_path) == 1000 * 1024
    write("proc/self/cgroup", "4:memory:/a/b\n0::/c/d\n")
    write("sys/fs/cgroup/memory/a/memory.limit_in_bytes", "900000\n")
    write("sys/fs/cgroup/memory/a/memory.usage_in_bytes", "100000\n")
    write("sys/fs/cgroup/memory/memory.limit_in_bytes", f"{1 << 62}\n")  # none
    assert free_host_bytes(tmp_path) == 800_000
    write("sys/fs/cgroup/c/d/memory.max", "max\n")
    write("sys/fs/cgroup/c/d/memory.current", "7\n")
    write("sys/fs/cgroup/c/memory.max", "500000\n")
    write("sys/fs/cgroup/c/memory.current", "300000\n")
    write("sys/fs/cgroup/c/memory.stat", "anon 5\ninactive_file 50000\n")
    assert free_host_bytes(tmp_path) == 250_000
    assert memory_limit_bytes(tmp_path) == 500_000


@pytest.mark.parametrize(
    ("quotas", "num_cores"),
    [
        ({}, 8),
        ({"c/d/cpu.max": "max 100000"}, 8),
        ({"c/d/cpu.max": "max 100000", "c/cpu.max": "350000 100000"}, 3),
        ({"c/cpu.max": "50000 100000"}, 1),  # half a core
        ({"cpu,cpuacct/a/cpu.cfs_quota_us": "200000", "cpu,cpuacct/a/cpu.cfs_period_us": "100000"}, 2),
        ({"cpu,cpuacct/a/cpu.cfs_quota_us": "-1", "cpu,cpuacct/a/cpu.cfs_period_us": "100000"}, 8),
        ({"c/cpu.max": "1600000 100000"}, 8),
    ],
)
def test_no_more_threads_than_control_groups_give_cores(
    tmp_path: Path, write: Write, monkeypatch: pytest.MonkeyPatch, quotas: dict[str, str], num_cores: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: set(range(8)))
    write("proc/self/cgroup", "3:cpu,cpuacct:/a\n0::/c/d\n")
    for name, text in quotas.items():
        write(f"sys/fs/cgroup/{name}", f"{text}\n")
    assert num_usable_cores(tmp_path) == num_cores


def test_control_groups_and_the_user_limit_the_threads(
    tmp_path: Path, write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = {"user": resource.RLIM_INFINITY}
    monkeypatch.setattr(resource, "getrlimit", lambda _which: (limits["user"], limits["user"]))
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(os, "getuid", lambda: 1000)
    assert num_startable_threads(tmp_path) is None
    write("proc/self/cgroup", "7:pids:/a\n0::/c\n")
    write("sys/fs/cgroup/pids/a/pids.max", "max\n")
    write("sys/fs/cgroup/pids/a/pids.current", "3\n")
    assert num_startable_threads(tmp_path) is None
    write("sys/fs/cgroup/c/pids.max", "100\n")
    write("sys/fs/cgroup/c/pids.current", "30\n")
    assert num_startable_threads(tmp_path) == 70
    limits["user"] = 50
    write("proc/1/status", "Name: init\nUid:\t0\t0\t0\t0\nThreads:\t9\n")
    write("proc/2/status", "Name: x\nUid:\t1000\t1000\t1000\t1000\nThreads:\t13\n")
    assert num_startable_threads(tmp_path) == 37


def test_kills_for_want_of_memory_are_counted_by_our_group_else_by_the_machine(tmp_path: Path, write: Write) -> None:
    assert num_oom_kills(tmp_path) == 0
    write("proc/vmstat", "pgfault 7\noom_kill 3\n")
    assert num_oom_kills(tmp_path) == 3
    write("proc/self/cgroup", "4:memory:/a\n0::/\n")
    write("sys/fs/cgroup/memory/memory.oom_control", "oom_kill_disable 0\nunder_oom 0\noom_kill 1\n")
    assert num_oom_kills(tmp_path) == 1
    write("proc/self/cgroup", "0::/c\n")
    write("sys/fs/cgroup/c/memory.events", "low 0\nmax 4\noom 2\noom_kill 2\n")
    assert num_oom_kills(tmp_path) == 2
