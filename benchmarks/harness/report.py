"""What every benchmark prints first: on what, and of which commit, it was measured; or why it was not."""

from __future__ import annotations

import os
import platform
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from pdmesh.build_info import core_build

#: Exit code of a benchmark that cannot run here: EX_UNAVAILABLE of sysexits.h.
UNAVAILABLE = 69

#: What *greedy* and *sampled* mean beside the figures of every benchmark.
GREEDY: Mapping[str, float] = {"temperature": 0.0}
SAMPLED: Mapping[str, float] = {"temperature": 0.7, "top_p": 0.95, "top_k": 40}

#: How the last line of a benchmark begins that measured all, and missed a limit.
MISSED = "limits missed:"


def heading(title: str) -> str:
    """Title, machine, commit and which core runs, in two lines."""
    machine = f"{cpu_model()}, {os.cpu_count()} cores, Python {platform.python_version()}"
    return f"{title}\n{machine}; core: {core_build()}; commit {commit()}"


def unavailable(reason: str) -> NoReturn:
    """Say why nothing is measured, and exit."""
    print(f"not measured: {reason}", file=sys.stderr)
    sys.exit(UNAVAILABLE)


class Limits:
    """What a benchmark is to keep. A miss is printed beside its figure, and is the exit code of `end`."""

    def __init__(self) -> None:
        self._missed: list[str] = []

    def at_most(self, what: str, value: float, limit: float) -> str:
        """How ``value`` stands to the most it may be, in words."""
        words = f"{value / limit:.2f} x the limit" if limit else f"the limit is {limit:g}"
        return self._judged(what, value <= limit, words)

    def at_least(self, what: str, value: float, limit: float) -> str:
        """How ``value`` stands to the least it must be, in words."""
        return self._judged(what, value >= limit, f"{value / limit:.2f} x the target")

    def _judged(self, what: str, is_kept: bool, words: str) -> str:
        if not is_kept:
            self._missed.append(what)
        return words if is_kept else f"{words}: MISSED"

    def end(self) -> NoReturn:
        """Say what was missed, and exit: with 1 if anything was."""
        if self._missed:
            print(f"{MISSED} {', '.join(self._missed)}")
        sys.exit(1 if self._missed else 0)


def cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.machine()


def commit() -> str:
    """The short commit, with a + if the tree has changes; "unknown" where git, or the repository, is missing."""

    def git(*arguments: str) -> str:
        try:
            return subprocess.run(["git", *arguments], capture_output=True, text=True, check=False).stdout.strip()
        except FileNotFoundError:
            return ""

    return (git("rev-parse", "--short", "HEAD") or "unknown") + ("+" if git("status", "--porcelain") else "")


def quantile(values: Sequence[float], share: float) -> float:
    """The ``share`` quantile, interpolated; ``values`` must hold at least two."""
    return statistics.quantiles(values, n=100, method="inclusive")[round(share * 100) - 1]
