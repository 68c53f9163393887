"""Lint, then every test once, and what took how long: what ``make test`` and CI run.

Tests run on all cores, but for those that need the machine's device for themselves. Those of meshes come after all
others, as many at once as there are cores: one alone starts, stops and waits for much of its time. Arguments are
pytest's, for each part; who names files or folders has those run alone, in one process.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]

#: Folders of tests that need the machine's device for themselves, and of those whose meshes are processes.
ALONE, MESHES = "gpu", "e2e"

#: Each process loads torch.
MAX_PROCESSES = 8

#: pytest's exit codes: all passed, some failed, nothing was collected. Any other ends the run.
PASSED, FAILED, NOTHING = 0, 1, 5

PYTEST = (sys.executable, "-m", "pytest")


def stages(arguments: Sequence[str]) -> dict[str, list[str]]:
    """pytest's commands, by what they are called at the end."""
    if any((ROOT / argument.partition("::")[0]).exists() for argument in arguments if not argument.startswith("-")):
        return {"tests": [*PYTEST, *arguments]}
    folders = sorted({file.relative_to(ROOT).parts[1] for file in ROOT.glob("tests/*/**/test_*.py")})
    others = [f"tests/{folder}" for folder in folders if folder not in {ALONE, MESHES}]
    num_processes = min(len(os.sched_getaffinity(0)), MAX_PROCESSES)
    spread = ("-n", str(num_processes), "--dist", "worksteal")
    return {
        f"tests, {num_processes} at once": [*PYTEST, *spread, *arguments, *others],
        f"tests/{MESHES}, {num_processes} at once": [*PYTEST, *spread, *arguments, f"tests/{MESHES}"],
        f"tests/{ALONE}, one at a time": [*PYTEST, *arguments, f"tests/{ALONE}"],
    }


def exit_code_of(command: Sequence[str]) -> int:
    with subprocess.Popen(command, cwd=ROOT) as process:
        try:
            return process.wait()
        except KeyboardInterrupt:  # it is told as we are, and has a summary to print
            return process.wait() or FAILED


def main(arguments: Sequence[str]) -> int:
    """An exit code of pytest's. Lint that fails ends the run, a test that fails does not."""
    codes: list[int] = []
    took: list[str] = []

    def run(name: str, command: Sequence[str]) -> int:
        began_s = time.monotonic()
        codes.append(exit_code_of(command))
        took.append(f"{name}: {time.monotonic() - began_s:.0f} s")
        return codes[-1]

    if run("lint", ["make", "--jobs=2", "--output-sync", "lint"]) == PASSED:
        codes.clear()
        for name, command in stages(arguments).items():
            if run(name, command) not in (PASSED, FAILED, NOTHING):
                break
    sys.stdout.write("; ".join(took) + "\n")
    worst = max((code for code in codes if code != NOTHING), key=abs, default=NOTHING)
    return worst if worst >= 0 else FAILED  # killed by a signal


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
