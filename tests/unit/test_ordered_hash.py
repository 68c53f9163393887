"""One program of all ordered kernels gives one output on every processor: here, cross-compiled and under emulators."""

from __future__ import annotations

import platform
import shutil
import subprocess
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = [*sorted((ROOT / "libs/pdmesh/engine/csrc/ordered").glob("*.cpp")), ROOT / "tests/native/ordered_hash.cpp"]
#: What it prints. If a change of the kernels means to change it, `pdmesh.engine.levels` needs a new ordered version.
EXPECTED = (ROOT / "tests/native/ordered_hash.txt").read_text()


class Target(NamedTuple):
    name: str
    machine: str  # that runs it, without an emulator
    compiler: str
    flags: tuple[str, ...]
    emulator: tuple[str, ...] = ()


NEHALEM = ("qemu-x86_64-static", "-cpu", "Nehalem")
TARGETS = [
    Target("baseline", "x86_64", "g++", ()),
    Target("avx2", "x86_64", "g++", ("-mavx2", "-mfma", "-mf16c")),
    Target("neon", "aarch64", "g++", ()),
    Target("baseline on an emulated Nehalem", "", "x86_64-linux-gnu-g++", (), NEHALEM),
    Target("neon, emulated", "", "aarch64-linux-gnu-g++", (), ("qemu-aarch64-static",)),
]


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
def test_ordered_kernels_give_the_same_bits_on_every_processor(target: Target, tmp_path: Path) -> None:
    if target.machine and target.machine != platform.machine():
        pytest.skip(f"this processor lacks {target.name}: it is no {target.machine}")
    if target.name == "avx2" and " avx2 " not in Path("/proc/cpuinfo").read_text():
        pytest.skip("this processor lacks avx2")
    for tool in (target.compiler, *target.emulator[:1]):
        if shutil.which(tool) is None:
            pytest.skip(f"this machine lacks {tool}")
    program = tmp_path / "program"
    options = ("-std=c++17", "-O3", "-fopenmp", "-ffp-contract=off", "-Wno-psabi", "-static")
    subprocess.run(
        [target.compiler, *options, *target.flags, *map(str, SOURCES), "-o", str(program)],
        check=True,
        capture_output=True,
    )
    result = subprocess.run([*target.emulator, str(program)], check=True, capture_output=True, text=True)
    assert result.stdout == EXPECTED
