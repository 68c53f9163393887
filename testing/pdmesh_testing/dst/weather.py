"""What the simulated network does at the moment, and how a call over it ends."""

from __future__ import annotations

from dataclasses import dataclass, field

import grpc
import grpc.aio


@dataclass(frozen=True, slots=True)
class Status:
    """How a call ended."""

    code: grpc.StatusCode
    details: str = ""

    def error(self) -> grpc.aio.AioRpcError:
        metadata = grpc.aio.Metadata()
        return grpc.aio.AioRpcError(self.code, metadata, metadata, details=self.details)


OK = Status(grpc.StatusCode.OK)
RESET = Status(grpc.StatusCode.UNAVAILABLE, "connection reset by peer")


@dataclass(slots=True)
class Weather:
    """What the network does at the moment; faults change it."""

    delay_s: tuple[float, float] = (0.0002, 0.002)
    slow_share: float = 0.0  # of frames; they take up to ``slow_s`` longer
    slow_s: float = 0.0
    window: int = 64  # frames under way and unread before a writer waits
    away: dict[frozenset[str], float] = field(default_factory=dict[frozenset[str], float])  # pairs, and until when
