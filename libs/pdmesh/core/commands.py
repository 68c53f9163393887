"""What the scheduling core wants done. The driver (service or simulator) carries each out, in order."""

from __future__ import annotations

from enum import StrEnum

from msgspec import Struct

from pdmesh.model import NO_TRANSFER, Epoch, GatewayId, InstanceId, RejectReason, RequestId, Role, TransferId
from pdmesh.plans import KvShard, PrefillGroup, StepPlan, TransferPlan


class AdmitPrefill(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Hold blocks on ``instance_id`` for a request whose chunks follow in later plans.

    ``shards`` say who holds what of its KV while its prompt is computed, the leader first; each is asked for its own.
    ``transfer`` moves it on; None means that it stays and decodes there, and the shards then have room for the output,
    or, where it ``awaits_receiver``, that a later grant says where it goes (or KeepKv that it stays).
    A member of ``group`` that does not lead it is asked for one shard, its own copy, and has no transfer: it computes
    chunks, and passes their KV on to the other members.
    """

    instance_id: InstanceId
    request_id: RequestId
    epoch: Epoch
    shards: tuple[KvShard, ...]
    transfer: TransferPlan | None
    group: PrefillGroup | None = None
    awaits_receiver: bool = False

    @property
    def moves_on(self) -> bool:
        """Whether its KV is to be sent from the instance."""
        return self.transfer is not None or self.awaits_receiver

    @property
    def leads(self) -> bool:
        """Whether the instance samples the first token, and the KV goes on from it."""
        leader_id = self.shards[0].instance_id if self.group is None else self.group.member_ids[0]
        return self.instance_id == leader_id

    @property
    def num_blocks(self) -> int:
        """To hold on this instance."""
        return sum([shard.num_blocks for shard in self.shards if shard.instance_id == self.instance_id])

    @property
    def decode_instance_id(self) -> InstanceId | None:
        """Where the KV goes; None if it stays, or is not known yet."""
        return None if self.transfer is None else self.transfer.destinations[0].instance_id


class SetGroup(Struct, frozen=True, kw_only=True):
    """Tell a member of a request's group who its members are now: some were added, or lost. Absolute, and idempotent.

    Where some were lost, chunks that came before this and wait for KV, now or later, end without a token; the leader
    passes on what it has of the lost ones' KV, and answers with GroupPrefix.
    """

    instance_id: InstanceId
    request_id: RequestId
    epoch: Epoch
    group: PrefillGroup


class RunStep(Struct, frozen=True, kw_only=True):
    """Queue a step plan on an instance."""

    instance_id: InstanceId
    plan: StepPlan


class PlaceDecode(Struct, frozen=True, kw_only=True):
    """Reserve blocks on a destination of ``transfer``, and expect the request's KV there.

    Of a move, the request itself comes with its KV: what it has drawn so far, and how it draws.
    """

    instance_id: InstanceId
    request_id: RequestId
    epoch: Epoch
    transfer: TransferPlan

    @property
    def num_blocks(self) -> int:
        """To reserve on this instance."""
        shards = self.transfer.destinations
        return sum([shard.num_blocks for shard in shards if shard.instance_id == self.instance_id])


class GrantTransfer(Struct, frozen=True, kw_only=True):
    """Let a source of ``transfer`` send: a transfer backend of every destination is taken.

    It may be another transfer than the source knew of: then all that is computed goes to its destinations.
    The source of a move decodes on while it sends, until little is left.
    """

    instance_id: InstanceId  # the source
    request_id: RequestId
    epoch: Epoch
    transfer: TransferPlan


class PauseTransfer(Struct, frozen=True, kw_only=True):
    """Stop sending a preempted request's KV until the next grant; answered by TransferPaused."""

    instance_id: InstanceId  # the source
    request_id: RequestId
    epoch: Epoch
    transfer_id: TransferId


class CancelMove(Struct, frozen=True, kw_only=True):
    """Stop moving a running decode away, and go on with it unless the other may have begun; answered by MoveFailed."""

    instance_id: InstanceId  # the source
    request_id: RequestId
    epoch: Epoch
    transfer_id: TransferId


class WithdrawTransfer(Struct, frozen=True, kw_only=True):
    """A receiver is lost or gave up: send no more of the request's KV, and keep it for whom a later grant names."""

    instance_id: InstanceId  # the source
    request_id: RequestId
    epoch: Epoch
    transfer_id: TransferId


class KeepKv(Struct, frozen=True, kw_only=True):
    """The request decodes where its prompt is computed after all, and holds ``num_blocks`` there."""

    instance_id: InstanceId
    request_id: RequestId
    epoch: Epoch
    num_blocks: int


class ResumeDecode(Struct, frozen=True, kw_only=True):
    """Go on decoding a request that was to move: the other instance never began, and never will."""

    instance_id: InstanceId  # the source
    request_id: RequestId
    epoch: Epoch
    transfer_id: TransferId


class GrowKv(Struct, frozen=True, kw_only=True):
    """Let a request hold ``num_blocks`` on the instance in all. Idempotent: it never takes any away."""

    instance_id: InstanceId
    request_id: RequestId
    epoch: Epoch
    num_blocks: int


class FreeKv(Struct, frozen=True, kw_only=True):
    """Stop whatever runs for the request on the instance and free its KV and reservations; answered by KvReleased.

    ``epoch`` and older. Idempotent: an instance that holds nothing answers all the same, for the ``transfer_id`` that
    was to bring it KV.
    """

    instance_id: InstanceId
    request_id: RequestId
    epoch: Epoch
    transfer_id: TransferId = NO_TRANSFER


class Reject(Struct, frozen=True, kw_only=True):
    """Tell the gateway that the request will not be served."""

    gateway_id: GatewayId
    request_id: RequestId
    epoch: Epoch
    reason: RejectReason
    message: str
    retry_after_s: float | None
    closed_s: float = 0.0  # others like it need not ask for so long: they would be refused too


class Restart(Struct, frozen=True, kw_only=True):
    """Tell the gateway that the request's KV is lost: it resumes it from the transcript under the next epoch.

    ``preempted``: it was given up for others. That is no failure, and does not count as one.
    """

    gateway_id: GatewayId
    request_id: RequestId
    epoch: Epoch
    reason: str
    preempted: bool = False


class Outcome(StrEnum):
    """How the core's care for a request ended."""

    FINISHED = "finished"
    CANCELLED = "cancelled"  # by its client
    REJECTED = "rejected"
    RESTARTED = "restarted"  # its KV is lost; the next epoch is another request to the core
    PREEMPTED = "preempted"  # the same, but its KV was given up for others
    SUPERSEDED = "superseded"  # the gateway itself began the next epoch
    GATEWAY_LOST = "gateway_lost"


class ForgetRequest(Struct, frozen=True, kw_only=True):
    """Drop what is kept for the request: it ended. Comes exactly once for each accepted (request, epoch)."""

    gateway_id: GatewayId
    request_id: RequestId
    epoch: Epoch
    outcome: Outcome


class SetRole(Struct, frozen=True, kw_only=True):
    """Give an instance another role."""

    instance_id: InstanceId
    role: Role


class StopInstance(Struct, frozen=True, kw_only=True):
    """End an instance's process as SIGTERM does; whoever looks after it starts it again."""

    instance_id: InstanceId


class WakeAt(Struct, frozen=True, kw_only=True):
    """Send a Tick at this time, or earlier."""

    at_s: float


#: For a gateway. They travel as they are, a ForgetRequest of what finished alone.
GatewayCommand = Reject | Restart | ForgetRequest

#: For an instance; those that need nothing more than they say travel as they are (`pdmesh.wire.messages`).
PlainInstanceCommand = (
    RunStep
    | PauseTransfer
    | WithdrawTransfer
    | KeepKv
    | CancelMove
    | ResumeDecode
    | GrowKv
    | FreeKv
    | SetRole
    | StopInstance
)
InstanceCommand = AdmitPrefill | SetGroup | PlaceDecode | GrantTransfer | PlainInstanceCommand

Command = InstanceCommand | GatewayCommand | WakeAt
