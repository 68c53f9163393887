"""The engine on a CUDA device. Nothing but this is imported where there is none."""

from __future__ import annotations

import functools
import importlib.util


@functools.cache
def has_triton() -> bool:
    """Whether the kernels of this package can be compiled: it comes with torch for CUDA."""
    return importlib.util.find_spec("triton") is not None
