"""The tables of docs/results/papers.md are those that `benchmarks/simulation/papers.py` prints."""

from __future__ import annotations

from pathlib import Path

import pytest

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
