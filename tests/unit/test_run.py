"""What ``make test`` and ``make test-all`` run, and what they say at the end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any
from xml.sax.saxutils import quoteattr

import pytest

from pdmesh_testing.scripts import load_script

TESTS = Path(__file__).parents[1]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(TESTS))
    return load_script(TESTS / "run.py")


def parts(run: ModuleType, arguments: Sequence[str], *, everything: bool) -> list[Any]:
    return [part for stage in run.stages(arguments, everything=everything) for part in stage]


def test_each_folder_of_tests_is_run_and_each_linter_once(run: ModuleType) -> None:
    chosen = parts(run, ["-k", "pipelined prefill or pools"], everything=True)
    named = [argument for part in chosen for argument in part.pytest if argument.startswith("tests/")]
    assert set(named) == {f"tests/{file.relative_to(TESTS).parts[0]}" for file in TESTS.rglob("test_*.py")}
    assert all(part.pytest[part.pytest.index("-k") + 1] == "pipelined prefill or pools" for part in chosen)
    (alone,) = [part for part in chosen if "tests/gpu" in part.pytest]
    assert "-n" not in alone.pytest
    assert all("tests/unit" not in part.pytest for part in chosen if "tests/e2e" in part.pytest)
    linters = sorted(linter for part in chosen for linter in part.linters)
    assert linters == ["imports", "mypy", "pyright", "ruff", "site"]


def test_what_is_slow_is_left_to_test_all(run: ModuleType) -> None:
    fast, everything = (parts(run, [], everything=chosen) for chosen in (False, True))
    assert everything[: len(fast)] == fast
    assert all(part.pytest[part.pytest.index("-m") + 1] == "not slow" for part in fast)
    slow = {part.pytest[part.pytest.index("-m") + 1] for part in everything[len(fast) :] if "-m" in part.pytest}
    assert slow == {"slow or drawn"}


@pytest.mark.parametrize("named", ["tests/unit/test_run.py", "tests/e2e", "tests/unit/test_run.py::test_nothing"])
def test_who_names_files_has_them_run_alone(run: ModuleType, named: str) -> None:
    (part,) = parts(run, ["-x", named], everything=False)
    assert part.pytest == ["-x", named]
    assert not part.linters


def a_test(name: str, outcome: str = "", message: str = "", cpu_s: float = 0.1, warned: str = "") -> str:
    inner = f"<{outcome} message={quoteattr(message)}/>" if outcome else ""
    notes = {"cpu_s": str(cpu_s), **({"warned": warned} if warned else {})}
    properties = "".join(f"<property name={quoteattr(key)} value={quoteattr(text)}/>" for key, text in notes.items())
    note = f"<properties>{properties}</properties>"
    return f'<testcase classname="tests.unit.test_it" name="{name}">{note}{inner}</testcase>'


class Machine:
    """Stands for pytest and for make: the reports and exit codes of the parts, in their order."""

    def __init__(self, *parts: tuple[int, Sequence[str]], broken_linter: str = "") -> None:
        self.parts = list(parts)
        self.broken_linter = broken_linter

    def exit_codes_of(self, commands: Sequence[Sequence[str]], folder: Path, limit_s: float | None = None) -> list[int]:
        codes = []
        for command in commands:
            code, cases = self.parts.pop(0)
            codes.append(code)
            if cases:
                Path(command[-1].partition("=")[2]).write_text(f"<testsuites>{''.join(cases)}</testsuites>")
        return codes

    def lint(self, name: str) -> subprocess.CompletedProcess[str]:
        is_broken = name == self.broken_linter
        return subprocess.CompletedProcess([], int(is_broken), stdout=f"{name} complains\n" if is_broken else "")


PASSES = (0, [a_test("one")])


@pytest.mark.parametrize(
    ("machine", "code", "last", "said"),
    [
        (Machine(PASSES, PASSES), 0, "4 passed, 0 failed, 0 skipped", ""),
        (
            Machine(
                PASSES,
                (1, [a_test("a"), a_test("b", "failure", "assert 3 == 4\n where 3 = f()", warned="a: lost\nb: gone")]),
            ),
            1,
            "4 passed, 1 failed, 0 skipped",
            "tests.unit.test_it::b failed: assert 3 == 4 where 3 = f()\n  a: lost\n  b: gone\n",
        ),
        (Machine((1, [a_test("a", "error")]), PASSES), 1, "3 passed, 1 failed, 0 skipped", ""),
        (
            Machine(
                PASSES, (0, [a_test("a", "skipped", "this processor lacks AMX"), a_test("b", "skipped", "no disk")])
            ),
            0,
            "3 passed, 0 failed, 2 skipped",
            "1 skipped: this processor lacks AMX\n",
        ),
        (Machine(PASSES, (5, [])), 0, "3 passed, 0 failed, 0 skipped", ""),  # what was asked for is in one of them
        (Machine((5, []), (5, [])), 1, "2 passed, 1 failed, 0 skipped", "none was found"),
        (Machine((4, []), (4, [])), 1, "2 passed, 2 failed, 0 skipped", "tests: pytest, with exit code 4, failed"),
        (Machine((-9, []), PASSES), 1, "3 passed, 1 failed, 0 skipped", "tests: pytest, with exit code -9, failed"),
        (Machine(PASSES, PASSES, broken_linter="ruff"), 1, "3 passed, 1 failed, 0 skipped", "ruff complains\n"),
        (
            Machine((0, [a_test("a", cpu_s=0.9), a_test("b", cpu_s=8.1)]), (0, [a_test("c", cpu_s=90.0)])),
            0,
            "5 passed, 0 failed, 0 skipped",
            "90.0 s of CPU time: tests.unit.test_it::c\n8.1 s of CPU time: tests.unit.test_it::b\n",
        ),
    ],
    ids=["all", "failure", "error", "skipped", "some", "nothing", "usage", "killed", "lint", "slowest"],
)
def test_one_line_counts_all_parts(
    run: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    machine: Machine,
    code: int,
    last: str,
    said: str,
) -> None:
    monkeypatch.setattr(run, "exit_codes_of", machine.exit_codes_of)
    monkeypatch.setattr(run, "lint", machine.lint)
    assert run.main([]) == code
    printed = capsys.readouterr().out
    assert printed.splitlines()[-1] == last
    assert said in printed


def test_what_runs_beside_others_is_printed_after_the_first(
    run: ModuleType, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    programs = ("print('second')", "import sys; print('third'); sys.exit(3)")
    commands = [[sys.executable, "-c", program] for program in ("input(); print('first')", *programs)]
    assert run.exit_codes_of(commands, tmp_path) == [1, 0, 3]


def test_a_part_that_hangs_is_ended(run: ModuleType, tmp_path: Path) -> None:
    command = [sys.executable, "-c", "import time; time.sleep(60)"]
    assert run.exit_codes_of([command], tmp_path, limit_s=0.1) == [-signal.SIGKILL]


def test_ci_runs_the_slow_tests_of_chosen_files_only(run: ModuleType) -> None:
    files = ["tests/e2e/test_exact.py", "tests/gpu/test_device.py", "tests/unit/test_run.py"]
    fast, others_alone, meshes_alone, device = run.stages([], everything=True, slow_files=files)
    whole = list(run.stages([], everything=True))
    assert [list(fast), list(device)] == [list(whole[0]), list(whole[-1])]
    (others,), (meshes,) = others_alone, meshes_alone
    assert [argument for argument in others.pytest if argument.startswith("tests/")] == ["tests/unit/test_run.py"]
    assert [argument for argument in meshes.pytest if argument.startswith("tests/")] == ["tests/e2e/test_exact.py"]


@pytest.fixture
def rotation(run: ModuleType) -> Any:
    return run.rotation


def test_each_recorded_file_runs_once_in_seven_days(rotation: Any) -> None:
    seconds = {f"tests/unit/test_{number}.py": float(number % 13) for number in range(40)}
    days = [rotation.choose(seconds, seconds, [], day) for day in range(100, 107)]
    assert sorted(name for day in days for name in day) == sorted(seconds)
    totals_s = [sum(seconds[name] for name in day) for day in days]
    assert max(totals_s) - min(totals_s) <= 13


def test_new_and_touched_files_run_in_addition_to_the_share(rotation: Any) -> None:
    limit_s = rotation.TOUCHED_CPU_S
    seconds = {"a.py": 1.0, "large.py": limit_s + 1, "small.py": 10.0, **{f"{n}.py": 2 * limit_s for n in range(7)}}
    files, touched = [*seconds, "new.py"], ["large.py", "small.py", "no.py"]
    with_none, chosen = (rotation.choose(files, seconds, names, 3) for names in ([], touched))
    assert "new.py" in with_none
    assert set(chosen) == {*with_none, "small.py"}


def test_a_test_is_touched_by_the_modules_that_it_uses(rotation: Any, tmp_path: Path) -> None:
    for name, text in {
        "libs/pdmesh/ranges.py": "",
        "libs/pdmesh/kv/__init__.py": "",
        "testing/pdmesh_testing/mesh.py": "from pdmesh.kv import Pool",
        "services/gateway/pdmesh_gateway/http.py": "",
        "tests/unit/test_direct.py": "import pdmesh.ranges",
        "tests/unit/test_through.py": "from pdmesh_testing.mesh import Mesh",
        "tests/unit/test_other.py": "from pdmesh_gateway.http import serve",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    tests = [f"tests/unit/test_{name}.py" for name in ("direct", "through", "other")]

    def touched(*changed: str) -> list[str]:
        return [Path(name).stem for name in rotation.touched_tests(tmp_path, tests, changed)]

    assert touched("libs/pdmesh/ranges.py") == ["test_direct"]
    assert touched("libs/pdmesh/kv/__init__.py") == ["test_through"]
    assert touched("services/gateway/pdmesh_gateway/http.py", tests[1]) == ["test_through", "test_other"]


def test_the_change_is_the_newest_commits(rotation: Any, tmp_path: Path) -> None:
    def git(*arguments: str, date_s: int = 0) -> None:
        who = ["-c", "user.name=t", "-c", "user.email=t@localhost"]
        environment = {**os.environ, "GIT_COMMITTER_DATE": f"{date_s} +0000"}
        subprocess.run(["git", *who, *arguments], cwd=tmp_path, check=True, capture_output=True, env=environment)

    git("init")
    for number, hours in enumerate([0, 10, 11]):
        (tmp_path / f"{number}.py").write_text("")
        git("add", ".")
        git("commit", "-m", "a change", date_s=1_700_000_000 + hours * 3600)
    assert rotation.changed_files(tmp_path) == ["1.py", "2.py"]


def test_a_record_holds_expensive_functions_and_the_slow_tests_of_files(rotation: Any, tmp_path: Path) -> None:
    notes, file = tmp_path / "notes", tmp_path / "record.json"
    notes.mkdir()
    (notes / "1").write_text("tests/a.py 1.5\ntests/b.py 2\n")
    (notes / "2").write_text("tests/a.py 0.25\n")
    assert rotation.read_record(file) == rotation.Record({}, {})
    rotation.write_record(file, {"t.a::f[1]": 3.0, "t.a::f[2]": 1.0, "t.a::cheap": 0.1}, notes)
    assert rotation.read_record(file) == rotation.Record({"t.a::f": 2.0}, {"tests/a.py": 1.8, "tests/b.py": 2.0})


def test_each_parameter_of_an_expensive_function_has_its_day(rotation: Any) -> None:
    calls, cheap = [f"f[{number}]" for number in range(7)], [f"g[{number}]" for number in range(7)]
    record = rotation.Record({"f": rotation.FUNCTION_CPU_S / 2.5}, {})
    days = [{*calls, *cheap} - rotation.left_out([*calls, *cheap], record, day) for day in range(7)]
    assert all(set(cheap) <= day and len(day - set(cheap)) == 2 for day in days)
    assert set(calls) <= set().union(*days)


def test_one_parameter_runs_unless_it_alone_takes_too_long(rotation: Any) -> None:
    record = rotation.Record({"f": rotation.TEST_CPU_S, "g": rotation.TEST_CPU_S + 0.1}, {})
    assert rotation.left_out(["f[0]", "f[1]", "g"], record, 0) == {"f[1]", "g"}
