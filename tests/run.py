"""What ``make test`` and ``make test-all`` run, and one line that counts all of it.

    python tests/run.py                   # linters and meshes beside the other tests; not what is marked ``slow``
    python tests/run.py --all             # that, then pyright, what is slow, all examples and seeds, the device's tests
    python tests/run.py tests/unit/test_ranges.py -k empty   # only these, in one process

Other arguments are pytest's, for each part. Tests run on all cores, and more of them than there are cores, since many
wait for something. Those of meshes have processes of their own, each with whole files of them: a mesh is started once
for its file. What they print comes when they are through. The tests of the machine's device run alone. The seed of
drawn examples is the date: who runs the tests on the same day draws the same, and ``--hypothesis-seed`` with a date
draws that day's again.

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
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).parents[1]

#: Folders of tests that need the machine's device for themselves, and of those whose meshes are processes.
ALONE, MESHES = "gpu", "e2e"

#: Each process loads torch.
MAX_PROCESSES = 12

#: pytest's exit codes: all passed, some failed, nothing was collected. Any other means that it broke off.
PASSED, FAILED, NOTHING = 0, 1, 5
COMPLETE = {PASSED, FAILED, NOTHING}

#: CPU time that a test may take in `make test`, in seconds, and how many times that much fails the run: CPU time is
#: nearly the same on a machine that is busy, but not on one that is slower.
BUDGET_S, TOLERANCE = 2.0, 4.0

#: Characters of a failure, and lines that its meshes warned of, that are printed again at the end: a log may be kept
#: without what came before it.
WHY_LENGTH, MAX_WARNINGS = 400, 20

#: Longest time of a part, in seconds: a test that hung past its own time limit, in code that swallowed that, kept a run
#: from its end for half an hour.
PART_LIMIT_S = 45 * 60.0

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
            broke = [*case.findall("failure"), *case.findall("error")]
            if broke:
                self.num_failed += 1
                why = " ".join(broke[0].get("message", "").split())[:WHY_LENGTH]
                warned = [f"  {line}" for text in noted(case, "warned")[:1] for line in text.splitlines()]
                self.notes += [f"{case.get('classname')}::{case.get('name')} failed: {why}", *warned[:MAX_WARNINGS]]
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


def stages(arguments: Sequence[str], *, everything: bool) -> Iterator[Sequence[Part]]:
    """Parts that run beside each other, and then those that come after them."""
    if any((ROOT / argument.partition("::")[0]).exists() for argument in arguments if not argument.startswith("-")):
        yield [Part("tests", arguments)]
        return
    folders = sorted({file.relative_to(ROOT).parts[1] for file in ROOT.glob("tests/*/**/test_*.py")})
    others = [f"tests/{folder}" for folder in folders if folder not in {ALONE, MESHES}]
    num_cores = len(os.sched_getaffinity(0))
    seed = f"--hypothesis-seed={datetime.now(UTC):%Y%m%d}"
    spread = ("-n", str(min(num_cores + (num_cores + 1) // 2, MAX_PROCESSES)), "--dist", "worksteal", seed)
    by_file = ("-n", str(min(num_cores, MAX_PROCESSES)), "--dist", "loadfile", seed)
    fast, drawn = ("-m", "not slow"), ("-m", "slow or drawn", "--hypothesis-profile=all")
    yield [
        Part("tests", [*spread, *fast, *arguments, *others], linters=["ruff", "imports", "mypy"], budget_s=BUDGET_S),
        Part("meshes", [*by_file, *fast, *arguments, f"tests/{MESHES}"]),
    ]
    if everything:
        yield [
            Part("slow and drawn tests", [*spread, *drawn, *arguments, *others], linters=["pyright"]),
            Part("slow meshes", [*by_file, *drawn, *arguments, f"tests/{MESHES}"]),
        ]
        yield [Part("device", [*arguments, f"tests/{ALONE}"])]


def run(parts: Sequence[Part], outcomes: Outcomes, folder: Path) -> set[int]:
    """Run parts beside each other and their linters, count what became of them, and return pytest's exit codes."""
    reports = [folder / f"{number}.xml" for number in range(len(parts))]
    commands = [[*PYTEST, *part.pytest, f"--junitxml={report}"] for part, report in zip(parts, reports, strict=True)]
    with linting([name for part in parts for name in part.linters], outcomes):
        codes = exit_codes_of(commands, folder)
    for part, report, code in zip(parts, reports, codes, strict=True):
        if report.exists():
            outcomes.add_report(report, part.budget_s)
            report.unlink()
        if code not in COMPLETE:
            outcomes.add(f"{part.name}: pytest, with exit code {code},", passed=False)
    return set(codes)


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


def exit_codes_of(commands: Sequence[Sequence[str]], folder: Path) -> list[int]:
    """Run commands beside each other. The first prints as it goes; what the others print follows it."""
    with ExitStack() as stack:
        outputs = [stack.enter_context((folder / f"{number}.out").open("w+")) for number in range(1, len(commands))]
        processes = [
            stack.enter_context(subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=output))
            for command, output in zip(commands, [None, *outputs], strict=True)
        ]
        codes = [exit_code_of(process) for process in processes]
        for output in outputs:
            output.seek(0)
            sys.stdout.write(output.read())
        sys.stdout.flush()
    return codes


def exit_code_of(process: subprocess.Popen[bytes]) -> int:
    try:
        return process.wait(PART_LIMIT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()
    except KeyboardInterrupt:  # it is told as we are, and has a summary to print
        return process.wait() or FAILED


def main(arguments: Sequence[str]) -> int:
    """1 if anything failed or no test was found, else 0."""
    outcomes, codes, took = Outcomes(), set[int](), list[str]()
    chosen = stages([each for each in arguments if each != "--all"], everything="--all" in arguments)
    with tempfile.TemporaryDirectory() as folder:
        for parts in chosen:
            began_s = time.monotonic()
            codes |= run(parts, outcomes, Path(folder))
            took.append(f"{' beside '.join(part.name for part in parts)}: {time.monotonic() - began_s:.0f} s")
            if not codes <= COMPLETE:
                break
    if codes == {NOTHING}:
        outcomes.add("choosing tests: none was found, which", passed=False)
    sys.stdout.write("\n".join(["; ".join(took), *outcomes.lines()]) + "\n")
    return int(outcomes.num_failed > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
