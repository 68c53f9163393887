"""Compiles the CPU kernels while the wheel is built; without a compiler it has none, and the engine uses torch."""

from __future__ import annotations

import os
import platform
import shlex
import shutil
import subprocess
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

SOURCES = ("attention.cpp", "linear.cpp", "rows.cpp")
FOLDER = "libs/pdmesh/engine/csrc/dot"
LIBRARY = "libs/pdmesh/engine/_kernels.so"
#: The library asks the processor before it uses what these allow.
FLAGS = ["-std=c++17", "-O3", "-shared", "-fPIC", "-fopenmp"]
FLAGS += ["-mprfchw", "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512bf16"]


class KernelsHook(BuildHookInterface[Any]):
    """Compiles the kernels into the wheel."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        library = Path(self.root, LIBRARY)
        # An engine that is starting finds the old one or the new one, whole; two builds do not meet.
        fresh = library.with_suffix(f".{os.getpid()}.new")
        if problem := _compile(Path(self.root), fresh):
            library.unlink(missing_ok=True)  # a library of other sources is worse than none
            self.app.display_warning(f"the CPU engine will be slower: {problem}")
            return
        fresh.replace(library)
        build_data["artifacts"].append(LIBRARY)
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}"


def _compile(root: Path, output: Path) -> str:
    """What went wrong, or nothing."""
    compiler = shlex.split(os.environ.get("CXX", "")) or [shutil.which("c++") or shutil.which("g++") or ""]
    if platform.system() != "Linux" or platform.machine() != "x86_64" or not compiler[0]:
        return "there is no C++ compiler for x86-64 Linux"
    command = [*compiler, *FLAGS, *(f"{FOLDER}/{source}" for source in SOURCES), "-o", str(output)]
    try:
        result = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    except OSError as error:
        return str(error)
    return f"{shlex.join(command)}\n{result.stderr}" if result.returncode else ""
