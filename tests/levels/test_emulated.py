"""Ordered kernels give the same bits on processors that this machine does not have: qemu imitates them.

``sh tests/levels/emulators.sh`` gets what these tests need; they are skipped without it.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from pdmesh.engine.levels import FOLDER, CpuLevel
from pdmesh_testing.levels import library_or_skip, ordered_levels
from pdmesh_testing.scripts import load_script

ROOT = Path(__file__).parents[2]
DIGESTS = Path(__file__).with_name("kernel_digests.py")
AARCH64 = ROOT / ".cache/aarch64"
RecordProperty = Callable[[str, object], None]
#: Number of digests, and the digest of all. A change of the kernels that means to change it also raises the ordered
#: version in `pdmesh.engine.levels`.
NUM_DIGESTS, RECORDED = 230, "32ca17f9cc21f7f4"
LIBGOMP = Path(torch.__file__).parent / "lib/libgomp.so.1"


def output_of(*command: str | Path, timeout_s: float = 500, environ: dict[str, str] | None = None) -> str:
    done = subprocess.run(
        [str(part) for part in command], env=environ, capture_output=True, text=True, timeout=timeout_s, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def digests(library: Path, *emulator: str | Path, openmp: Sequence[Path] = ()) -> dict[str, str]:
    """What each function of the library gives, by a Python of the library's machine."""
    python = emulator or (sys.executable,)
    found: dict[str, str] = json.loads(output_of(*python, "-S", DIGESTS, library, *openmp))
    assert len(found) == NUM_DIGESTS
    for name, digest in found.items():
        assert digest == found[name.replace("2 threads", "1 threads")], f"{name} depends on the number of threads"
    return found


def native_digests(level: CpuLevel) -> dict[str, str]:
    library_or_skip(level)
    return digests(FOLDER / f"_kernels.{level}.so", openmp=[LIBGOMP] if LIBGOMP.exists() else [])


def program_or_skip(name: str) -> str:
    if (program := shutil.which(name)) is None:
        pytest.skip(f"no {name}: sh tests/levels/emulators.sh")
    return program


def on_nehalem() -> list[str]:
    """The prefix of a command that then runs on a processor with SSE4.2 and no more."""
    if platform.machine() != "x86_64":
        pytest.skip("this processor lacks x86-64, whose plainest kind would be imitated")
    return [program_or_skip("qemu-x86_64-static"), "-cpu", "Nehalem"]


@pytest.mark.parametrize("level", [level for level in CpuLevel if level.is_ordered])
def test_every_level_of_this_machine_gives_the_recorded_bits(level: CpuLevel, record_property: RecordProperty) -> None:
    library_or_skip(level)
    found = native_digests(level)
    assert found == native_digests(ordered_levels()[-1])
    assert hashlib.sha256(json.dumps(found, sort_keys=True).encode()).hexdigest()[:16] == RECORDED
    record_property("cpu_level", str(level))


@pytest.mark.slow
def test_kernels_on_a_processor_without_avx_give_the_same_bits(record_property: RecordProperty) -> None:
    expected = native_digests(CpuLevel.BASELINE)
    library = FOLDER / "_kernels.baseline.so"
    openmp = [LIBGOMP] if LIBGOMP.exists() else []
    assert digests(library, *on_nehalem(), sys.executable, openmp=openmp) == expected
    record_property("cpu_level", "baseline (emulated Nehalem)")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_kernels_on_aarch64_give_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, record_property: RecordProperty
) -> None:
    """The library that the wheel for aarch64 has."""
    monkeypatch.setenv("CXX", program_or_skip("aarch64-linux-gnu-g++"))
    emulator = program_or_skip("qemu-aarch64-static")
    python = AARCH64 / "usr/bin/python3"
    if not python.exists():
        pytest.skip("no Python for aarch64: sh tests/levels/emulators.sh")
    if platform.machine() == "aarch64":
        pytest.skip("this processor lacks x86-64, with which aarch64 would be compared")
    expected = native_digests(ordered_levels()[0])
    engine = FOLDER.relative_to(ROOT)
    shutil.copytree(FOLDER / "csrc", tmp_path / engine / "csrc")
    build = load_script(FOLDER / "csrc/hatch_build.py")
    machine, built, problems = build.compile_kernels(tmp_path)
    assert (machine, problems) == ("aarch64", [])
    assert "_kernels.neon.so" in built
    assert digests(tmp_path / engine / "_kernels.neon.so", emulator, "-L", AARCH64, python) == expected
    record_property("cpu_level", "neon (emulated)")


GENERATE = """
import json
from pdmesh.demo.demo_checkpoint import demo_checkpoint
from pdmesh.engine.levels import processor_levels
from pdmesh.engine.runner import TorchEngine
from pdmesh.model import SamplingParams
from pdmesh_testing.stepping import generate

engine = TorchEngine(demo_checkpoint(), num_blocks=16, device="cpu", dtype="bfloat16", cpu_level="baseline")
params = SamplingParams(max_tokens=8, temperature=0.0, logprobs=3)
generation = generate(engine, list(range(5, 50)), 20, params=params)
print(json.dumps([list(processor_levels()), generation.output_ids, repr(generation.results)]))
"""


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_an_engine_on_a_processor_without_avx_gives_the_same_tokens(record_property: RecordProperty) -> None:
    """All of torch runs there, too. Its own sums, of which log-probabilities are made, may differ in the last bit."""
    library_or_skip(CpuLevel.BASELINE)
    # numpy's library would take OPENBLAS_CORETYPE's word for what the processor has.
    environ = {name: value for name, value in os.environ.items() if not name.startswith("OPENBLAS_")}
    environ["OMP_NUM_THREADS"] = "1"
    here, there = (
        json.loads(output_of(*prefix, sys.executable, "-c", GENERATE, environ=environ).splitlines()[-1])
        for prefix in ([], on_nehalem())
    )
    assert there[0] == ["baseline"]
    assert there[1] == here[1]
    record_property("cpu_level", "baseline, the whole engine (emulated Nehalem)")
