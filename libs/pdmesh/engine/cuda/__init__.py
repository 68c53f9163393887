"""The engine on a CUDA device. Without a device, only this module is imported."""

from __future__ import annotations

import functools
import importlib.util


@functools.cache
def has_triton() -> bool:
    """Return whether the Triton kernels of this package can be compiled. Torch for CUDA includes Triton."""
    return importlib.util.find_spec("triton") is not None
