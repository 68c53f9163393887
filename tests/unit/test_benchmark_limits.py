"""A benchmark that misses a limit says so beside the figure, and exits with 1."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture(scope="module")
def report() -> ModuleType:
    spec = importlib.util.spec_from_file_location("report", Path(__file__).parents[2] / "benchmarks/report.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_limits_that_are_kept(report: ModuleType) -> None:
    limits = report.Limits()
    assert limits.at_most("latency", 5.0, 10.0) == "0.50 x the limit"
    assert limits.at_least("tokens/s", 20.0, 10.0) == "2.00 x the target"
    with pytest.raises(SystemExit) as end:
        limits.end()
    assert end.value.code == 0


def test_limits_that_are_missed(report: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    limits = report.Limits()
    assert limits.at_most("latency", 11.0, 10.0) == "1.10 x the limit: MISSED"
    assert limits.at_least("tokens/s", 9.0, 10.0) == "0.90 x the target: MISSED"
    with pytest.raises(SystemExit) as end:
        limits.end()
    assert end.value.code == 1
    assert capsys.readouterr().out == f"{report.MISSED} latency, tokens/s\n"
