"""What it costs to start: a mesh of two workers, a worker's successor, and commands.

Each mesh is started ``--rounds`` times; the figures are the least of them. A cache folder of its own makes the first
round a first start, in which workers time their steps. CPU time of a process includes that of its children that ended.
Memory is PSS: a page that several processes map counts for each of them in part.

    python -m benchmarks.speed.start [--model FILE_OR_DIR] [--rounds 3]
"""

from __future__ import annotations

import argparse
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.harness.report import Limits, heading
from pdmesh_testing.mesh import RunningMesh, running_mesh

#: CPU seconds of a start of the demo model, of `pdmesh --help` and of `pdmesh status`; seconds for a successor.
DEMO_CPU_S, HELP_CPU_S, STATUS_CPU_S, SUCCESSOR_S = 8.0, 0.3, 0.4, 2.0

#: For workers to serve so long that their successors are started at once.
SERVED_WELL_S = 6.0


def cpu_of_command(command: Sequence[str], rounds: int) -> tuple[float, float]:
    """Return the least CPU time and wall time of a command."""
    cpu_s: list[float] = []
    wall_s: list[float] = []
    for _ in range(rounds):
        before, began_s = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
        subprocess.run(command, check=False, capture_output=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        wall_s.append(time.perf_counter() - began_s)
        cpu_s.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return min(cpu_s), min(wall_s)


def processes_of(supervisor_pid: int) -> dict[str, int]:
    """Return the supervisor and its children, by what they are."""
    children = Path(f"/proc/{supervisor_pid}/task/{supervisor_pid}/children").read_text().split()
    found = {"supervisor": supervisor_pid}
    for pid in map(int, children):
        command = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
        found[f"{command[2]} {pid}"] = pid
    return found


def cpu_s(pid: int) -> float:
    """Return the CPU time of a process and of its children that it has waited for."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    own, children = sum(map(int, fields[11:13])), 0 if pid == os.getpid() else sum(map(int, fields[13:15]))
    return (own + children) / os.sysconf("SC_CLK_TCK")


def pss_mb(pid: int) -> float:
    """Return the proportional set size of a process in megabytes."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("Pss:")) * 1024 / 1e6


def successor_s(mesh: RunningMesh, name: str) -> float:
    """Kill a worker and return the time until the supervisor says that it serves again."""
    log = mesh.folder / "supervisor.log"
    before = log.read_text().count(f"{name} serves again")
    began_s = time.perf_counter()
    os.kill(mesh.pids()[name], signal.SIGKILL)
    while log.read_text().count(f"{name} serves again") == before:
        time.sleep(0.01)
    return time.perf_counter() - began_s


def measure(model: Path | None, rounds: int, limits: Limits) -> None:
    """Print what a mesh of one prefill and one decode instance takes to start."""
    with tempfile.TemporaryDirectory() as folder:
        for number in range(rounds):
            began_s = time.perf_counter()
            with running_mesh(Path(folder), model=model) as mesh:
                ready_s = time.perf_counter() - began_s
                processes = processes_of(mesh.record.supervisor.pid)
                spent = {what: cpu_s(pid) for what, pid in processes.items()}
                taken = sum(map(pss_mb, processes.values()))
                each = ", ".join(f"{what.partition(' ')[0]} {seconds:.2f}" for what, seconds in spent.items())
                total = sum(spent.values())
                kept = f"; {limits.at_most('CPU time of a start', total, DEMO_CPU_S)}" if model is None else ""
                print(
                    f"{'demo' if model is None else model.name}, start {number + 1}: ready after {ready_s:.1f} s, "
                    f"CPU {total:.2f} s ({each}{kept}), PSS {taken:.0f} MB"
                )
                if number == rounds - 1:
                    time.sleep(SERVED_WELL_S)
                    seconds = successor_s(mesh, "prefill-0")
                    kept = limits.at_most("successor", seconds, SUCCESSOR_S)
                    print(f"  successor of prefill-0 serves after {seconds:.2f} s ({kept})")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", type=Path, action="append", default=[])
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    print(heading("start"))
    limits = Limits()
    pdmesh = [sys.executable, "-m", "pdmesh.cli"]
    for name, command, limit_s in (
        ("import torch", [sys.executable, "-c", "import torch"], None),
        ("pdmesh --help", [*pdmesh, "--help"], HELP_CPU_S),
        ("pdmesh status", [*pdmesh, "status", "--name", "none-of-this-name"], STATUS_CPU_S),
    ):
        cpu, wall = cpu_of_command(command, given.rounds)
        kept = "" if limit_s is None else f" ({limits.at_most(name, cpu, limit_s)})"
        print(f"{name}: CPU {cpu:.2f} s{kept}, wall {wall:.2f} s")
    for model in (None, *given.model):
        measure(model, given.rounds, limits)
    limits.end()


if __name__ == "__main__":
    main()
