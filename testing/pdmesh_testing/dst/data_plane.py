"""KV pieces between simulated processes: the memory transport, with delays, overtaking, loss, damage and repetition."""

from __future__ import annotations

import os
import random
from dataclasses import dataclass

import anyio

from pdmesh.config import TransferConfig
from pdmesh.errors import KvTransferError
from pdmesh.transport.buffers import HEADER_BYTES, PieceBuffer
from pdmesh_testing.dst.process import running_process
from pdmesh_testing.memory_transport import MemoryFabric, MemoryFaults, MemoryTransport

#: All simulated processes are parts of this one, which they do not see.
_PID = os.getpid()


@dataclass(slots=True)
class PieceWeather:
    """What happens to pieces at the moment; shares are of all pieces."""

    delay_s: tuple[float, float] = (0.0001, 0.002)
    slow_share: float = 0.0
    slow_s: float = 0.0
    lost_share: float = 0.0
    damaged_share: float = 0.0
    repeated_share: float = 0.0


class DataPlane:
    """The fabric of one simulated mesh."""

    def __init__(self, rng: random.Random, weather: PieceWeather) -> None:
        self.rng = rng
        self.weather = weather
        self.fabric = MemoryFabric(
            MemoryFaults(
                drop=lambda _header: self._happens(weather.lost_share),
                corrupt=lambda _header: self._happens(weather.damaged_share),
            )
        )

    def delay_s(self) -> float:
        delay_s = self.rng.uniform(*self.weather.delay_s)
        return delay_s + self.rng.uniform(0, self.weather.slow_s) if self._happens(self.weather.slow_share) else delay_s

    def is_repeated(self) -> bool:
        return self._happens(self.weather.repeated_share)

    def _happens(self, share: float) -> bool:
        return share > 0 and self.rng.random() < share


class SimulatedTransport(MemoryTransport):
    """Transport of one process. Concurrent sends may overtake one another, and pieces may be repeated."""

    def __init__(self, config: TransferConfig, plane: DataPlane) -> None:
        super().__init__(config, plane.fabric)
        self._plane = plane
        self._process = running_process()

    def process_of(self, address: bytes) -> int | None:
        return _PID

    async def send(self, address: bytes, buffer: PieceBuffer, payload_bytes: int, *, is_notice: bool = False) -> None:
        copies = list[bytes]()
        if self._plane.is_repeated():
            for start, size in buffer.pieces(payload_bytes):
                copies.append(bytes(buffer.memory[start : start + HEADER_BYTES + size]))
        await anyio.sleep(self._plane.delay_s())
        if self._process.is_dead:
            raise KvTransferError("this process is dead")
        await super().send(address, buffer, payload_bytes)
        if copies:
            await anyio.sleep(self._plane.delay_s())
            for copy in copies:
                await self._send_piece(address, memoryview(copy))
