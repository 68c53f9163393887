"""The README's first commands answer at every level that this processor has, and with torch's own kernels capped."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from pdmesh.engine.levels import CpuLevel
from pdmesh_testing.levels import ARCHITECTURE_LEVELS, library_or_skip
from pdmesh_testing.mesh import running_mesh

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


@pytest.mark.parametrize("level", ARCHITECTURE_LEVELS)
def test_the_first_commands_work(
    level: CpuLevel,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    record_property: Callable[[str, object], None],
) -> None:
    library_or_skip(level)
    if level is CpuLevel.BASELINE:  # torch's share, too, as on the oldest machine
        monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "SSE41")
        monkeypatch.setenv("ATEN_CPU_CAPABILITY", "default")
    with running_mesh(tmp_path, model=None, settings={"WORKER_CPU_LEVEL": level}) as mesh:
        answer = mesh.pdmesh("chat", "--message", "Why separate prefill and decode?", "--temperature", "0")
        assert answer.startswith("Because they want different things.")
        # Dot products read heads of a multiple of 32 dimensions; the demo's have 40, so the next level computes them.
        computes = level if level.is_ordered else CpuLevel.AVX512
        assert f"native {computes}" in mesh.logs()
    record_property("cpu_level", f"{level}, a mesh")
