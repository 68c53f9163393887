"""A benchmark that misses a limit says so beside the figure, and exits with 1."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest

from pdmesh_testing.scripts import load_script

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"

#: They state no limit: what is to be compared is beside each other in what they print.
FIGURES_ONLY = {"decision_cost", "engine_gpu", "group_rates", "kv_transport"}


def test_every_benchmark_with_a_limit_exits_by_it() -> None:
    sources = {path.stem: path.read_text() for path in BENCHMARKS.glob("*/*.py")}
    programs = {name: text for name, text in sources.items() if '__name__ == "__main__"' in text}
    judged = {
        name for name, text in programs.items() if "limits.end()" in text or "sys.exit(" in text.split("def ")[-1]
    }
    assert len(programs) > 20
    assert programs.keys() - judged <= FIGURES_ONLY
    assert not {name for name in FIGURES_ONLY if "Limits()" in sources[name]}


def test_the_page_lists_every_benchmark() -> None:
    page = (BENCHMARKS / "README.md").read_text()
    programs = {path for path in BENCHMARKS.glob("*/*.py") if '__name__ == "__main__"' in path.read_text()}
    assert not [path for path in programs if f"`{path.stem}`" not in page or f"`{path.parent.name}`" not in page]


@pytest.fixture(scope="module")
def report() -> ModuleType:
    return load_script(BENCHMARKS / "harness/report.py")


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
