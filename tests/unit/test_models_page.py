"""What docs/models.md says is served, is."""

from __future__ import annotations

import re
from pathlib import Path

from pdmesh.engine.architectures import WITH_TEXT_PARTS, architectures, undescribed_architectures
from pdmesh.engine.gguf.gguf_architectures import ARCHITECTURES
from pdmesh.engine.gguf.gguf_reader import TYPES
from pdmesh_testing.gguf_files import MODELS

PAGE = (Path(__file__).parents[2] / "docs/models.md").read_text()
OTHERS = {"llama", "qwen2", "qwen3"}  # GGUF architectures whose test is of its own


def rows_of(heading: str) -> list[list[str]]:
    """Cells of the first table below a heading."""
    section = PAGE.split(f"\n{heading}\n")[1].split("\n## ")[0]
    lines = section[section.index("\n|---") :].splitlines()[2:]
    table = lines[: next((number for number, line in enumerate(lines) if not line.startswith("|")), len(lines))]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in table]


def test_classes_of_the_tables_are_those_that_are_served() -> None:
    named = {name for row in rows_of("## Architectures") for name in re.findall(r"`(\w+)`", row[0])}
    assert named == {*architectures(), *WITH_TEXT_PARTS}
    fallback = rows_of("### Architectures of the fallback")
    assert {name for row in fallback for name in re.findall(r"`(\w+)`", row[0])} == set(undescribed_architectures())


def test_of_25_models_that_people_download_those_load_that_the_page_says() -> None:
    served = {*architectures(), *undescribed_architectures(), *WITH_TEXT_PARTS}
    loads = {"yes": 0, "no": 0}
    for names, class_name, answer, *_ in rows_of("## What people download"):
        loads[answer] += len(names.split(", "))
        assert (class_name.strip("`") in served) is (answer == "yes")
    assert sum(loads.values()) == 25
    assert f"{loads['yes']} of 25 load" in PAGE
    assert loads["yes"] >= 20


def test_gguf_architectures_of_the_table_are_those_that_are_served_and_tested() -> None:
    rows = rows_of("## GGUF")
    assert {name for row in rows for name in re.findall(r"`([\w-]+)`", row[0])} == set(ARCHITECTURES)
    classes = {name for row in rows for name in re.findall(r"`(\w+)`", row[1])}
    assert classes <= set(architectures())
    tested = {architectures()[name].model_type for name in classes}
    assert tested == {*MODELS, *OTHERS}


def test_gguf_types_of_the_page_are_those_that_are_served() -> None:
    [line] = [line for line in PAGE.splitlines() if line.startswith("* *Types*: ")]
    assert {stored.name for stored in TYPES.values()} <= set(re.findall(r"\w+", line))
