"""What mypyc compiles into a wheel: nothing that it would change, and no more is said of it than is so."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, get_args

import msgspec
import msgspec.inspect
import pytest
from msgspec import StructMeta

from pdmesh.build_info import core_build
from pdmesh.config import MeshConfig
from pdmesh.core.commands import Command
from pdmesh.core.events import Event
from pdmesh.eventlog import Header
from pdmesh.profiles import ProfileFile
from pdmesh.wire import messages
from pdmesh_lab.sim.workload import Arrival
from pdmesh_testing.scripts import load_script

ROOT = Path(__file__).parents[2]


def load(name: str) -> ModuleType:
    return load_script(ROOT / f"deploy/{name}.py")


@pytest.fixture(scope="module")
def sources() -> list[Path]:
    paths: list[Path] = load("compile_core").sources()
    return paths


def module_of(path: Path) -> str:
    return ".".join(path.relative_to("libs").with_suffix("").parts)


def classes_read(kind: Any) -> Iterator[type]:
    """The classes with fields that msgspec needs to know to read ``kind``."""
    known: set[type] = set()
    left: list[Any] = [msgspec.inspect.type_info(kind)]
    while left:
        found = left.pop()
        if hasattr(found, "fields") and found.cls not in known:
            known.add(found.cls)
            left += [each.type for each in found.fields]
        left += [*getattr(found, "types", ()), *getattr(found, "item_types", ())]
        left += [getattr(found, name) for name in ("item_type", "key_type", "value_type") if hasattr(found, name)]
    yield from known


def test_nothing_is_compiled_that_travels_is_logged_or_configured(sources: list[Path]) -> None:
    """mypyc keeps `tuple` of an annotation `tuple[ChunkDone, ...]`: msgspec would read anything."""
    of_the_wire = [kind for kind in vars(messages).values() if isinstance(kind, StructMeta)]
    roots = [*get_args(Event), *get_args(Command), *of_the_wire, MeshConfig, Header, ProfileFile, Arrival]
    modules = {kind.__module__ for root in roots for kind in classes_read(root)}
    assert {
        "pdmesh.core.events",
        "pdmesh.policy.config",
        "pdmesh.policy.latency",
        "pdmesh.model",
        "pdmesh.plans",
    } <= modules
    assert modules.isdisjoint(map(module_of, sources))


def test_no_struct_is_compiled(sources: list[Path]) -> None:
    """mypyc drops frozen and omit_defaults without a word; `test_core_commands` holds what each has."""
    for path in sources:
        bases = [base for node in ast.walk(tree(path)) if isinstance(node, ast.ClassDef) for base in node.bases]
        assert {"Struct", "msgspec.Struct"}.isdisjoint(map(ast.unparse, bases)), path


def test_no_sum_of_floats_meets_another_one(sources: list[Path]) -> None:
    """One from 0 is a float or an int: where two meet, mypyc 2.4 takes both for ints, and the core raises TypeError."""
    for path in sources:
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.BinOp):
                operands = [node.left, node.right]
            elif isinstance(node, ast.Compare):
                operands = [node.left, *node.comparators]
            else:
                continue
            sums = [each for each in operands if is_sum_from_0(each)]
            assert len(sums) < 2 or is_known_to_be_whole(path, node), (
                f"{path}:{node.lineno}: give sum() 0.0 to begin with"
            )


def tree(path: Path) -> ast.Module:
    return ast.parse((ROOT / path).read_text())


def is_sum_from_0(node: ast.expr) -> bool:
    return isinstance(node, ast.Call) and ast.unparse(node.func) == "sum" and len(node.args) == 1


def is_known_to_be_whole(path: Path, node: ast.AST) -> bool:
    return path.name == "on_demand.py" and "num_blocks" in ast.unparse(node)


def test_python_is_what_an_editable_install_runs() -> None:
    assert core_build() == "Python"
