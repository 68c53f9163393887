"""Choose the slow test files of one CI run: the ones a change touches, and the day's share of the others.

``cpu_seconds.json`` holds the CPU seconds of each file's slow tests, as ``run.py --all --record`` measured them. The
files are divided into seven shares of nearly equal CPU time, one for each day, so that every slow test runs within a
week. A file that is not recorded counts as touched.
"""

from __future__ import annotations

import ast
import json
import subprocess
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

#: Days in which each recorded file runs once.
NUM_SHARES = 7

#: Recorded CPU seconds of touched files that one run takes in addition to the day's share.
TOUCHED_CPU_S = 400.0

#: Commits that are at most this much older than the newest one are the change. A session of work lasts three hours.
CHANGE_AGE_S = 4 * 3600

#: Folders below which a module's import name begins.
SOURCE_ROOTS = ("libs", "services/gateway", "services/scheduler", "services/prefill", "services/decode")


def recorded(file: Path) -> dict[str, float]:
    """Read CPU seconds by test file; empty if nothing was recorded."""
    try:
        seconds: dict[str, float] = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    return seconds


def record(file: Path, folder: Path) -> None:
    """Sum what test processes noted below ``folder``, lines of a test file and its CPU seconds, into ``file``."""
    seconds: dict[str, float] = {}
    for notes in sorted(folder.iterdir()):
        for line in notes.read_text(encoding="utf-8").splitlines():
            name, _, cpu_s = line.rpartition(" ")
            seconds[name] = seconds.get(name, 0.0) + float(cpu_s)
    rounded = {name: round(cpu_s, 1) for name, cpu_s in sorted(seconds.items())}
    file.write_text(json.dumps(rounded, indent=1) + "\n", encoding="utf-8")


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
    """Return changed test files, then those that import a changed module, directly or through `pdmesh.testing`."""
    of_change = set(changed)
    own = [name for name in files if name in of_change]
    return own + [name for name in files if name not in of_change and of_change & set(_used_modules(root, root / name))]


def _used_modules(root: Path, test: Path) -> Iterator[str]:
    for module in _imported(test):
        path = _path_of(root, module)
        if path is None:
            continue
        yield path
        if path.startswith("libs/pdmesh/testing/"):
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
