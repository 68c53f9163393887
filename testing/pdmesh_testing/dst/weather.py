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
    """Present state of the network; faults change it."""

    delay_s: tuple[float, float] = (0.0002, 0.002)
    #: Share of frames that take up to ``slow_s`` longer.
    slow_share: float = 0.0
    slow_s: float = 0.0
    #: Frames under way and unread before a writer waits.
    window: int = 64
    #: Pairs of processes that cannot reach each other, and until when.
    away: dict[frozenset[str], float] = field(default_factory=dict[frozenset[str], float])
