"""Memory that the ranks of an instance share: anonymous, inherited by descriptor, freed with the last rank."""

from __future__ import annotations

import mmap
import os

import numpy as np
import torch
from torch import Tensor

from pdmesh.errors import ConfigError


def create_memory(name: str, num_bytes: int = 0) -> int:
    """Return the descriptor of new shared memory, zeroed. The system allocates its pages at the first write.

    Raise ConfigError if the system has no such memory.
    """
    try:
        fd = os.memfd_create(name)
        os.ftruncate(fd, num_bytes)
    except OSError as error:
        raise ConfigError(
            f"this system cannot share memory among ranks (memfd_create: {error.strerror}): set tensor_parallel_size "
            "to 1"
        ) from error
    return fd


def map_memory(fd: int, num_bytes: int) -> Tensor:
    """Return the first ``num_bytes`` of shared memory as a tensor of bytes, aligned to pages."""
    mapped = mmap.mmap(fd, num_bytes)
    return torch.from_numpy(np.frombuffer(mapped, dtype=np.uint8))
