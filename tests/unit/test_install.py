"""`make` installs what the constraints list, without resolving, and repairs what an interrupted run left."""

from __future__ import annotations

import importlib.metadata
import os
import re
import select
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from types import ModuleType

import pytest
from packaging.requirements import Requirement

from pdmesh_testing.scripts import load_script

ROOT = Path(__file__).parents[2]


def script(name: str) -> ModuleType:
    return load_script(ROOT / f"deploy/{name}.py")


@pytest.fixture(scope="module")
def install() -> ModuleType:
    return script("install")


@pytest.fixture(scope="module")
def install_torch() -> ModuleType:
    return script("install_torch")


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
    to_run = asked_for(install.requirements("run"))
    assert pins["to install"] == asked_for(["hatchling", "editables"]) | {"pip"}
    assert pins["to run"] <= to_run
    # A build of torch for CUDA, and another Python, ask for more: that is resolved.
    if "+cpu" in importlib.metadata.version("torch") and sys.version_info < (3, 12):
        assert to_run <= pins["to run"] | pins["to install"]
    wanted = [*extras["test"], *extras["lint"]]
    for folder in install.FOLDERS:
        project = tomllib.loads((ROOT / folder / "pyproject.toml").read_text())["project"]
        wanted += project["dependencies"]
    wanted = [each for each in wanted if not each.startswith("pdmesh")]
    assert asked_for(wanted) <= set().union(*pins.values())


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
    part = install.Part("bytecode", install.writing_bytecode(Path(sys.executable), ["imported"]))
    install.run_together([part], 0.0)
    assert [file.name.partition(".")[0] for file in tmp_path.glob("__pycache__/*.pyc")] == ["imported"]


def test_a_part_that_fails_ends_the_others_and_says_why(
    install: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    def part(name: str, program: str) -> object:
        return install.Part(name, [sys.executable, "-c", program])

    parts = [part("endless", "import signal; signal.pause()"), part("full", "raise SystemExit('no space left')")]
    with pytest.raises(install.InstallationFailed, match=r"full failed:\nno space left"):
        install.run_together(parts, 0.0)
    install.run_together([part("good", "print('not shown')")], time.monotonic() - 1000.0)
    assert re.fullmatch(r"1\d{3}\.\d s  good\n", capsys.readouterr().out), "one clock for all parts"


def test_children_of_a_part_end_with_it(install: ModuleType, tmp_path: Path) -> None:
    """pip's compilers, too: they would go on for minutes."""
    pid_file, ready = tmp_path / "pid", tmp_path / "ready"
    child = f"open({str(pid_file)!r}, 'w').write(str(__import__('os').getpid())); open({str(ready)!r}, 'w').write('1')"
    child += "; import signal; signal.pause()"
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    os.mkfifo(ready)
    failing = f"open({str(ready)!r}).read(); raise SystemExit(1)"
    parts = [install.Part(name, [sys.executable, "-c", code]) for name, code in {"a": parent, "b": failing}.items()]
    with pytest.raises(install.InstallationFailed, match="b failed"):
        install.run_together(parts, 0.0)
    with suppress(ProcessLookupError):
        ended = os.pidfd_open(int(pid_file.read_text()))
        assert select.select([ended], [], [], 60)[0], "it was told to end, and takes a moment"
        os.close(ended)


def test_progress_says_what_is_fetched_and_how_much_is_left(install: ModuleType) -> None:
    torch, share, kernels = install.Part("torch", [], 1), install.Part("share", [], 2), install.Part("kernels", [])
    progress = install.Progress(3)
    assert progress.line([torch, share, kernels]) == "packages 0/3; kernels"
    assert progress.read(torch, "torch: installing the CPU build") == "torch: installing the CPU build"
    assert not progress.read(torch, "  Downloading torch-2.13.0.metadata (29 kB)")
    wheel = "  Downloading torch-2.13.0%2Bcpu-cp311-cp311-manylinux_2_28_x86_64.whl (191.5 MB)"
    assert progress.read(torch, wheel) == "downloading torch-2.13.0+cpu (191.5 MB)"
    assert not progress.read(torch, "Progress 88000000 of 191500000")
    assert not progress.read(share, "  Using cached rich-15.0.0-py3-none-any.whl (310 kB)")
    assert not progress.read(share, "  Downloading idna-3.20-py3-none-any.whl (70 kB)")
    assert not progress.read(kernels, "Processing /checkout")
    assert not progress.read(kernels, "  kernels: level 3 of 5 compiled")
    assert progress.line([torch, kernels]) == (
        "packages 3/3; torch-2.13.0+cpu 88 of 192 MB; compiling kernels, level 3 of 5 compiled"
    )
    progress.read(torch, "Progress 191500000 of 191500000")
    assert progress.line([torch]) == "packages 3/3, unpacking"
    assert progress.line([kernels]) == "compiling kernels, level 3 of 5 compiled"
    assert progress.read(torch, "Downloading torch (182.6MiB)") == "downloading torch (182.6MiB)"
    ucx = "  Downloading libucx_cu13-1.21.0-py3-none-manylinux_2_28_x86_64.whl (42.0 MB)"
    assert progress.read(share, ucx).startswith("downloading libucx_cu13-1.21.0 (42.0 MB; CUDA 13 in its name only")


def test_each_level_of_the_kernels_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a compiler that makes empty libraries."""
    compiler = tmp_path / "c++"
    compiler.write_text(
        '#!/bin/sh\n[ "$1" = -dumpmachine ] && echo x86_64-linux-gnu && exit\n'
        'while [ "$1" != -o ]; do shift; done; touch "$2"\n'
    )
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    (tmp_path / "libs/pdmesh/engine").mkdir(parents=True)
    build = load_script(ROOT / "libs/pdmesh/engine/csrc/hatch_build.py")
    said: list[str] = []
    _, built, problems = build.compile_kernels(tmp_path, report=said.append)
    assert built == [f"_kernels.{level}.so" for level in ("probe", "baseline", "avx2", "avx512", "avx512_bf16")]
    assert problems == []
    assert said == [f"kernels: level {number} of 5 compiled" for number in range(1, 6)]


def chosen(
    install_torch: ModuleType, monkeypatch: pytest.MonkeyPatch, *arguments: str, device: bool = False, failing: int = 0
) -> list[str]:
    """What is asked for, in order, if the first ``failing`` sources do not have it."""
    asked: list[str] = []

    def answer(requirement: str) -> int:
        asked.append(requirement)
        return int(len(asked) <= failing)

    monkeypatch.setattr(sys, "argv", ["install_torch.py", *arguments])
    monkeypatch.setattr(install_torch, "has_nvidia_device", lambda: device)
    monkeypatch.setattr(install_torch, "pip_install", lambda *given, quiet=False: answer(" ".join(given[2:])))
    monkeypatch.setattr(install_torch, "install_with_uv", lambda pin: answer(f"uv {pin}"))
    assert install_torch.main() == 0
    return asked


def test_the_build_of_torch_follows_the_device(
    install_torch: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pin = install_torch.pinned("torch")
    assert chosen(install_torch, monkeypatch, device=True) == [pin]
    assert chosen(install_torch, monkeypatch) == [f"{pin}+cpu"]
    assert chosen(install_torch, monkeypatch, "--cpu", device=True) == [f"{pin}+cpu"]
    assert chosen(install_torch, monkeypatch, failing=1) == [f"{pin}+cpu", f"uv {pin}"]
    capsys.readouterr()
    assert chosen(install_torch, monkeypatch, failing=2) == [f"{pin}+cpu", f"uv {pin}", pin]
    said = capsys.readouterr().out.splitlines()
    assert [line.partition(" (")[0] for line in said] == [
        "torch: installing the CPU build, about 0.2 GB",
        "torch: no index with CPU builds can be reached: installing the package index's build, about 2.7 GB",
    ]
    assert chosen(install_torch, monkeypatch, "--torch", "--index-url URL torch==1") == ["--index-url URL torch==1"]


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
