"""Limits of the scheduling core."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated

from pdmesh.policy.config import PolicyConfig
from pdmesh.ranges import KV_RISK


class LatencyLearning(StrEnum):
    """Use of `PolicyConfig.latency` while the core runs.

    - ``REFINED``: by the steps that instances report.
    - ``MEASURED``: likewise, from the instances' own measurements; the configured model serves until there is one.
    """

    FIXED = "fixed"
    REFINED = "refined"
    MEASURED = "measured"


class KvReservation(StrEnum):
    """Room that a request is admitted with: for its ``FULL`` output, or for a little that grows ``ON_DEMAND``."""

    FULL = "full"
    ON_DEMAND = "on_demand"


@dataclass(frozen=True, slots=True, kw_only=True)
class CoreConfig:
    """Limits and switches of the core.

    - `plans_in_flight` per instance bridge the round trip to the scheduler, so that the device is never idle.
    - `max_queue_tokens` counts the prompt tokens to compute of all waiting requests.
    - `orphan_grace_s` limits how long a request or a resident waits for its counterpart after a restart.
    - `retry_after_s` is the least delay that a client is told with a 429 or 503.
    - `refuses_early`: refuse a request that would miss its own target, as predicted. Studies let every request wait.
    - `admission_ttft_s` is the target of early refusal for requests without one; None: `max_queue_s`.
    - `max_lost_receivers` of one request's KV may fail before its prompt is computed again: the KV may be the cause.
    - `evacuates`: decodes move away with their KV from instances that must be emptied.
    """

    plans_in_flight: int = 2
    max_queue_entries: int = 4096
    max_queue_tokens: int = 128 * 1024 * 1024
    max_queue_s: float = 120.0
    orphan_grace_s: float = 3.0
    retry_after_s: float = 1.0
    refuses_early: bool = False
    admission_ttft_s: float | None = None
    #: How long an unreachable pair is remembered; 0: not at all. Each retry that comes too early costs a transfer's
    #: time limit.
    cut_memory_s: float = 30.0
    max_lost_receivers: int = 4
    evacuates: bool = True
    kv_reservation: KvReservation = KvReservation.FULL
    #: Accepted risk, on demand, that an admitted request needs more blocks than there are.
    kv_risk: Annotated[float, KV_RISK] = 0.01
    learning: LatencyLearning = LatencyLearning.FIXED
    policy: PolicyConfig = field(default_factory=PolicyConfig)
