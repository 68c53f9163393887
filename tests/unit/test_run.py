"""What ``make test`` runs: each test once."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

TESTS = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def run() -> ModuleType:
    spec = importlib.util.spec_from_file_location("run_tests", TESTS / "run.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_each_folder_of_tests_is_in_one_stage(run: ModuleType) -> None:
    commands = run.stages(["-k", "relay or pools"]).values()
    named = sorted(argument for command in commands for argument in command if argument.startswith("tests/"))
    assert named == sorted({f"tests/{file.relative_to(TESTS).parts[0]}" for file in TESTS.rglob("test_*.py")})
    for command in commands:
        assert command[command.index("-k") + 1] == "relay or pools"
    (alone,) = [command for command in commands if "tests/gpu" in command]
    assert "-n" not in alone
    (meshes,) = [command for command in commands if "tests/e2e" in command]
    assert "tests/unit" not in meshes  # they have the machine to themselves


@pytest.mark.parametrize("named", ["tests/unit/test_run.py", "tests/e2e", "tests/unit/test_run.py::test_nothing"])
def test_who_names_files_has_them_run_alone(run: ModuleType, named: str) -> None:
    (command,) = run.stages(["-x", named]).values()
    assert command[-2:] == ["-x", named]
    assert "-n" not in command


@pytest.mark.parametrize(
    ("lint", "tests", "expected", "stages"),
    [
        (0, (0, 0, 0), 0, 4),
        (2, (0, 0, 0), 2, 1),  # lint has failed
        (0, (1, 0, 0), 1, 4),
        (0, (0, 1, 0), 1, 4),
        (0, (0, 0, 1), 1, 4),
        (0, (5, 5, 0), 0, 4),  # what was asked for is in one of them
        (0, (5, 1, 5), 1, 4),
        (0, (5, 5, 5), 5, 4),  # or in none
        (0, (4, 0, 0), 4, 2),  # wrong usage
        (0, (-9, 0, 0), 1, 2),  # killed
    ],
)
def test_a_failure_of_any_stage_is_one_of_all(
    run: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    lint: int,
    tests: tuple[int, int, int],
    expected: int,
    stages: int,
) -> None:
    codes = iter((lint, *tests))
    monkeypatch.setattr(run, "exit_code_of", lambda _command: next(codes))
    assert run.main([]) == expected
    assert capsys.readouterr().out.count(": 0 s") == stages
