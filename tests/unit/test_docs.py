"""Pages can be followed: links lead somewhere, README fits an editor, and the changelog fits the version."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import pytest
import typer
from typer.core import TyperGroup

from pdmesh.cli.app import app
from pdmesh_testing.scripts import load_script

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    path
    for path in ROOT.rglob("*.md")
    if not any(part in (".venv", "dist", "build") or part.startswith(".") for part in path.relative_to(ROOT).parts[:-1])
)
WORKFLOWS = ROOT / ".github/workflows"


def anchors_of(page: Path) -> set[str]:
    """The anchors that a forge makes of a page's titles."""
    titles = re.findall(r"^#+ (.*)$", page.read_text(), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", re.sub(r"\]\(.*?\)", "", title).lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_inside_the_repository_lead_somewhere(page: Path) -> None:
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    targets = [target for target in re.findall(r"\]\(([^()\s]+)\)", text) if not re.match(r"\w+:", target)]
    for target in targets:
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), target
        if anchor:
            assert anchor in anchors_of(file), target


def test_readme_fits_an_editor() -> None:
    assert max(map(len, (ROOT / "README.md").read_text().splitlines())) <= 120


def test_a_path_through_the_docs_has_five_pages_at_most_and_every_page_is_reached() -> None:
    index = ROOT / "docs/README.md"
    rows = [
        line.split("|")[1:-1] for line in index.read_text().split("\n## ")[0].splitlines() if line.startswith("| [")
    ]
    assert len(rows) <= 5
    assert {len(row) for row in rows} == {4}
    reached, left = set[Path](), [index]
    while left:
        page = left.pop()
        if page in reached or page.suffix != ".md":
            continue
        reached.add(page)
        targets = re.findall(r"\]\(([^()\s:#]+)", page.read_text())
        left += [(page.parent / target).resolve() for target in targets]
    assert set((ROOT / "docs").rglob("*.md")) <= reached


@pytest.fixture(scope="module")
def release_notes() -> ModuleType:
    return load_script(ROOT / "deploy/release_notes.py")


def test_a_tag_has_notes_only_if_version_and_changelog_agree(release_notes: ModuleType) -> None:
    changelog = (
        "# Changelog\n\n## [Unreleased]\n\n- c\n\n## [0.2.0] - 2027-01-02\n\n- b\n\n## [0.1.0] - 2026-11-29\n\n- a\n"
    )
    assert release_notes.notes("v0.2.0", "0.2.0", changelog) == "- b\n"
    assert release_notes.notes("v0.1.0", "0.1.0", changelog) == "- a\n"
    with pytest.raises(release_notes.NotReady, match=r"the tag is v0\.2\.0"):
        release_notes.notes("v0.2.0", "0.1.0", changelog)
    with pytest.raises(release_notes.NotReady, match=r"no section"):
        release_notes.notes("v0.3.0", "0.3.0", changelog)


def project() -> dict[str, Any]:
    table: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return table


def test_this_version_can_be_released(release_notes: ModuleType) -> None:
    version = project()["version"]
    assert release_notes.notes(f"v{version}", version, (ROOT / "CHANGELOG.md").read_text())


def test_wheels_are_built_and_tried_for_every_python_that_is_supported() -> None:
    jobs = msgspec.yaml.decode((WORKFLOWS / "wheels.yml").read_text())["jobs"]
    supported = re.findall(r"Python :: (3\.\d+)", " ".join(project()["classifiers"]))
    for job in ("build", "try"):
        matrix = jobs[job]["strategy"]["matrix"]
        assert matrix["python"] == supported
        assert len(matrix["runner"]) == 2


def test_nothing_is_published_before_checks_and_wheels() -> None:
    jobs = msgspec.yaml.decode((WORKFLOWS / "release.yml").read_text())["jobs"]
    for job in ("publish", "image"):
        assert set(jobs[job]["needs"]) == {"checks", "wheels"}


def test_commands_that_pages_and_messages_name_exist() -> None:
    group = typer.main.get_command(app)
    assert isinstance(group, TyperGroup)
    context = typer.Context(group)
    texts = [*(ROOT / "docs").rglob("*.md"), ROOT / "README.md"]
    texts += [path for folder in ("kubernetes", "lab", "libs", "services") for path in (ROOT / folder).rglob("*.py")]
    named = {
        found for path in texts for found in re.findall(r"`pdmesh ([a-z][a-z-]*)(?: ([a-z][a-z-]*))?", path.read_text())
    }
    assert ("pool", "resize") in named
    for name, inner in named:
        command = group.get_command(context, name)
        assert command is not None, name
        if inner and isinstance(command, TyperGroup):
            assert command.get_command(context, inner) is not None, f"{name} {inner}"
