"""Compile the CPU kernels while the wheel is built: one library for each processor level, and the probe of levels.

Without a compiler the wheel has no kernels, and the engine computes with torch. ``CXX`` names the compiler, with
options if need be. The compiler names its own target, so a cross compiler makes a wheel for that target.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import NamedTuple

SOURCE_FOLDER = "libs/pdmesh/engine/csrc"
LIBRARY_FOLDER = "libs/pdmesh/engine"

#: What a library needs of libgomp and libstdc++ comes from those that torch has loaded before it. A static libstdc++
#: would ask for as new a glibc as the machine has that compiles.
FLAGS = ("-std=c++17", "-O3", "-shared", "-fPIC", "-fopenmp", "-s", "-Wno-psabi")
#: Bits that no level changes: nothing is fused unless a kernel says so.
ORDERED_FLAGS = ("-ffp-contract=off",)


class LevelSources(NamedTuple):
    """Sources of one library, as a pattern below the source folder, and the compiler flags for them."""

    pattern: str
    flags: tuple[str, ...] = ()


_AVX2 = ("-mavx2", "-mfma", "-mf16c")
_AVX512 = ("-mavx512f", "-mavx512bw", "-mavx512vl")
#: By the machine that the compiler compiles for, each level's. The engine loads the probe first, which asks the
#: processor.
LIBRARIES = {
    "x86_64": {
        "probe": LevelSources("probe.cpp"),
        "baseline": LevelSources("ordered/*.cpp", ORDERED_FLAGS),
        "avx2": LevelSources("ordered/*.cpp", (*ORDERED_FLAGS, *_AVX2)),
        "avx512": LevelSources("ordered/*.cpp", (*ORDERED_FLAGS, *_AVX2, *_AVX512, "-mavx512dq")),
        "avx512_bf16": LevelSources("dot/*.cpp", ("-mprfchw", *_AVX512, "-mavx512bf16")),
    },
    "aarch64": {"probe": LevelSources("probe.cpp"), "neon": LevelSources("ordered/*.cpp", ORDERED_FLAGS)},
}


class BuildError(Exception):
    """Says what could not be compiled, and why."""


def compile_kernels(
    root: Path, *, only_here: bool = False, report: Callable[[str], None] = lambda _: None
) -> tuple[str, list[str], list[str]]:
    """Return the target machine, the libraries it has now, and why each other one is missing.

    Raise BuildError only without a usable compiler.

    A library that lies there already is left as it is if it was made from the same sources in the same way.
    ``only_here`` leaves out levels that this machine's processor lacks. ``report`` is called after each level.
    """
    compiler = _compiler()
    machine = _target(compiler)
    libraries = LIBRARIES[machine]
    results = [_compile(compiler, "probe", libraries["probe"], root)]
    levels = [level for level in libraries if level != "probe"]
    if only_here and machine == platform.machine() and not results[0][1]:
        probe = ctypes.CDLL(str(root / LIBRARY_FOLDER / results[0][0]))
        probe.pdmesh_levels.restype = ctypes.c_char_p
        here = probe.pdmesh_levels().decode().split()
        levels = [level for level in levels if level in here]
    report(f"kernels: level 1 of {len(levels) + 1} compiled")
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        compiling = [pool.submit(_compile, compiler, level, libraries[level], root) for level in levels]
        for number, _ in enumerate(as_completed(compiling), 2):
            report(f"kernels: level {number} of {len(levels) + 1} compiled")
        results += [level.result() for level in compiling]
    return machine, [name for name, problem in results if not problem], [problem for _, problem in results if problem]


def _compile(compiler: list[str], level: str, library: LevelSources, root: Path) -> tuple[str, str]:
    """Compile a library unless it is up to date. Return the file name, and the problem or an empty string."""
    sources = root / SOURCE_FOLDER
    path = root / LIBRARY_FOLDER / f"_kernels.{level}.so"
    made_from = path.with_suffix(".stamp")
    command = [*compiler, *FLAGS, *library.flags, *sorted(str(source) for source in sources.glob(library.pattern))]
    digest = hashlib.sha256(repr([part.replace(str(root), "") for part in command]).encode())
    for source in sorted([*sources.glob("*.h"), *sources.glob(f"{Path(library.pattern).parent}/*")]):
        digest.update(source.read_bytes() if source.is_file() else b"")
    stamp = digest.hexdigest()
    if path.exists() and made_from.exists() and made_from.read_text() == stamp:
        return path.name, ""
    made_from.unlink(missing_ok=True)
    # An engine that is starting finds the old library or the new one, whole; two builds do not meet.
    fresh = path.with_suffix(f".{os.getpid()}.new")
    try:
        _run([*command, "-o", str(fresh)])
    except BuildError as error:
        path.unlink(missing_ok=True)
        return path.name, f"the CPU kernels of level {level} are left out: {error}"
    fresh.replace(path)
    made_from.write_text(stamp)
    return path.name, ""


def _compiler() -> list[str]:
    if configured := shlex.split(os.environ.get("CXX", "")):
        return configured
    for name in ("c++", "g++"):
        if path := shutil.which(name):
            return [path]
    raise BuildError("there is no C++ compiler: install g++, or name one in CXX")


def _target(compiler: list[str]) -> str:
    """Return the processor that ``compiler`` compiles for, such as ``x86_64``.

    Raise BuildError if the compiler fails, or compiles for a system other than Linux on a processor of `LIBRARIES`.
    """
    triple = _run([*compiler, "-dumpmachine"]).strip()
    machine = triple.partition("-")[0]
    if machine not in LIBRARIES or "linux" not in triple:
        raise BuildError(f"{shlex.join(compiler)} compiles for {triple}, not for Linux on {' or '.join(LIBRARIES)}")
    return machine


def _run(command: list[str]) -> str:
    try:
        result = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        raise BuildError(f"{command[0]} cannot be run: {error.strerror}") from error
    if result.returncode:
        raise BuildError(f"{shlex.join(command)} failed\n{result.stderr}")
    return result.stdout
