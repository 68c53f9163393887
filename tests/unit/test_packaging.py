"""The wheel holds all that the source tree has, and works without it."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = {
    "pdmesh": ROOT / "libs",
    "pdmesh_gateway": ROOT / "services/gateway",
    "pdmesh_scheduler": ROOT / "services/scheduler",
    "pdmesh_prefill": ROOT / "services/prefill",
    "pdmesh_decode": ROOT / "services/decode",
}


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel's content, built with what is installed here."""
    folder = tmp_path_factory.mktemp("wheel")
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)],
        cwd=ROOT,
        check=True,
        timeout=100,
    )
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder / "unpacked")
    return folder / "unpacked"


def test_every_source_file_is_in_the_wheel_and_no_other_package(unpacked: Path) -> None:
    for package, source in PACKAGES.items():
        wanted = {file.relative_to(source) for file in (source / package).rglob("*.py")}
        assert wanted <= {file.relative_to(unpacked) for file in (unpacked / package).rglob("*.py")}
        assert (unpacked / package / "py.typed").exists()
    assert {path.name for path in unpacked.iterdir() if path.suffix != ".dist-info"} == set(PACKAGES)


def test_the_wheel_works_without_the_source(unpacked: Path) -> None:
    modules = [*PACKAGES, *(f"{package}.main" for package in PACKAGES if package != "pdmesh"), "pdmesh.cli.app"]
    program = (
        "import importlib, pathlib, sys\n"
        f"for name in {modules!r}:\n"
        "    file = pathlib.Path(importlib.import_module(name).__file__)\n"
        f"    assert file.is_relative_to({str(unpacked)!r}), file\n"
    )
    # PYTHONPATH comes before what the editable install adds.
    environ = {**os.environ, "PYTHONPATH": str(unpacked)}
    subprocess.run([sys.executable, "-c", program], env=environ, cwd=unpacked, check=True, timeout=100)
