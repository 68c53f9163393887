"""What hatchling calls while a wheel is built: CPU kernels, and where it is asked for a compiled scheduling core.

``PDMESH_COMPILE_CORE=1`` asks for that (`deploy/compile_core.py`). Such a wheel fits one version of Python. An editable
install never has it. Where something cannot be compiled, the build says why, and the wheel is Python in its place.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import subprocess
import sys
import sysconfig
from pathlib import Path
from types import ModuleType
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

KERNELS = "libs/pdmesh/engine/csrc/hatch_build.py"

COMPILE_CORE = "deploy/compile_core.py"

#: The environment's variable that asks for it.
SWITCH = "PDMESH_COMPILE_CORE"

#: What compiles the core, at the versions of constraints.txt.
COMPILER = ("mypy", "setuptools")


class WheelHook(BuildHookInterface[Any]):
    """Compiles into the wheel what can be compiled."""

    def dependencies(self) -> list[str]:
        """What a build in an environment of its own installs first."""
        if os.environ.get(SWITCH) != "1":
            return []
        pins = Path(self.root, "constraints.txt").read_text().splitlines()
        return [pin for pin in pins if pin.partition("==")[0] in COMPILER]

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        root = Path(self.root)
        machine = self._add_kernels(root, build_data, only_here=version == "editable")
        has_core = version == "standard" and os.environ.get(SWITCH) == "1" and self._add_core(root, build_data, machine)
        if machine or has_core:
            build_data["pure_python"] = False
            python = f"cp{sys.version_info.major}{sys.version_info.minor}"
            build_data["tag"] = f"{f'{python}-{python}' if has_core else 'py3-none'}-{_system(machine)}"

    def _add_kernels(self, root: Path, build_data: dict[str, Any], *, only_here: bool) -> str:
        """Return the machine that they are for; empty if there are none."""
        build = _load(root / KERNELS)
        try:
            machine, built, problems = build.compile_kernels(root, only_here=only_here, report=self.app.display_info)
        except build.BuildError as error:
            machine, built, problems = "", [], [f"the CPU engine will compute with torch, more slowly: {error}"]
            for path in Path(root, build.LIBRARY_FOLDER).glob("_kernels.*"):
                path.unlink(missing_ok=True)  # a library of other sources is worse than none
        for problem in problems:
            self.app.display_warning(problem)
        build_data["artifacts"] += [f"{build.LIBRARY_FOLDER}/{name}" for name in built]
        return str(machine) if built else ""

    def _add_core(self, root: Path, build_data: dict[str, Any], machine: str) -> bool:
        """Whether it could be compiled."""
        if machine not in ("", platform.machine()):
            problem = f"mypyc does not compile for {machine} here"
        else:
            files, problem = _compiled_core(root)
            build_data["force_include"].update(files)
        if problem:
            self.app.display_warning(f"the scheduling core will be plain Python, at half the speed: {problem}")
        return not problem


def _compiled_core(root: Path) -> tuple[dict[str, str], str]:
    """The compiled files with their places in the wheel, and what went wrong."""
    folder = Path("build", f"core-{os.getpid()}")
    command = [sys.executable, COMPILE_CORE, str(folder)]
    done = subprocess.run(command, cwd=root, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if done.returncode:
        return {}, f"{COMPILE_CORE} failed:\n{done.stdout[-4000:]}"
    built = root / folder / "lib"
    return {str(path): path.relative_to(built).as_posix() for path in sorted(built.rglob("*.so"))}, ""


def _load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _system(machine: str) -> str:
    """A wheel's name for Linux on ``machine``; for this system if that is empty."""
    here = machine in ("", platform.machine())
    return (sysconfig.get_platform() if here else f"linux-{machine}").replace("-", "_").replace(".", "_")
