"""The tables of docs/results/papers.md are those that `benchmarks/simulation/papers.py` prints."""

from __future__ import annotations

from pathlib import Path

import pytest

from pdmesh_lab.papers.topology_rows import CELLS, STARTS, judged
from pdmesh_testing.scripts import load_script

PAPERS = load_script(Path(__file__).parents[2] / "benchmarks/simulation/papers.py")
FAST = [key for key, section in PAPERS.SECTIONS.items() if section.is_fast]


def test_the_page_has_the_table_of_each_section() -> None:
    text = PAPERS.PAGE.read_text()
    for key, section in PAPERS.SECTIONS.items():
        found = PAPERS.on_page(key).search(text)
        assert found is not None, key
        assert found.group(2).startswith(f"| {' | '.join(section.heads)} |\n"), key


@pytest.mark.slow
@pytest.mark.parametrize("key", FAST)
def test_no_printed_figure_has_moved(key: str) -> None:
    assert PAPERS.check([key]) == []


@pytest.mark.slow
@pytest.mark.parametrize(("number", "wins"), [(7, "split"), (37, "mixed")])
def test_the_advised_topology_is_as_good_as_the_better_pure_one(number: int, wins: str) -> None:
    found = judged(CELLS[number], STARTS[number % 2])
    assert (found.split > found.mixed) == (wins == "split")
    assert found.over_better >= 0.98
