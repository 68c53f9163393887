"""Whether simulation finds bugs: plants those of ``planted_bugs.toml`` one by one and says how many seeds each took.

    python benchmarks/planted_bugs.py                      # all of them; exit code 1 if more than two are not found
    python benchmarks/planted_bugs.py --only "freed under"

Each is planted in a copy of the sources, and looked for by ``benchmarks/dst.py`` in a process of its own.
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
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BUGS = Path(__file__).with_suffix(".toml")
SOURCES = ("libs", "services/gateway", "services/scheduler", "services/prefill", "services/decode")

#: So many may stay hidden.
MAX_HIDDEN = 2


@dataclass(frozen=True, slots=True)
class Bug:
    """A change of one line; ``old`` occurs once in ``file``."""

    what: str
    file: str
    old: str
    new: str

    def planted(self, text: str) -> str:
        """``text`` of the file with the bug. Raises ValueError if it has changed since the bug was written."""
        if text.count(self.old) != 1:
            raise ValueError(f"{self.file} has {text.count(self.old)} times: {self.old}")
        return text.replace(self.old, self.new)


def bugs() -> list[Bug]:
    return [Bug(**entry) for entry in tomllib.loads(BUGS.read_text())["bug"]]


def main() -> int:
    arguments = _arguments()
    chosen = [bug for bug in bugs() if arguments.only in bug.what]
    num_hidden = 0
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        for name in ("libs", "services", "benchmarks"):
            shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
        for bug in chosen:
            file = copy / bug.file
            sound = file.read_text()
            file.write_text(bug.planted(sound))
            began_s = time.monotonic()
            found = _look(copy, arguments.seeds, arguments.limit_s)
            num_hidden += found is None
            print(f"{found or 'not found':<60.60}  {time.monotonic() - began_s:5.0f} s  {bug.what}", flush=True)
            file.write_text(sound)
    print(f"{len(chosen) - num_hidden} of {len(chosen)} found")
    return int(num_hidden > MAX_HIDDEN)


def _look(copy: Path, num_seeds: int, limit_s: float) -> str | None:
    """How many seeds it took, and the law that broke; None if none did."""
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(str(copy / source) for source in SOURCES)}
    command = [sys.executable, "benchmarks/dst.py", "--seeds", str(num_seeds), "--no-shrink", "--limit-s", str(limit_s)]
    ended = subprocess.run(command, cwd=copy, env=environ, capture_output=True, text=True, check=False)
    match = re.search(r"^seed (\d+): ([^:]*)", ended.stdout, re.M)
    if match is not None:
        return f"{int(match[1]) + 1:4} seeds: {match[2]}"
    if ended.returncode != 0:
        raise RuntimeError(f"simulation failed:\n{ended.stdout}{ended.stderr}")
    return None


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=2000, help="to look for each bug in")
    parser.add_argument("--limit-s", type=float, default=120.0, help="to look for each bug")
    parser.add_argument("--only", default="", help="bugs whose description has this in it")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
