"""A step's integers on their way to the device: through pinned memory, in few copies, without waiting."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pdmesh.engine.cuda.streams import Streams

_NUM_VALUES = 1 << 16


class Staging:
    """Pinned host memory that is written front to back during a step, and again from the front in the next.

    `restart` may be called only when the device has done what was given to it since the last one.
    """

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self._buffer = streams.host_buffer(_NUM_VALUES, torch.int32)
        self._full: list[Tensor] = []  # buffers that were too small, kept until the step has ended
        self._used = 0

    @property
    def device(self) -> torch.device:
        return self._streams.device

    def restart(self) -> None:
        self._used = 0
        self._full.clear()

    def host(self, values: npt.NDArray[np.integer[Any]]) -> Tensor:
        """``values`` in pinned memory, as int32."""
        if self._used + len(values) > len(self._buffer):
            self._full.append(self._buffer)
            self._buffer = self._streams.host_buffer(2 * (len(self._buffer) + len(values)), torch.int32)
            self._used = 0
        place = self._buffer[self._used : self._used + len(values)]
        place.numpy()[:] = values
        self._used += len(values)
        return place

    def upload(self, *arrays: npt.NDArray[np.integer[Any]]) -> tuple[Tensor, ...]:
        """The arrays on the device, as int32, by one copy."""
        packed = self.host(np.concatenate(arrays)).to(self.device, non_blocking=True)
        return torch.split(packed, [len(array) for array in arrays])
