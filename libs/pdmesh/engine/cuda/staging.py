"""Upload of a step's integers: through pinned memory, in few copies, without waiting."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pdmesh.engine.cuda.streams import Event, Streams

_NUM_VALUES = 1 << 16

#: Size of FlashInfer's own pinned memory for a plan.
PLAN_BYTES = 8 * 1024 * 1024


class Staging:
    """Pinned host memory, written from front to back during a step, and from the front again in the next step.

    `restart` may be called only when the device has completed all work submitted since the last call. Buffers that were
    too small (``_full``) are kept until then.
    """

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self._buffer = streams.host_buffer(_NUM_VALUES, torch.int32)
        self._full: list[Tensor] = []
        self._used = 0

    @property
    def device(self) -> torch.device:
        return self._streams.device

    def restart(self) -> None:
        self._used = 0
        self._full.clear()

    def host(self, values: npt.NDArray[np.integer[Any]]) -> Tensor:
        """Return ``values`` in pinned memory, as int32."""
        if self._used + len(values) > len(self._buffer):
            self._full.append(self._buffer)
            self._buffer = self._streams.host_buffer(2 * (len(self._buffer) + len(values)), torch.int32)
            self._used = 0
        place = self._buffer[self._used : self._used + len(values)]
        place.numpy()[:] = values
        self._used += len(values)
        return place

    def upload(self, *arrays: npt.NDArray[np.integer[Any]]) -> tuple[Tensor, ...]:
        """Return the arrays on the device, as int32, after one copy."""
        packed = self.host(np.concatenate(arrays)).to(self.device, non_blocking=True)
        return torch.split(packed, [len(array) for array in arrays])


@dataclass(slots=True)
class Turn:
    """Pinned memory for the data that one step sends: integers, and FlashInfer's plan (uint8).

    ``sent`` is an event that completes when the device has read all of it.
    """

    staging: Staging
    plan: Tensor
    sent: Event | None = None


class Turns:
    """Two `Turn` objects in alternation, so that a step can be prepared while the one before is computed."""

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self._turns = [Turn(Staging(streams), streams.host_buffer(PLAN_BYTES, torch.uint8)) for _ in range(2)]

    def next(self) -> Turn:
        """Return the other turn, once the device has read its content. Record that the current one has been sent."""
        self._turns[0].sent = self._streams.record()
        self._turns.reverse()
        turn = self._turns[0]
        if turn.sent is not None:
            turn.sent.synchronize()
        turn.staging.restart()
        return turn
