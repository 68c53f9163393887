"""Whether tests find bugs: plants those of ``planted_bugs.toml`` one by one and says how many seeds each took.

    python -m benchmarks.simulation.planted_bugs  # all; exit code 1 if more than two are not found
    python -m benchmarks.simulation.planted_bugs --only "freed under"
    python -m benchmarks.simulation.planted_bugs --only-seeds spread  # whose contexts are spread
    python -m benchmarks.simulation.planted_bugs --only-seeds states --only "(states)"
    python -m benchmarks.simulation.planted_bugs --seeds 100 \
        --tests tests/unit tests/services tests/contract tests/property
                                                           # as `make test`: by seeds, or else by a test of these

Each is planted in a copy of the sources, and looked for by ``dst.py`` in a process of its own. Tests have to
pass in a copy without a bug first.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BUGS = Path(__file__).with_suffix(".toml")
NOT_COPIED = (".*", "__pycache__", "build", "dist")
SERVICES = ("services/gateway", "services/scheduler", "services/prefill", "services/decode")
SOURCES = ("libs", *SERVICES, "kubernetes", "lab", "testing")

#: It looks whether bugs can be planted, which a planted one cannot.
OF_THESE_BUGS = "tests/unit/test_planted_bugs.py"

#: So many may stay hidden.
MAX_HIDDEN = 2


@dataclass(frozen=True, slots=True)
class Bug:
    """A change of a line or two; ``old`` occurs once in ``file``. Only ``tests`` run it, unless they are empty."""

    what: str
    file: str
    old: str
    new: str
    tests: Sequence[str] = ()

    def planted(self, text: str) -> str:
        """``text`` of the file with the bug. Raises ValueError if it has changed since the bug was written."""
        if text.count(self.old) != 1:
            raise ValueError(f"`old` occurs {text.count(self.old)} times in {self.file}, not once: {self.old}")
        return text.replace(self.old, self.new)


def bugs() -> list[Bug]:
    return [Bug(**entry) for entry in tomllib.loads(BUGS.read_text())["bug"]]


def main() -> int:
    arguments = _arguments()
    chosen = [bug for bug in bugs() if arguments.only in bug.what]
    num_found = 0
    if arguments.tests and (failing := _fails_without_a_bug(arguments.tests)) is not None:
        print(f"{failing} fails without a bug: nothing can be found by tests")
        return 1
    with ThreadPoolExecutor(arguments.processes) as executor:
        for bug, found in zip(chosen, executor.map(lambda bug: _search(bug, arguments), chosen), strict=True):
            num_found += found.law is not None
            print(
                f"{found.num_seeds:5} seeds {found.duration_s:5.0f} s  {found.law or 'NOT FOUND':<40.40} {bug.what}",
                flush=True,
            )
    print(f"{num_found} of {len(chosen)} found")
    return int(len(chosen) - num_found > MAX_HIDDEN)


@dataclass(frozen=True, slots=True)
class Found:
    """What a search came to; ``law`` is the one that broke, or the test that failed, or None."""

    num_seeds: int
    duration_s: float
    law: str | None


def _search(bug: Bug, arguments: argparse.Namespace) -> Found:
    """Plant a bug in a copy of the sources, and look for it there."""
    began_s = time.monotonic()
    with _copy() as copy:
        (copy / bug.file).write_text(bug.planted((ROOT / bug.file).read_text()))
        num_run, law = (0, None) if bug.tests else _look(copy, arguments)
        if law is None and (tests := bug.tests or arguments.tests):
            law = _failing_test(copy, tests)
    return Found(num_run, time.monotonic() - began_s, law)


def _fails_without_a_bug(tests: list[str]) -> str | None:
    with _copy() as copy:
        return _failing_test(copy, tests)


@contextmanager
def _copy() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "pdmesh"
        shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(*NOT_COPIED))
        yield copy


def _environ(copy: Path) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join(str(copy / source) for source in SOURCES)}


def _failing_test(copy: Path, tests: Sequence[str]) -> str | None:
    """Return the first that fails of those that `make test` runs, and fails again by itself; None if all pass."""
    passed_again: list[str] = []  # a machine that is busy has some fail that do not see the bug
    while (failed := _first_failure(copy, [*(f"--deselect={name}" for name in passed_again), *tests])) is not None:
        if _first_failure(copy, [failed]) is not None:
            return failed.rpartition("::")[2]
        passed_again.append(failed)
    return None


def _first_failure(copy: Path, arguments: Sequence[str]) -> str | None:
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-m", "not slow", f"--ignore={OF_THESE_BUGS}", *arguments]
    ended = subprocess.run(command, cwd=copy, env=_environ(copy), capture_output=True, text=True, check=False)
    if ended.returncode == 0:
        return None
    if (failed := re.search(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", ended.stdout, re.M)) is None:
        raise RuntimeError(f"tests broke off:\n{ended.stdout}{ended.stderr}")
    return failed[1]


def _look(copy: Path, arguments: argparse.Namespace) -> tuple[int, str | None]:
    """How many seeds it took, and the law that broke; None if none did."""
    command = [sys.executable, "-m", "benchmarks.simulation.dst", "--seeds", str(arguments.seeds)]
    command += ["--no-shrink", "--limit-s", str(arguments.limit_s)]
    command += ["--only", arguments.only_seeds] if arguments.only_seeds else []
    ended = subprocess.run(command, cwd=copy, env=_environ(copy), capture_output=True, text=True, check=False)
    if (match := re.search(r"^seed (\d+): ([^:]*)", ended.stdout, re.M)) is not None:
        return int(match[1]) + 1, match[2]
    if ended.returncode != 0 or (run := re.search(r"^(\d+) seeds from", ended.stdout, re.M)) is None:
        raise RuntimeError(f"simulation failed:\n{ended.stdout}{ended.stderr}")
    return int(run[1]), None


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=2000, help="to look for each bug in")
    parser.add_argument("--only-seeds", choices=("spread", "states", "tiers"), default="", help="look in these alone")
    parser.add_argument("--limit-s", type=float, default=120.0, help="to look for each bug")
    parser.add_argument("--processes", type=int, default=1, help="bugs looked for at once")
    parser.add_argument("--tests", nargs="*", default=[], help="to look for what no seed showed, files and folders")
    parser.add_argument("--only", default="", help="bugs whose description has this in it")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
