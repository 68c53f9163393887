"""The wheel holds all that the source tree has, and works without it; imports go the way that the docs print."""

from __future__ import annotations

import ast
import os
import platform
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path
from types import ModuleType
from typing import Any

import grimp
import pytest

from pdmesh import __version__ as VERSION
from pdmesh_testing.scripts import load_script

ROOT = Path(__file__).parents[2]
#: Packages of the wheel `pdmesh`, with the folders that they lie in.
PRODUCT = {
    "pdmesh": ROOT / "libs",
    "pdmesh_gateway": ROOT / "services/gateway",
    "pdmesh_scheduler": ROOT / "services/scheduler",
    "pdmesh_prefill": ROOT / "services/prefill",
    "pdmesh_decode": ROOT / "services/decode",
}

PACKAGES = {**PRODUCT, **{f"pdmesh_{name}": ROOT / name for name in ("kubernetes", "lab", "testing")}}


@pytest.fixture(scope="module")
def wheels() -> ModuleType:
    return load_script(ROOT / "deploy/wheels.py")


@pytest.fixture(scope="module")
def unpacked(wheels: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The content of a wheel that was built from the sdist where there is no compiler."""
    folder = tmp_path_factory.mktemp("wheel")
    with pytest.MonkeyPatch.context() as environ:
        environ.setenv("CC", "/nowhere/cc")
        wheel = wheels.build_wheel("/nowhere/c++", folder)
    assert not wheels.has_compiled_core(wheel)
    assert wheels.kernels(wheel) == []
    assert wheel.name.endswith("-py3-none-any.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder / "unpacked")
    return folder / "unpacked"


@pytest.mark.slow
def test_every_source_file_is_in_the_wheel_and_no_other_package(unpacked: Path) -> None:
    for package, source in PRODUCT.items():
        wanted = {file.relative_to(source) for file in (source / package).rglob("*.py")}
        assert wanted <= {file.relative_to(unpacked) for file in (unpacked / package).rglob("*.py")}
        assert (unpacked / package / "py.typed").exists()
    assert {path.name for path in unpacked.iterdir() if path.suffix != ".dist-info"} == set(PRODUCT)


@pytest.mark.slow
def test_the_wheel_works_without_the_source(unpacked: Path) -> None:
    modules = [*PRODUCT, *(f"{package}.main" for package in PRODUCT if package != "pdmesh"), "pdmesh.cli.app"]
    program = (
        "import importlib, pathlib, sys\n"
        "sys.modules |= {f'pdmesh_{name}': None for name in ('kubernetes', 'lab', 'testing')}\n"  # importing them fails
        f"for name in {modules!r}:\n"
        "    file = pathlib.Path(importlib.import_module(name).__file__)\n"
        f"    assert file.is_relative_to({str(unpacked)!r}), file\n"
    )
    # PYTHONPATH comes before what the editable install adds.
    environ = {**os.environ, "PYTHONPATH": str(unpacked)}
    subprocess.run([sys.executable, "-c", program], env=environ, cwd=unpacked, check=True, timeout=300)


@pytest.mark.slow
def test_the_other_distributions_have_a_wheel_each(wheels: ModuleType, tmp_path: Path) -> None:
    for folder in wheels.PURE:
        package = f"pdmesh_{folder}"
        with zipfile.ZipFile(wheels.build_pure(folder, tmp_path)) as archive:
            names = archive.namelist()
        assert {name.partition("/")[0] for name in names} == {package, f"{package}-{VERSION}.dist-info"}
        wanted = {str(file.relative_to(ROOT / folder)) for file in (ROOT / folder / package).rglob("*.py")}
        assert {f"{package}/py.typed", f"{package}-{VERSION}.dist-info/licenses/LICENSE", *wanted} <= set(names)


def test_distributions_that_fit_each_other_have_one_version() -> None:
    assert settings_of_tools()["project"]["version"] == VERSION
    extras = settings_of_tools()["project"]["optional-dependencies"]
    assert all(extras[name] == [f"pdmesh-{name}=={VERSION}"] for name in ("kubernetes", "lab"))
    needed = {"kubernetes": ["pdmesh"], "lab": ["pdmesh"], "testing": ["pdmesh", "pdmesh-kubernetes", "pdmesh-lab"]}
    for folder, needs in needed.items():
        project = tomllib.loads((ROOT / folder / "pyproject.toml").read_text())["project"]
        assert (project["name"], project["version"]) == (f"pdmesh-{folder}", VERSION)
        pinned = [each for each in project["dependencies"] if each.startswith("pdmesh")]
        assert pinned == [f"{name}=={VERSION}" for name in needs]
        # A copy, since the sdist of a folder has no files from outside.
        assert (ROOT / folder / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()


def kernels_of_a_mesh(package: Path, folder: Path, **environ: str) -> set[str]:
    """What the workers of a mesh compute with that is started and asked from ``package``, with what is installed."""
    program = (
        "import pathlib, pdmesh, sys\n"
        f"assert pathlib.Path(pdmesh.__file__).is_relative_to({str(package)!r})\n"
        "from pdmesh.cli import main\n"
        "sys.exit(main())\n"
    )
    environ = {
        **os.environ,
        "PYTHONPATH": str(package),
        "XDG_STATE_HOME": str(folder / "state"),
        "PDMESH_GATEWAY_PORT": "0",
        **environ,
    }

    def pdmesh(*arguments: str) -> str:
        return subprocess.run(
            [sys.executable, "-c", program, *arguments],
            env=environ,
            cwd=folder,
            check=True,
            capture_output=True,
            text=True,
            timeout=300,
        ).stdout

    pdmesh("up", "--detach")
    try:
        question = "Why separate prefill and decode?"
        answer = pdmesh("chat", "--message", question, "--temperature", "0", "--max-tokens", "8")
        assert answer.split()[:2] == ["Because", "they"]
        assert "decode-0" in pdmesh("status")
    finally:
        pdmesh("down")
    logs = "".join(path.read_text() for path in folder.rglob("*.log"))
    return set(re.findall(r'"kernels": "(\w+)', logs))


@pytest.mark.slow
def test_a_mesh_starts_from_a_wheel_that_was_built_without_a_compiler(unpacked: Path, tmp_path: Path) -> None:
    """And answers: what the editable install has on the path must not be what makes it work. As plain as can be: nor
    do torch's own kernels use more than the oldest x86-64 has."""
    plain = {"ONEDNN_MAX_CPU_ISA": "SSE41", "ATEN_CPU_CAPABILITY": "default"}
    assert kernels_of_a_mesh(unpacked, tmp_path, **plain) == {"torch"}


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_a_wheel_has_kernels_and_a_compiled_core_inside_and_needs_no_compiler(
    wheels: ModuleType, tmp_path: Path
) -> None:
    """One wheel for all of it, since compiling the core takes more than a minute of CPU."""
    compiler = shutil.which("c++")
    if compiler is None:
        pytest.skip("no compiler to build a wheel with")
    wheel = wheels.build(compiler, tmp_path)
    assert f"_{platform.machine()}.whl" in wheel.name
    assert f"-cp3{sys.version_info.minor}-cp3{sys.version_info.minor}-" in wheel.name
    assert wheels.has_compiled_core(wheel)
    assert wheels.oldest_glibc(wheel.name) <= (2, 28)
    plainest = {"x86_64": "baseline", "aarch64": "neon"}[platform.machine()]
    assert f"pdmesh/engine/_kernels.{plainest}.so" in wheels.kernels(wheel)
    install = [sys.executable, "-m", "pip", "install", "-qq", "--no-index", "--no-deps", "--target", "installed"]
    bare = {"PATH": "/nowhere"}
    subprocess.run([*install, str(wheel)], cwd=tmp_path, env={**os.environ, **bare}, check=True, timeout=300)
    assert kernels_of_a_mesh(tmp_path / "installed", tmp_path, **bare) == {"native"}
    decides_as_python_does(tmp_path / "installed")


#: Their stand-ins inherit from classes of the core, which compiled ones do not let, or they read its sources.
PYTHON_ONLY = {"test_core_on_demand.py", "test_core_ranking.py", "test_core_rebalancing.py", "test_core_requests.py"}


def decides_as_python_does(package: Path) -> None:
    """The digests of all bundles, and the tests of the core and of policies, with the compiled core of ``package``."""
    tests = [*ROOT.glob("tests/unit/test_core_*.py"), *ROOT.glob("tests/unit/test_policy*.py")]
    names = sorted(str(path) for path in tests if path.name not in PYTHON_ONLY)
    environ = {**os.environ, "PYTHONPATH": str(package)}

    def run(*arguments: str) -> str:
        done = subprocess.run(
            [sys.executable, *arguments],
            env=environ,
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    assert "core: compiled by mypyc" in run("-m", "pdmesh.cli", "version")
    digests = "tests/sim/test_command_digest.py"
    assert "passed" in run(
        "-m", "pytest", "-q", "-p", "no:cacheprovider", "--hypothesis-seed=0", "-m", "not slow", digests, *names
    )


@pytest.mark.parametrize(
    ("tags", "glibc"), [("manylinux_2_17_x86_64.manylinux2014_x86_64", (2, 17)), ("manylinux_2_36_aarch64", (2, 36))]
)
def test_the_oldest_glibc_of_a_wheel_is_that_of_its_tags(wheels: ModuleType, tags: str, glibc: tuple[int, int]) -> None:
    assert wheels.oldest_glibc(f"pdmesh-0.1.0-py3-none-{tags}.whl") == glibc
    assert wheels.oldest_glibc("pdmesh-0.1.0-py3-none-linux_x86_64.whl") > wheels.NEWEST_GLIBC


def settings_of_tools() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def rows_of_the_docs(page: str = "architecture.md", section: str = "Layers") -> list[set[str]]:
    """The packages of each row of a page's table of layers, from the top."""
    text = (ROOT / "docs" / page).read_text()
    table = text.split(f"\n## {section}\n")[1].split("\n## ")[0]
    rows = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    return [set(re.findall(r"`(\w+(?:\.\w+)?)`", row)) for row in rows]


@pytest.mark.parametrize(
    ("contract", "page", "section"),
    [
        ("rows import from rows below", "architecture.md", "Layers"),
        ("folders of the core import from rows below", "architecture/core.md", "Folders"),
    ],
)
def test_the_layers_that_the_docs_print_are_those_that_are_checked(contract: str, page: str, section: str) -> None:
    contracts = settings_of_tools()["tool"]["importlinter"]["contracts"]
    (layers,) = [each for each in contracts if each["name"] == contract]
    assert [set(row.split(" | ")) for row in layers["layers"]] == rows_of_the_docs(page, section)
    assert "ignore_imports" not in layers


def test_no_package_is_left_out_of_the_layers() -> None:
    divided = {"pdmesh", "pdmesh_lab"}
    found = PACKAGES.keys() - divided
    for package in divided:
        parts = {path.stem for path in (PACKAGES[package] / package).iterdir() if path.suffix == ".py" or path.is_dir()}
        found |= {f"{package}.{part}" for part in parts if not part.startswith("_")}
    assert found == set().union(*rows_of_the_docs())


@pytest.mark.slow
def test_the_license_is_in_the_wheel(unpacked: Path) -> None:
    (file,) = unpacked.glob("*.dist-info/licenses/LICENSE")
    assert "Apache License" in file.read_text()


def test_no_modules_import_each_other_in_a_circle() -> None:
    """Nor do they for types alone: a module can be read, tested and compiled after those that it names."""
    graph = grimp.build_graph(*PACKAGES)
    imports = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    TopologicalSorter(imports).prepare()  # CycleError names the modules of a circle, in order


def test_no_module_reads_a_clock_or_its_process_when_imported() -> None:
    """A forked worker would keep the values of the fork server: new weights looked old by its start time."""
    refused = {"time.time", "time.monotonic", "os.getpid", "os.urandom", "uuid.uuid4"}
    found = [
        f"{file.relative_to(ROOT)}:{call.lineno}"
        for name, source in PACKAGES.items()
        if name != "pdmesh_testing"
        for file in source.rglob("*.py")
        for call in calls_on_import(ast.parse(file.read_text()))
        if ast.unparse(call.func) in refused
    ]
    assert found == []


def calls_on_import(node: ast.AST) -> Iterator[ast.Call]:
    """Yield the calls that run when a module is imported: all outside function bodies."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if isinstance(child, ast.Call):
            yield child
        yield from calls_on_import(child)


def test_no_two_classes_have_one_name() -> None:
    """Two layers that say one word and mean two things are read wrong; private classes, and the messages that the
    public gRPC protocol prescribes (generated, in a namespace of their own), do not meet any others."""
    places: dict[str, list[str]] = {}
    for source in PACKAGES.values():
        for file in source.rglob("*.py"):
            for node in ast.walk(ast.parse(file.read_text())):
                if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                    places.setdefault(node.name, []).append(str(file.relative_to(ROOT)))
    assert len(places) > 500
    assert {name: files for name, files in places.items() if len(files) > 1} == {}
