"""Compiled kernels for tests: each level that this processor has."""

from __future__ import annotations

import platform

import pytest

from pdmesh.engine.levels import CpuLevel, KernelLibrary, load_library, processor_levels

#: What a processor of this machine's architecture can have.
ARCHITECTURE_LEVELS = [level for level in CpuLevel if (level is CpuLevel.NEON) is (platform.machine() == "aarch64")]


def library_or_skip(level: CpuLevel, dtype: str = "bfloat16") -> KernelLibrary:
    """Return the kernels of one level. Skips the test if the processor lacks the level, or no kernels were compiled."""
    available = processor_levels()
    if not available:
        pytest.skip("no kernels: built without a compiler")
    if level not in available:
        pytest.skip(f"this processor lacks {level}")
    library = load_library(level, dtype)
    if library is None:
        pytest.skip(f"{level} kernels were not compiled, or the system does not grant their registers")
    return library


def ordered_levels() -> list[CpuLevel]:
    """Return the levels of this machine that compute the same bits."""
    return [level for level in processor_levels() if level.is_ordered]
