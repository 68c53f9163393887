"""Checks of the configured device without torch, whose import takes seconds."""

from __future__ import annotations

import re
from importlib import metadata
from pathlib import Path

from pdmesh.errors import ConfigError

_NAME = re.compile(r"auto|cpu|cuda(:\d+)?")

#: Device files of NVIDIA's drivers (also in the Windows subsystem and on Jetson) and of AMD's.
_DEVICE_FILES = ("dev/nvidia[0-9]*", "dev/dxg", "dev/nvmap", "dev/kfd")


def may_have_device(root: Path = Path("/")) -> bool:
    """Return whether torch might find a device other than the CPU."""
    return any(True for pattern in _DEVICE_FILES for _ in root.glob(pattern))


def check_device(name: str, root: Path = Path("/")) -> None:
    """Raise ConfigError if ``name`` is no device's name, or CUDA without any GPU or with a CPU-only build of torch.

    Whether the GPU of that number exists is not checked.
    """
    check_device_name(name)
    if not name.startswith("cuda"):
        return
    if not may_have_device(root):
        raise ConfigError(f"device is {name!r}, but this machine has no NVIDIA device: set it to cpu, or leave it out")
    version = metadata.version("torch")
    if version.endswith("+cpu"):
        raise ConfigError(
            f"device is {name!r}, but torch {version} is a build without CUDA: install another build of torch, or set "
            "the device to cpu"
        )


def check_device_name(name: str) -> None:
    """Raise ConfigError if ``name`` is none of auto, cpu, cuda and cuda:N."""
    if not _NAME.fullmatch(name):
        raise ConfigError(f"device is {name!r}: use auto, cpu or cuda")
