"""The papers' results beside ours: the tables of docs/results/papers.md, each from simulations of the scheduling core.

    python -m benchmarks.simulation.papers [--only KEY ...] [--check | --write]

Prints the tables of the sections, or of those named with ``--only``. ``--write`` puts them into the page. ``--check``
simulates the fast sections again, and exits with 1 if a printed figure has moved. Times are virtual, so figures do not
depend on the machine.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from pdmesh.garbage import rare_collections
from pdmesh_lab.papers.sections import SECTIONS, Section

PAGE = Path(__file__).parents[2] / "docs/results/papers.md"


def table(section: Section) -> str:
    rows = [section.heads, ["---"] * len(section.heads), *section.rows()]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def on_page(key: str) -> re.Pattern[str]:
    """Return the pattern of a section's marker and table, with the empty line after them."""
    return re.compile(rf"(<!-- {key} -->\n\n)((?:\|.*\n)*)\n?")


def check(keys: Sequence[str]) -> list[str]:
    """Return the rows of these sections that the page does not have."""
    text = PAGE.read_text()
    moved: list[str] = []
    for key in keys:
        printed = on_page(key).search(text)
        known = printed.group(2).splitlines() if printed else []
        moved += [f"{key}: {line}" for line in table(SECTIONS[key]).splitlines() if line not in known]
    return moved


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=SECTIONS, action="append")
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--check", action="store_true")
    mode.add_argument("--write", action="store_true")
    options = parser.parse_args()
    with rare_collections():
        if options.check:
            moved = check(options.only or [key for key, section in SECTIONS.items() if section.is_fast])
            print("\n".join(moved) or "no figure has moved")
            sys.exit(1 if moved else 0)
        for key in options.only or SECTIONS:
            found = table(SECTIONS[key])
            print(f"<!-- {key} -->\n\n{found}", flush=True)
            if options.write:
                text = PAGE.read_text()
                printed = on_page(key).search(text)
                assert printed is not None, f"{PAGE} has no marker {key}"
                PAGE.write_text(f"{text[: printed.end(1)]}{found}\n{text[printed.end() :]}")


if __name__ == "__main__":
    main()
