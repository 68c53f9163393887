"""What ``make test`` and ``make test-all`` run, and one line that counts all of it.

    python tests/run.py                   # linters beside the tests, then those of meshes; not what is marked ``slow``
    python tests/run.py --all             # that, then pyright, what is slow, all examples and seeds, the device's tests
    python tests/run.py tests/unit/test_ranges.py -k empty   # only these, in one process

Other arguments are pytest's, for each part. Tests run on all cores. Those of meshes come after the others, since a mesh
is several processes; those of the machine's device run alone. The seed of drawn examples is the date: who runs the
tests on the same day draws the same, and ``--hypothesis-seed`` with a date draws that day's again.

A test has a budget of CPU time, and one that needs several times as much fails the run.

The last line is ``N passed, N failed, N skipped``. Each linter counts as a test, and so does a part that broke off.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).parents[1]

#: Folders of tests that need the machine's device for themselves, and of those whose meshes are processes.
ALONE, MESHES = "gpu", "e2e"

#: Each process loads torch.
MAX_PROCESSES = 8

#: pytest's exit codes: all passed, some failed, nothing was collected. Any other means that it broke off.
PASSED, FAILED, NOTHING = 0, 1, 5
COMPLETE = {PASSED, FAILED, NOTHING}

#: CPU time that a test may take in `make test`, in seconds, and how many times that much fails the run: CPU time is
#: nearly the same on a machine that is busy, but not on one that is slower.
BUDGET_S, TOLERANCE = 2.0, 4.0

PYTEST = (sys.executable, "-m", "pytest")


@dataclass(frozen=True, slots=True)
class Part:
    """Tests that run in one pytest, and the linters beside them."""

    name: str
    pytest: Sequence[str]  # its arguments
    linters: Sequence[str] = ()  # targets of the Makefile
    budget_s: float | None = None  # of CPU time, for each test


@dataclass(slots=True)
class Outcomes:
    """What became of all parts so far."""

    num_passed: int = 0
    num_failed: int = 0
    num_skipped: int = 0
    skipped: Counter[str] = field(default_factory=Counter[str])  # by reason
    cpu_levels: Counter[str] = field(default_factory=Counter[str])  # that tests were about and ran at
    notes: list[str] = field(default_factory=list[str])  # to be read at the end

    def add(self, name: str, *, passed: bool) -> None:
        self.num_passed += passed
        self.num_failed += not passed
        if not passed:
            self.notes.append(f"{name} failed")

    def add_report(self, report: Path, budget_s: float | None) -> None:
        """Add the tests of a JUnit report."""
        for case in ElementTree.parse(report).iter("testcase"):
            skipped = case.find("skipped")
            if case.find("failure") is not None or case.find("error") is not None:
                self.num_failed += 1
            elif skipped is not None:
                self.num_skipped += 1
                self.skipped[skipped.get("message", "").partition("\n")[0]] += 1
            elif budget_s is not None and (cpu_s := cpu_s_of(case)) > TOLERANCE * budget_s:
                name = f"{case.get('classname')}::{case.get('name')}"
                self.num_failed += 1
                self.notes.append(
                    f"{name} took {cpu_s:.1f} s of CPU time; its budget is {budget_s:g} s: make it faster, or `slow`"
                )
            else:
                self.num_passed += 1
                self.cpu_levels.update(noted(case, "cpu_level"))

    def lines(self) -> Iterator[str]:
        """What the run ends with."""
        yield from self.notes
        for reason, number in self.skipped.most_common():
            yield f"{number} skipped: {reason}"
        if self.cpu_levels:
            levels = ", ".join(f"{level} ({number} tests)" for level, number in sorted(self.cpu_levels.items()))
            yield f"processor levels that ran: {levels}"
        yield f"{self.num_passed} passed, {self.num_failed} failed, {self.num_skipped} skipped"


def cpu_s_of(case: ElementTree.Element) -> float:
    """CPU seconds of a test, as ``conftest.py`` notes them."""
    return sum(float(value) for value in noted(case, "cpu_s"))


def noted(case: ElementTree.Element, name: str) -> list[str]:
    """Values of a test's properties of this name."""
    return [note.get("value", "") for note in case.iter("property") if note.get("name") == name]


def parts(arguments: Sequence[str], *, everything: bool) -> Iterator[Part]:
    """All parts, in the order they run in."""
    if any((ROOT / argument.partition("::")[0]).exists() for argument in arguments if not argument.startswith("-")):
        yield Part("tests", arguments)
        return
    folders = sorted({file.relative_to(ROOT).parts[1] for file in ROOT.glob("tests/*/**/test_*.py")})
    others = [f"tests/{folder}" for folder in folders if folder not in {ALONE, MESHES}]
    num_processes = min(len(os.sched_getaffinity(0)), MAX_PROCESSES)
    spread = ("-n", str(num_processes), "--dist", "worksteal", f"--hypothesis-seed={datetime.now(UTC):%Y%m%d}")
    fast, drawn = ((*spread, "-m", marks) for marks in ("not slow", "slow or drawn"))
    yield Part("tests", [*fast, *arguments, *others], linters=["ruff", "imports", "mypy"], budget_s=BUDGET_S)
    yield Part("meshes", [*fast, *arguments, f"tests/{MESHES}"])
    if everything:
        all_examples = "--hypothesis-profile=all"
        yield Part("slow and drawn tests", [*drawn, all_examples, *arguments, *others], linters=["pyright"])
        yield Part("slow meshes", [*drawn, all_examples, *arguments, f"tests/{MESHES}"])
        yield Part("device", [*arguments, f"tests/{ALONE}"])


def run(part: Part, outcomes: Outcomes, folder: Path) -> int:
    """Run a part beside its linters, count what became of them, and return pytest's exit code."""
    report = folder / "report.xml"
    report.unlink(missing_ok=True)
    with linting(part.linters, outcomes):
        code = exit_code_of([*PYTEST, *part.pytest, f"--junitxml={report}"])
    if report.exists():
        outcomes.add_report(report, part.budget_s)
    if code not in COMPLETE:
        outcomes.add(f"{part.name}: pytest, with exit code {code},", passed=False)
    return code


@contextmanager
def linting(linters: Iterable[str], outcomes: Outcomes) -> Iterator[None]:
    """Run linters one after the other beside the block; at its end print what they said, and count them."""
    with ThreadPoolExecutor(1) as executor:
        running = {name: executor.submit(lint, name) for name in linters}
        yield
    for name, future in running.items():
        linted = future.result()
        sys.stdout.write(linted.stdout)
        outcomes.add(name, passed=linted.returncode == 0)
    sys.stdout.flush()


def lint(name: str) -> subprocess.CompletedProcess[str]:
    command = ["make", "--no-print-directory", name]
    return subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)


def exit_code_of(command: Sequence[str]) -> int:
    with subprocess.Popen(command, cwd=ROOT) as process:
        try:
            return process.wait()
        except KeyboardInterrupt:  # it is told as we are, and has a summary to print
            return process.wait() or FAILED


def main(arguments: Sequence[str]) -> int:
    """1 if anything failed or no test was found, else 0."""
    outcomes, codes, took = Outcomes(), set[int](), list[str]()
    chosen = parts([each for each in arguments if each != "--all"], everything="--all" in arguments)
    with tempfile.TemporaryDirectory() as folder:
        for part in chosen:
            began_s = time.monotonic()
            codes.add(run(part, outcomes, Path(folder)))
            took.append(f"{part.name}: {time.monotonic() - began_s:.0f} s")
            if not codes <= COMPLETE:
                break
    if codes == {NOTHING}:
        outcomes.add("choosing tests: none was found, which", passed=False)
    sys.stdout.write("\n".join(["; ".join(took), *outcomes.lines()]) + "\n")
    return int(outcomes.num_failed > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
