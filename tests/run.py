"""Run the tests and linters of ``make test``, ``make test-all`` and CI, and count them in one line.

    python tests/run.py                   # ruff, import-linter, and the tests that are not marked ``slow``
    python tests/run.py --all             # that, then type checkers, slow tests, all examples and seeds, the device
    python tests/run.py --ci              # as --all, with a part of the slow tests, which changes from day to day
    python tests/run.py --all --record    # measure anew how long slow tests take, for --ci
    python tests/run.py tests/unit/test_ranges.py -k empty   # only these, in one process

Other arguments are pytest's, for each part. Tests run on all cores, and more of them than there are cores, since many
wait for something. Those of meshes have processes of their own, each with whole files of them: a mesh is started once
for its file. What they print comes when they are through. The tests of the machine's device run alone. The seed of
drawn examples is the date: who runs the tests on the same day draws the same, and ``--hypothesis-seed`` with a date
draws that day's again.

Of test functions that take long, ``make test`` runs a few parameters, other ones each day. CI takes the slow tests of
files that the newest commits touch, and each day another share of the other files (`pdmesh_testing.rotation`). No test
fails for the time it takes, because processors differ. The slowest tests are listed at the end. Only CI has a time
limit: slow tests that have not begun by then are skipped.

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
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from xml.etree import ElementTree

from pdmesh_testing import rotation

ROOT = Path(__file__).parents[1]

#: Folders of tests that need the machine's device for themselves, and of those whose meshes are processes.
ALONE, MESHES = "gpu", "e2e"

#: Each process loads torch.
MAX_PROCESSES = 12

#: pytest's exit codes: all passed, some failed, nothing was collected. Any other means that it broke off.
PASSED, FAILED, NOTHING = 0, 1, 5
COMPLETE = {PASSED, FAILED, NOTHING}

#: Tests listed at the end with their CPU time, if that is this many seconds or more.
NUM_SLOWEST, SLOW_CPU_S = 10, 2.0

#: CPU seconds of each file's slow tests, as ``--record`` measured them.
RECORD = ROOT / "tests/cpu_seconds.json"

#: Seconds after the start of a run of CI at which slow tests no longer begin, and at which a part that hangs is ended.
#: CI itself ends a run after 90 minutes, on whatever processor.
CI_NO_MORE_S, CI_LIMIT_S = 40 * 60.0, 65 * 60.0

#: Characters of a failure, and lines that its meshes warned of, that are printed again at the end: a log may be kept
#: without what came before it.
WHY_LENGTH, MAX_WARNINGS = 400, 20

#: Options of this script; all others are pytest's.
OPTIONS = {"--all", "--ci", "--record"}

#: Place of the slow tests among the stages, and variables that ``conftest.py`` reads there: a folder for notes of CPU
#: time, and when slow tests no longer begin (seconds since 1970). The day of the run is set for all stages.
SLOW_STAGE, CPU_NOTES, SLOW_UNTIL = 1, "TESTS_CPU_NOTES", "TESTS_SLOW_UNTIL"
DAY = "TESTS_DAY"

PYTEST = (sys.executable, "-m", "pytest")


@dataclass(frozen=True, slots=True)
class Part:
    """Tests that run in one pytest, and the linters beside them."""

    name: str
    pytest: Sequence[str]  # its arguments
    linters: Sequence[str] = ()  # targets of the Makefile


@dataclass(slots=True)
class Outcomes:
    """What became of all parts so far."""

    num_passed: int = 0
    num_failed: int = 0
    num_skipped: int = 0
    skipped: Counter[str] = field(default_factory=Counter[str])  # by reason
    cpu_levels: Counter[str] = field(default_factory=Counter[str])  # that tests were about and ran at
    cpu_s: dict[str, float] = field(default_factory=dict[str, float])  # by test, of tests that passed
    notes: list[str] = field(default_factory=list[str])  # to be read at the end

    def add(self, name: str, *, passed: bool) -> None:
        self.num_passed += passed
        self.num_failed += not passed
        if not passed:
            self.notes.append(f"{name} failed")

    def add_report(self, report: Path) -> None:
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
            else:
                self.num_passed += 1
                # A drawn test runs twice in ``--all``. Its first run, with few examples, is the one of `make test`.
                self.cpu_s.setdefault(f"{case.get('classname')}::{case.get('name')}", cpu_s_of(case))
                self.cpu_levels.update(noted(case, "cpu_level"))

    def lines(self) -> Iterator[str]:
        """What the run ends with."""
        yield from self.notes
        for name, cpu_s in sorted(self.cpu_s.items(), key=lambda each: -each[1])[:NUM_SLOWEST]:
            if cpu_s >= SLOW_CPU_S:
                yield f"{cpu_s:.1f} s of CPU time: {name}"
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


def stages(
    arguments: Sequence[str], *, everything: bool, slow_files: Sequence[str] | None = None
) -> Iterator[Sequence[Part]]:
    """Yield parts that run beside each other, then the parts that follow them.

    With ``everything``, slow tests follow: the ones in ``slow_files``, or all of them if that is None.
    """
    if any((ROOT / argument.partition("::")[0]).exists() for argument in arguments if not argument.startswith("-")):
        yield [Part("tests", arguments)]
        return
    folders = sorted({file.relative_to(ROOT).parts[1] for file in ROOT.glob("tests/*/**/test_*.py")})
    others = [f"tests/{folder}" for folder in folders if folder not in {ALONE, MESHES}]
    num_cores = len(os.sched_getaffinity(0))
    seed = f"--hypothesis-seed={datetime.now(UTC):%Y%m%d}"
    spread = ("-n", str(min(num_cores + (num_cores + 1) // 2, MAX_PROCESSES)), "--dist", "worksteal", seed)
    by_file, one_by_one = (
        ("-n", str(number), "--dist", "loadfile", seed) for number in (min(num_cores, MAX_PROCESSES), 1)
    )
    fast, drawn = ("-m", "not slow"), ("-m", "slow or drawn", "--hypothesis-profile=all")
    yield [
        Part("tests", [*spread, *fast, *arguments, *others], linters=["ruff", "imports"]),
        Part("meshes", [*one_by_one, *fast, *arguments, f"tests/{MESHES}"]),
    ]
    if not everything:
        return
    slow_others, slow_meshes = others, [f"tests/{MESHES}"]
    if slow_files is not None:
        slow_meshes = [file for file in slow_files if is_below(file, MESHES)]
        slow_others = [file for file in slow_files if not is_below(file, MESHES, ALONE)]
    slow = [
        Part(name, [*processes, *drawn, *arguments, *chosen])
        for name, processes, chosen in (
            ("slow and drawn tests", spread, slow_others),
            ("slow meshes", by_file, slow_meshes),
        )
        if chosen
    ]
    slow[:1] = [replace(first, linters=["mypy", "pyright", "site"]) for first in slow[:1]]
    for part in slow:  # one by one: instances on a busy machine lose their leases, and streams start again
        yield [part]
    yield [Part("device", [*arguments, f"tests/{ALONE}"])]


def is_below(file: str, *folders: str) -> bool:
    """Tell whether a test file is in one of these folders of ``tests``."""
    return any(file.startswith(f"tests/{folder}/") for folder in folders)


def slow_files_of(today: datetime) -> list[str]:
    """Choose the test files of which CI runs the slow tests."""
    files = sorted(file.relative_to(ROOT).as_posix() for file in ROOT.glob("tests/*/**/test_*.py"))
    seconds = rotation.read_record(RECORD).slow_files
    touched = rotation.touched_tests(ROOT, files, rotation.changed_files(ROOT))
    return rotation.choose(files, seconds, touched, today.toordinal())


def run(parts: Sequence[Part], outcomes: Outcomes, folder: Path, limit_s: float | None = None) -> set[int]:
    """Run parts beside each other and their linters, count what became of them, and return pytest's exit codes."""
    reports = [folder / f"{number}.xml" for number in range(len(parts))]
    commands = [[*PYTEST, *part.pytest, f"--junitxml={report}"] for part, report in zip(parts, reports, strict=True)]
    with linting([name for part in parts for name in part.linters], outcomes):
        codes = exit_codes_of(commands, folder, limit_s)
    for part, report, code in zip(parts, reports, codes, strict=True):
        if report.exists():
            outcomes.add_report(report)
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


def exit_codes_of(commands: Sequence[Sequence[str]], folder: Path, limit_s: float | None = None) -> list[int]:
    """Run commands beside each other, and kill them after ``limit_s``.

    The first command prints while it runs. The output of the others follows.
    """
    with ExitStack() as stack:
        outputs = [stack.enter_context((folder / f"{number}.out").open("w+")) for number in range(1, len(commands))]
        processes = [
            stack.enter_context(subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=output))
            for command, output in zip(commands, [None, *outputs], strict=True)
        ]
        ends_s = None if limit_s is None else time.monotonic() + limit_s
        codes = [exit_code_of(process, ends_s) for process in processes]
        for output in outputs:
            output.seek(0)
            sys.stdout.write(output.read())
        sys.stdout.flush()
    return codes


def exit_code_of(process: subprocess.Popen[bytes], ends_s: float | None) -> int:
    """Wait for a process until ``ends_s`` by the monotonic clock, then kill it."""
    try:
        return process.wait(None if ends_s is None else max(0.0, ends_s - time.monotonic()))
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()
    except KeyboardInterrupt:  # pytest is interrupted too, and prints a summary
        return process.wait() or FAILED


def main(arguments: Sequence[str]) -> int:
    """1 if anything failed or no test was found, else 0."""
    outcomes, codes, took = Outcomes(), set[int](), list[str]()
    began_s = time.monotonic()
    today = datetime.now(UTC)
    os.environ[DAY] = str(today.toordinal())  # the same in all processes, also beyond midnight
    is_ci, records = "--ci" in arguments, "--record" in arguments
    chosen = stages(
        [each for each in arguments if each not in OPTIONS],
        everything=is_ci or "--all" in arguments,
        slow_files=slow_files_of(today) if is_ci else None,
    )
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as cpu_notes:
        for number, parts in enumerate(chosen):
            if number == SLOW_STAGE and records:
                os.environ[CPU_NOTES] = cpu_notes
            if number == SLOW_STAGE and is_ci:
                os.environ[SLOW_UNTIL] = str(time.time() + CI_NO_MORE_S - (time.monotonic() - began_s))
            stage_began_s = time.monotonic()
            limit_s = CI_LIMIT_S - (stage_began_s - began_s) if is_ci else None
            codes |= run(parts, outcomes, Path(folder), limit_s)
            took.append(f"{' beside '.join(part.name for part in parts)}: {time.monotonic() - stage_began_s:.0f} s")
            if not codes <= COMPLETE:
                break
        if records:
            rotation.write_record(RECORD, outcomes.cpu_s, Path(cpu_notes))
    if codes == {NOTHING}:
        outcomes.add("choosing tests: none was found, which", passed=False)
    sys.stdout.write("\n".join(["; ".join(took), *outcomes.lines()]) + "\n")
    return int(outcomes.num_failed > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
