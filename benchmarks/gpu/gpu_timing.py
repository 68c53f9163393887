"""Times of work on a device: the host's clock beside the device's own."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class Times:
    """Of repeated calls, each in seconds: ``wall_s`` until a call returned, ``device_s`` between events around it."""

    wall_s: list[float]
    device_s: list[float]

    @property
    def median_s(self) -> float:
        return statistics.median(self.wall_s)

    @property
    def p99_s(self) -> float:
        return statistics.quantiles(self.wall_s, n=100, method="inclusive")[98]

    def __str__(self) -> str:
        device = f", {statistics.median(self.device_s) * 1e3:.2f} by the device's clock" if self.device_s else ""
        return f"{self.median_s * 1e3:.2f} ms median{device}"


class Stopwatch:
    """Takes the times of calls one by one, each of which ends when its work has."""

    def __init__(self) -> None:
        self.times = Times([], [])

    def time(self, call: Callable[[], object]) -> None:
        on_device = torch.cuda.is_available()
        first, last = (_event() for _ in range(2)) if on_device else (None, None)
        if first is not None:
            first.record()
        began_s = time.perf_counter()
        call()
        self.times.wall_s.append(time.perf_counter() - began_s)
        if first is not None and last is not None:
            last.record()
            last.synchronize()
            self.times.device_s.append(first.elapsed_time(last) / 1e3)


def timed(call: Callable[[], object], rounds: int) -> Times:
    """Times of ``rounds`` calls after one that does not count."""
    call()
    watch = Stopwatch()
    for _ in range(rounds):
        watch.time(call)
    return watch.times


def queued_s(call: Callable[[], object], rounds: int, calls: int = 10) -> float:
    """Seconds of work that is only queued, by the device's clock: the median of ``rounds`` means over ``calls``."""
    for _ in range(3):
        call()
    means: list[float] = []
    for _ in range(rounds):
        first, last = _event(), _event()
        first.record()
        for _ in range(calls):
            call()
        last.record()
        last.synchronize()
        means.append(first.elapsed_time(last) / 1e3 / calls)
    return statistics.median(means)


def _event() -> Any:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
