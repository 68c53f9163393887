"""Limits of the scheduling core."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated

from pdmesh.policy.config import PolicyConfig
from pdmesh.ranges import KV_RISK


class LatencyLearning(StrEnum):
    """What becomes of `PolicyConfig.latency` while the core runs."""

    FIXED = "fixed"
    REFINED = "refined"  # by the steps that instances report
    MEASURED = "measured"  # the same, from what instances measured of themselves; it serves until one has


class KvReservation(StrEnum):
    """Room for how much of its output a request is admitted with."""

    FULL = "full"  # for all that it may become
    ON_DEMAND = "on_demand"  # for a little, and more as it grows


@dataclass(frozen=True, slots=True, kw_only=True)
class CoreConfig:
    plans_in_flight: int = 2  # per instance, so that the round trip to the scheduler never idles the device
    max_queue_entries: int = 4096
    max_queue_tokens: int = 128 * 1024 * 1024  # prompt tokens to compute of all waiting requests
    max_queue_s: float = 120.0
    orphan_grace_s: float = 3.0  # after a restart: how long a request or a resident may wait for its counterpart
    retry_after_s: float = 1.0  # what a client is told with a 429 or 503, at least
    refuses_early: bool = False  # what would not keep its own target, as predicted; studies let every request wait
    admission_ttft_s: float | None = None  # the target of those without one, where this is asked; None: max_queue_s
    #: How long it is remembered that two could not reach each other: each time that it is tried too early costs a
    #: transfer's limit. 0: it is not.
    cut_memory_s: float = 30.0
    max_lost_receivers: int = 4  # of one request's KV: after that it is computed again, as perhaps what they fail at
    evacuates: bool = True  # what decodes where everything has to leave moves away with its KV
    kv_reservation: KvReservation = KvReservation.FULL
    #: On demand: of needing more blocks than there are, where a request is admitted.
    kv_risk: Annotated[float, KV_RISK] = 0.01
    learning: LatencyLearning = LatencyLearning.FIXED
    policy: PolicyConfig = field(default_factory=PolicyConfig)
