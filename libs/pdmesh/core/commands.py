"""What the scheduling core wants done. The driver (service or simulator) carries each out, in order."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from pdmesh.model import Epoch, GatewayId, InstanceId, RejectReason, RequestId, Role, StepPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmitPrefill:
    """Hold ``num_blocks`` on ``instance_id`` for a request whose chunks follow in later plans.

    ``decode_instance_id`` is where the KV goes; None means that it stays and decodes here, and ``num_blocks`` then
    covers the output too. Each member of a group is asked for its share of the blocks.
    """

    instance_id: InstanceId
    request_id: RequestId
    epoch: Epoch
    num_blocks: int
    decode_instance_id: InstanceId | None
    members: tuple[InstanceId, ...] = ()  # of the group that computes it, the leader first


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStep:
    """Queue a step plan on an instance."""

    instance_id: InstanceId
    plan: StepPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaceDecode:
    """Reserve blocks on a decode instance and expect the request's KV there, under ``capability``."""

    instance_id: InstanceId
    request_id: RequestId
    epoch: Epoch
    num_blocks: int
    prefill_instance_id: InstanceId
    capability: int  # 64 random bits; a piece without them is dropped


@dataclass(frozen=True, slots=True, kw_only=True)
class GrantTransfer:
    """Let the prefill instance send to the decode instance: a transfer backend of the receiver is taken."""

    instance_id: InstanceId  # the sender
    request_id: RequestId
    epoch: Epoch
    decode_instance_id: InstanceId
    capability: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PauseTransfer:
    """Stop sending a preempted request's KV until the next grant; answered by TransferPaused."""

    instance_id: InstanceId  # the sender
    request_id: RequestId
    epoch: Epoch


@dataclass(frozen=True, slots=True, kw_only=True)
class FreeKv:
    """Stop whatever runs for the request on the instance and free its KV and reservations; answered by KvReleased.

    ``epoch`` and older. Idempotent: an instance that holds nothing answers all the same.
    """

    instance_id: InstanceId
    request_id: RequestId
    epoch: Epoch


@dataclass(frozen=True, slots=True, kw_only=True)
class Reject:
    """Tell the gateway that the request will not be served."""

    gateway_id: GatewayId
    request_id: RequestId
    epoch: Epoch
    reason: RejectReason
    message: str
    retry_after_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Restart:
    """Tell the gateway that the request's KV is lost: it resumes it from the transcript under the next epoch."""

    gateway_id: GatewayId
    request_id: RequestId
    epoch: Epoch
    reason: str


class Outcome(StrEnum):
    """How the core's care for a request ended."""

    FINISHED = "finished"
    CANCELLED = "cancelled"  # by its client
    REJECTED = "rejected"
    RESTARTED = "restarted"  # its KV is lost; the next epoch is another request to the core
    SUPERSEDED = "superseded"  # the gateway itself began the next epoch
    GATEWAY_LOST = "gateway_lost"


@dataclass(frozen=True, slots=True, kw_only=True)
class ForgetRequest:
    """Drop what is kept for the request: it ended. Comes exactly once for each accepted (request, epoch)."""

    gateway_id: GatewayId
    request_id: RequestId
    epoch: Epoch
    outcome: Outcome


@dataclass(frozen=True, slots=True, kw_only=True)
class SetRole:
    """Give an instance another role."""

    instance_id: InstanceId
    role: Role


@dataclass(frozen=True, slots=True, kw_only=True)
class WakeAt:
    """Send a Tick at this time, or earlier."""

    at_s: float


Command = (
    AdmitPrefill
    | RunStep
    | PlaceDecode
    | GrantTransfer
    | PauseTransfer
    | FreeKv
    | Reject
    | Restart
    | ForgetRequest
    | SetRole
    | WakeAt
)
