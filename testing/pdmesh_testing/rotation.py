"""Choice of the tests that a run leaves out, by recorded CPU time, rotating by date.

`Record` is read from ``tests/cpu_seconds.json``, which ``tests/run.py --all --record`` writes. Budgets are in recorded
seconds, so that every processor runs the same tests. Tests that one run leaves out are in another:

* ``make test`` takes a few parameters of an expensive test function, other ones each day (`left_out`);
* CI takes the slow tests of the files that a change touches, and a seventh of the other files each day (`choose`).
"""

from __future__ import annotations

import ast
import json
import subprocess
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

#: Days in which each recorded file runs once.
NUM_SHARES = 7

#: Recorded CPU seconds that `make test` spends on one test function, and on one test.
FUNCTION_CPU_S, TEST_CPU_S = 0.75, 2.0

#: Recorded CPU seconds of touched files that one run takes in addition to the day's share.
TOUCHED_CPU_S = 150.0

#: Commits that are at most this much older than the newest one are the change. A session of work lasts three hours.
CHANGE_AGE_S = 4 * 3600

#: Folders below which a module's import name begins.
_SERVICES = ("services/gateway", "services/scheduler", "services/prefill", "services/decode")
SOURCE_ROOTS = ("libs", *_SERVICES, "kubernetes", "lab", "testing")


@dataclass(frozen=True, slots=True)
class Record:
    """CPU seconds of tests: of one call of an expensive test function, and of all slow tests of a file."""

    functions: Mapping[str, float]
    slow_files: Mapping[str, float]


def read_record(file: Path) -> Record:
    """Read a record; an empty one if the file does not exist."""
    try:
        values: dict[str, dict[str, float]] = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return Record({}, {})
    return Record(values["functions"], values["slow_files"])


def write_record(file: Path, cpu_s: Mapping[str, float], notes: Path) -> None:
    """Write the record of tests that took ``cpu_s``, and of test files that noted their CPU seconds below ``notes``."""
    functions: dict[str, list[float]] = {}
    for test, each_s in cpu_s.items():
        functions.setdefault(function_of(test), []).append(each_s)
    files: dict[str, float] = {}
    for noted in sorted(notes.iterdir()):
        for line in noted.read_text(encoding="utf-8").splitlines():
            name, _, file_s = line.rpartition(" ")
            files[name] = files.get(name, 0.0) + float(file_s)
    expensive = {name: sum(calls) / len(calls) for name, calls in functions.items() if sum(calls) > FUNCTION_CPU_S}
    values = {
        "functions": {name: round(each_s, 3) for name, each_s in sorted(expensive.items())},
        "slow_files": {name: round(file_s, 1) for name, file_s in sorted(files.items())},
    }
    file.write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")


def function_of(test: str) -> str:
    """Return a test's name without its parameters."""
    return test.partition("[")[0]


def left_out(tests: Sequence[str], record: Record, day: int) -> set[str]:
    """Return the tests that ``make test`` leaves out on ``day``.

    Of a function's tests, as many run as fit into `FUNCTION_CPU_S`, at least one; none if one alone takes more than
    `TEST_CPU_S`. Which ones run moves along the parameters from day to day.
    """
    functions: dict[str, list[str]] = {}
    for test in tests:
        functions.setdefault(function_of(test), []).append(test)
    out: set[str] = set()
    for name, calls in functions.items():
        each_s = record.functions.get(name, 0.0)
        if each_s * len(calls) <= FUNCTION_CPU_S:
            continue
        num_cached = 0 if each_s > TEST_CPU_S else max(1, int(FUNCTION_CPU_S / each_s))
        first = day * num_cached % len(calls)
        turned = [*calls[first:], *calls[:first]]
        out.update(turned[num_cached:])
    return out


def shares(seconds: Mapping[str, float], num_shares: int = NUM_SHARES) -> list[list[str]]:
    """Divide files into shares of nearly equal CPU time, the largest file first."""
    divided: list[list[str]] = [[] for _ in range(num_shares)]
    totals_s = [0.0] * num_shares
    for name in sorted(seconds, key=lambda name: (-seconds[name], name)):
        lightest = totals_s.index(min(totals_s))
        divided[lightest].append(name)
        totals_s[lightest] += seconds[name]
    return divided


def choose(files: Iterable[str], seconds: Mapping[str, float], touched: Sequence[str], day: int) -> list[str]:
    """Return the day's share of ``files``, then unrecorded and touched files up to `TOUCHED_CPU_S`."""
    present = set(files)
    divided = shares({name: cpu_s for name, cpu_s in seconds.items() if name in present})
    chosen = divided[day % len(divided)]
    left_s = TOUCHED_CPU_S
    for name in dict.fromkeys([*sorted(present - seconds.keys()), *touched]):
        cost_s = seconds.get(name, 0.0)
        if name in present and name not in chosen and cost_s <= left_s:
            chosen.append(name)
            left_s -= cost_s
    return sorted(chosen)


def changed_files(root: Path) -> list[str]:
    """Return the files that the newest commits changed; empty without git's history."""
    newest = _git(root, "log", "-1", "--format=%ct")
    if not newest:
        return []
    base = _git(root, "rev-list", "-1", f"--before={int(newest[0]) - CHANGE_AGE_S}", "HEAD")
    return _git(root, "diff", "--name-only", base[0], "HEAD") if base else []


def touched_tests(root: Path, files: Iterable[str], changed: Iterable[str]) -> list[str]:
    """Return changed test files, then test files that import a changed module, also through `pdmesh_testing`."""
    of_change = set(changed)
    own = [name for name in files if name in of_change]
    return own + [name for name in files if name not in of_change and of_change & set(_used_modules(root, root / name))]


def _used_modules(root: Path, test: Path) -> Iterator[str]:
    for module in _imported(test):
        path = _path_of(root, module)
        if path is None:
            continue
        yield path
        if path.startswith("testing/pdmesh_testing/"):
            yield from (used for each in _imported(root / path) if (used := _path_of(root, each)) is not None)


def _imported(file: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            yield node.module


def _path_of(root: Path, module: str) -> str | None:
    """Return a module's file below ``root``; None for a module of another project."""
    for source in SOURCE_ROOTS:
        for tail in (".py", "/__init__.py"):
            path = f"{source}/{module.replace('.', '/')}{tail}"
            if (root / path).exists():
                return path
    return None


def _git(root: Path, *arguments: str) -> list[str]:
    done = subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=False)
    return done.stdout.split("\n")[:-1] if done.returncode == 0 else []
