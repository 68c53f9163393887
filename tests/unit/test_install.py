"""`make` installs what the constraints list, without resolving, and repairs what an interrupted run left."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def install() -> ModuleType:
    spec = importlib.util.spec_from_file_location("install_pdmesh", ROOT / "deploy/install.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def normalized(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def asked_for(dependencies: Iterable[str]) -> set[str]:
    """What these need here, and what that needs, and so on."""
    found: set[tuple[str, frozenset[str]]] = set()
    left = [Requirement(dependency) for dependency in dependencies]
    while left:
        wanted = left.pop()
        key = normalized(wanted.name), frozenset(wanted.extras)
        if key in found:
            continue
        found.add(key)
        for requirement in map(Requirement, importlib.metadata.requires(wanted.name) or ()):
            marker = requirement.marker
            if marker is None or any(marker.evaluate({"extra": extra}) for extra in wanted.extras | {""}):
                left.append(requirement)
    return {name for name, _ in found}


def test_sections_of_the_constraints_are_what_packages_ask_for(install: ModuleType) -> None:
    """Or `make up` would take another tree each day, or resolve what is missing, one package at a time."""
    sections: dict[str, list[str]] = install.sections((ROOT / "constraints.txt").read_text())
    pins = {title: {normalized(pin.partition("==")[0]) for pin in section} for title, section in sections.items()}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    to_run = asked_for(project["dependencies"])
    assert pins["to install"] == asked_for(["hatchling", "editables"]) | {"pip"}
    assert pins["to run"] <= to_run
    # A build of torch for CUDA, and another Python, ask for more: that is resolved.
    if "+cpu" in importlib.metadata.version("torch") and sys.version_info < (3, 12):
        assert to_run <= pins["to run"] | pins["to install"]
    assert asked_for(extras["test"] + extras["lint"] + extras["plot"]) <= set().union(*pins.values())


def test_no_package_is_pinned_twice(install: ModuleType) -> None:
    sections: dict[str, list[str]] = install.sections((ROOT / "constraints.txt").read_text())
    names = [normalized(pin.partition("==")[0]) for section in sections.values() for pin in section]
    assert sorted(set(names)) == sorted(names)


def test_packages_whose_installation_was_interrupted_are_forgotten(install: ModuleType, tmp_path: Path) -> None:
    packages = tmp_path / "lib/python3.11/site-packages"
    for name, file in {"whole-1.0": "INSTALLER", "half-1.0": "METADATA"}.items():
        (packages / f"{name}.dist-info").mkdir(parents=True)
        (packages / f"{name}.dist-info" / file).touch()
    (packages / "~orch").mkdir()
    install.forget_unfinished(tmp_path)
    assert [path.name for path in packages.iterdir()] == ["whole-1.0.dist-info"]


def test_an_environment_without_pip_is_made_again(install: ModuleType, tmp_path: Path) -> None:
    assert not install.is_usable(tmp_path)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/python").symlink_to("/nowhere/python3")
    assert not install.is_usable(tmp_path)
    assert install.is_usable(Path(sys.prefix))


def test_bytecode_is_written_whatever_the_environment_says(
    install: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "imported.py").touch()
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.delenv("PYTHONPYCACHEPREFIX", raising=False)
    install.run_together([install.Part("bytecode", install.writing_bytecode(Path(sys.executable), ["imported"]))])
    assert [file.name.partition(".")[0] for file in tmp_path.glob("__pycache__/*.pyc")] == ["imported"]


def test_a_part_that_fails_ends_the_others_and_says_why(
    install: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    def part(name: str, program: str) -> object:
        return install.Part(name, [sys.executable, "-c", program])

    parts = [part("endless", "import signal; signal.pause()"), part("full", "raise SystemExit('no space left')")]
    with pytest.raises(install.InstallationFailed, match=r"full failed:\nno space left"):
        install.run_together(parts)
    install.run_together([part("good", "print('not shown')")])
    assert re.fullmatch(r" +\d+\.\d s  good\n", capsys.readouterr().out)


@pytest.mark.parametrize(
    ("system", "libc", "sentence"),
    [("Darwin", ("", ""), "needs Linux"), ("Linux", ("", ""), "musl"), ("Linux", ("glibc", "2.27"), "this is 2.27")],
)
def test_a_platform_without_wheels_is_refused_in_a_sentence(
    install: ModuleType, monkeypatch: pytest.MonkeyPatch, system: str, libc: tuple[str, str], sentence: str
) -> None:
    monkeypatch.setattr(install.platform, "system", lambda: system)
    monkeypatch.setattr(install.platform, "libc_ver", lambda: libc)
    with pytest.raises(install.InstallationFailed, match=sentence):
        install.check_platform()


@pytest.mark.parametrize("libc", [("glibc", "2.28"), ("glibc", "2.36"), ("glibc", "2.100")])
def test_a_platform_with_wheels_is_taken(
    install: ModuleType, monkeypatch: pytest.MonkeyPatch, libc: tuple[str, str]
) -> None:
    monkeypatch.setattr(install.platform, "libc_ver", lambda: libc)
    install.check_platform()


@pytest.mark.parametrize("name", ["Dockerfile", "Dockerfile.gpu"])
def test_images_have_the_bytecode_that_an_installation_has(install: ModuleType, name: str) -> None:
    text = (ROOT / "deploy/compose" / name).read_text().replace("\\\n", "")
    (imported,) = re.findall(r'python -c "import (pdmesh_prefill[^"]*)"', re.sub(r"\s+", " ", text))
    assert set(imported.split(", ")) == {module for program in install.PROGRAMS for module in program}


def test_what_has_bytecode_includes_torch(install: ModuleType) -> None:
    """An engine imports torch late, so a program that is imported without its engine would leave torch out."""
    code = f"import {', '.join(install.PROGRAMS[0])}, sys; sys.exit('torch' not in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
