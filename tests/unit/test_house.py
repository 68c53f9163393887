"""Count what the house has of each kind, and fail where a number has risen: `RECORDED` is the table.

`python tests/unit/test_house.py` prints the numbers and the places behind them. If your change lowers a number, lower
its row. A row of lines is rounded up, so that several changes fit below it.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import Counter
from collections.abc import Iterator
from functools import cache
from itertools import combinations
from pathlib import Path

#: The highest number allowed in each row.
RECORDED = {
    "pairs of core folders that import each other": 0,
    "commands": 14,
    "KV events": 12,
    "wire messages that accompany a command": 0,
    "mentions of TransferPurpose outside core": 0,
    "implementations of commands outside core": 29,
    "product lines": 94_040,
    "lines of product, lab, testing and kubernetes": 117_090,
    "test lines": 76_130,
    "benchmark lines": 9_000,
    "files over 500 lines": 20,
    "file names that occur more than once": 47,
}

ROOT = Path(__file__).parents[2]
CORE = ROOT / "libs/pdmesh/core"
WIRE_MESSAGES = ROOT / "libs/pdmesh/wire/messages"

PRODUCT = ("libs", "services")
HOUSE = (*PRODUCT, "lab", "testing", "kubernetes")

#: Instance events about steps, requests and the instance itself. All others are about KV.
NOT_ABOUT_KV = """
DrainRequested StepDone DecodeStepsDone RequestDropped RequestFinished TokenLinkReported LoadReported
"""

MAX_FILE_LINES = 500

#: Names that say what a file is to Python.
NAMES_OF_PYTHON = {"__init__.py", "__main__.py", "main.py"}


@cache
def text(path: Path) -> str:
    return path.read_text()


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(text(path))


def python_files(folders: tuple[str, ...]) -> list[Path]:
    """Return the Python files below the folders that people wrote."""
    found = [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]
    return [path for path in found if "_pb2" not in path.name]


def num_lines(path: Path) -> int:
    return text(path).count("\n")


def outside_core() -> Iterator[Path]:
    return (path for path in python_files(HOUSE) if CORE not in path.parents)


# --- folders of the core, and the modules beside them ---


def folder_of(path: Path) -> str:
    return path.relative_to(CORE).parts[0].removesuffix(".py")


def imported_folders(path: Path) -> Iterator[str]:
    """Yield the folder of each import from the core, also inside functions and for types alone."""
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.ImportFrom) and node.module == "pdmesh.core":
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("pdmesh.core."):
            yield str(node.module).split(".")[2]
        elif isinstance(node, ast.Import):
            yield from (alias.name.split(".")[2] for alias in node.names if alias.name.startswith("pdmesh.core."))


def mutual_imports() -> list[str]:
    """Return the pairs of folders that import each other."""
    arrows = {(folder_of(path), folder) for path in CORE.rglob("*.py") for folder in imported_folders(path)}
    folders = sorted({folder for arrow in arrows for folder in arrow})
    return [f"{a}, {b}" for a, b in combinations(folders, 2) if {(a, b), (b, a)} <= arrows]


# --- what passes between services ---


def members_of_union(path: Path, name: str) -> list[str]:
    """Return the classes of a union that a module assigns to ``name``, also of unions in it."""
    assigned = {
        target.id: node.value
        for node in tree(path).body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    if name not in assigned:
        return [name]
    parts = [node.id for node in ast.walk(assigned[name]) if isinstance(node, ast.Name)]
    return [member for part in parts for member in members_of_union(path, part)]


def accompanied() -> list[str]:
    """Return the messages with a field for a command; all others travel in the one envelope, `CommandMessage`."""
    return [
        node.name
        for path in sorted(WIRE_MESSAGES.glob("*.py"))
        for node in tree(path).body
        if isinstance(node, ast.ClassDef)
        if any(isinstance(each, ast.AnnAssign) and getattr(each.target, "id", "") == "command" for each in node.body)
    ]


def kv_events() -> list[str]:
    return [name for name in members_of_union(CORE / "events.py", "InstanceEvent") if name not in NOT_ABOUT_KV.split()]


def implementations() -> list[str]:
    """Return the places outside the core with a ``case`` for a command of an instance."""
    names = set(members_of_union(CORE / "commands.py", "InstanceCommand"))
    return [
        f"{pattern.cls.id}: {path.relative_to(ROOT)}"
        for path in outside_core()
        if "case " in text(path)
        for pattern in ast.walk(tree(path))
        if isinstance(pattern, ast.MatchClass) and isinstance(pattern.cls, ast.Name) and pattern.cls.id in names
    ]


def mentions_of_purpose() -> list[str]:
    found = Counter[str]()
    for path in outside_core():
        found[str(path.relative_to(ROOT))] += len(re.findall(r"\bTransferPurpose\b", text(path)))
    return sorted(found.elements())


# --- how much there is ---


def long_files() -> list[str]:
    paths = python_files((*HOUSE, "tests", "benchmarks"))
    return [f"{path.relative_to(ROOT)}: {num_lines(path)}" for path in paths if num_lines(path) > MAX_FILE_LINES]


def repeated_names() -> list[str]:
    """Return the names that several files have."""
    names = Counter(path.name for path in python_files(HOUSE) if path.name not in NAMES_OF_PYTHON)
    return sorted(f"{name}: {number}" for name, number in names.items() if number > 1)


def places() -> dict[str, list[str]]:
    """Return what stands behind each number that is a count of places."""
    return {
        "pairs of core folders that import each other": mutual_imports(),
        "commands": members_of_union(CORE / "commands.py", "Command"),
        "KV events": kv_events(),
        "wire messages that accompany a command": accompanied(),
        "mentions of TransferPurpose outside core": mentions_of_purpose(),
        "implementations of commands outside core": implementations(),
        "files over 500 lines": long_files(),
        "file names that occur more than once": repeated_names(),
    }


def counted() -> dict[str, int]:
    """Return the numbers of today, by the rows of `RECORDED`."""
    found = {row: len(where) for row, where in places().items()}
    amounts = {
        "product lines": PRODUCT,
        "lines of product, lab, testing and kubernetes": HOUSE,
        "test lines": ("tests",),
        "benchmark lines": ("benchmarks",),
    }
    found |= {row: sum(map(num_lines, python_files(folders))) for row, folders in amounts.items()}
    return {row: found[row] for row in RECORDED}


def table() -> str:
    rows = (f"{row:<45} {number:>7,} of {RECORDED[row]:>7,}\n" for row, number in counted().items())
    return "".join(rows)


def test_no_number_of_the_house_rises() -> None:
    sys.stdout.write(table())
    behind = places()
    risen = {row: (number, behind.get(row)) for row, number in counted().items() if number > RECORDED[row]}
    assert not risen, f"more than recorded at the head of this file: {risen}"


if __name__ == "__main__":
    for row, where in places().items():
        sys.stdout.write("\n  ".join([f"{row}:", *where]) + "\n")
    sys.stdout.write(table())
