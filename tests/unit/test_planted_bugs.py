"""The bugs that `benchmarks/simulation/planted_bugs.py` plants fit the code as it is now."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest

from pdmesh_testing.scripts import load_script

ROOT = Path(__file__).parents[2]

ADVICE = """
benchmarks/simulation/planted_bugs.toml, "{what}": {problem}
Write `file`, `old` and `new` anew, so that they take the same safeguard out of the code as it is now, and look whether
simulation still finds it: python -m benchmarks.simulation.planted_bugs --only "{what}". If that safeguard is gone for
good, plant another bug instead: there must be 30."""


def _load() -> ModuleType:
    return load_script(ROOT / "benchmarks/simulation/planted_bugs.py")


BUGS = _load().bugs()


@pytest.mark.parametrize("bug", BUGS, ids=[bug.what for bug in BUGS])
def test_a_bug_can_still_be_planted(bug: object) -> None:
    file, what, planted = (getattr(bug, name) for name in ("file", "what", "planted"))
    path = ROOT / file
    text = path.read_text() if path.exists() else ""
    try:
        with_bug = planted(text)
    except ValueError as error:
        pytest.fail(ADVICE.format(what=what, problem=error))
    assert with_bug != text
    compile(with_bug, file, "exec")


def test_there_are_thirty_bugs_and_those_of_the_attacks_are_among_them() -> None:
    names = [bug.what for bug in BUGS]
    assert len(set(names)) == len(names) >= 30
    for number in (1, 2, 4, 5, 11):
        assert any(f"(Harden {number})" in name for name in names)
