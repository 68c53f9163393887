"""Commands of the scheduling core. The driver (service or simulator) carries each out, in order.

The base class of a command gives its addressee. `record_line` is its line in the request's record.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from msgspec import Struct

from pdmesh.core.record_line import RecordLine
from pdmesh.kv_layout import GRANULE_TOKENS
from pdmesh.model import (
    NO_TRANSFER,
    Epoch,
    GatewayId,
    InstanceId,
    PartMember,
    PrefixHashes,
    RejectReason,
    RequestId,
    Role,
    TransferId,
)
from pdmesh.operations import ManagedProcess, PoolMember
from pdmesh.plans import NO_EVICTIONS, Evictions, KvShard, PrefillGroup, StepPlan, TransferPlan


def _reused(num_granules: int, num_loaded_granules: int = 0) -> str:
    """Return the end of a record's line: how many tokens are reused, and how many of them are from the tier.

    Empty if none are reused.
    """
    if not num_granules:
        return ""
    loaded = f" ({num_loaded_granules * GRANULE_TOKENS} from the offload tier)" if num_loaded_granules else ""
    return f", of which {num_granules * GRANULE_TOKENS} tokens are reused{loaded}"


class ToInstance(Struct, frozen=True, kw_only=True):
    """A command for an instance."""

    instance_id: InstanceId


class ToInstanceOfRequest(ToInstance, frozen=True, kw_only=True):
    """A command for an instance that belongs to one request's life."""

    request_id: RequestId
    epoch: Epoch

    @property
    def record_line(self) -> RecordLine | None:
        """Line for the request's record; None: no line."""
        return None


class ToGateway(Struct, frozen=True, kw_only=True):
    """A command for a gateway about one of its requests."""

    gateway_id: GatewayId
    request_id: RequestId
    epoch: Epoch

    @property
    def record_line(self) -> RecordLine | None:
        """Line for the request's record; None: no line."""
        return None


class AdmitPrefill(ToInstanceOfRequest, frozen=True, kw_only=True, omit_defaults=True):
    """Hold blocks on ``instance_id`` for a request whose chunks follow in later plans.

    Each instance that computes the prompt gets the command with its own ``shards``; the first shard is the leader's.
    ``transfer`` moves the KV on. Without a transfer the request stays and decodes there, with room for its output. If
    it ``awaits_receiver``, a later grant names the receiver, or `Hold` lets it stay. A member of ``group`` that does
    not lead has one shard, its own copy, and no transfer. The member computes chunks and sends their KV to the other
    members, and caches that KV only if it ``keeps_prefix``.

    The first ``num_reused_granules`` of the request's chain are cached there. The request shares their blocks, which
    count in its shard, and its chunks begin behind them. The last ``num_loaded_granules`` of these come from the
    offload tier, into blocks of their own.

    Where the model has states, the instance caches the states behind the granules with the numbers ``states``, from 1
    on, once their granules are computed.

    A prompt that is longer than the instance's room gets ``num_blocks_at_once`` blocks (0: the whole shard). The first
    ranges are freed (`SetPlaces`) once the transfer's destinations have them. Later chunks then ask the destinations
    for their part of attention.
    """

    shards: tuple[KvShard, ...]
    transfer: TransferPlan | None
    group: PrefillGroup | None = None
    awaits_receiver: bool = False
    num_reused_granules: int = 0
    num_loaded_granules: int = 0
    room: Evictions = NO_EVICTIONS
    keeps_prefix: bool = False
    num_blocks_at_once: int = 0
    states: tuple[int, ...] = ()

    @property
    def moves_on(self) -> bool:
        """Whether the instance sends the KV on after the prompt."""
        return self.transfer is not None or self.awaits_receiver

    @property
    def leads(self) -> bool:
        """Whether the instance samples the first token and sends the KV on."""
        leader_id = self.shards[0].instance_id if self.group is None else self.group.member_ids[0]
        return self.instance_id == leader_id

    @property
    def num_blocks(self) -> int:
        """Number of blocks to hold on this instance."""
        num_blocks = sum([shard.num_blocks for shard in self.shards if shard.instance_id == self.instance_id])
        return self.num_blocks_at_once or num_blocks

    @property
    def decode_instance_id(self) -> InstanceId | None:
        """The instance that receives the KV; None if it stays, or the receiver is not known yet."""
        return None if self.transfer is None else self.transfer.destinations[0].instance_id

    @property
    def record_line(self) -> RecordLine | None:
        blocks = f"{self.num_blocks} blocks{_reused(self.num_reused_granules, self.num_loaded_granules)}"
        if self.group is not None and not self.leads:
            return RecordLine("asked to help", f"{blocks}, led by {self.group.member_ids[0]}", self.instance_id)
        if self.awaits_receiver:
            return RecordLine("placed for prefill", f"{blocks}, ahead of room to decode", self.instance_id)
        if self.decode_instance_id is None:
            return RecordLine("placed", f"{blocks}, prefill and decode", self.instance_id)
        return RecordLine("placed for prefill", blocks, self.instance_id)


class RunStep(ToInstance, frozen=True, kw_only=True):
    """Queue a step plan on an instance."""

    plan: StepPlan


class ExpectCopy(ToInstanceOfRequest, frozen=True, kw_only=True, omit_defaults=True):
    """Reserve blocks on a destination of ``transfer``, and expect KV there, except for reused granules.

    * A hand-over brings the KV of a prompt.
    * A move brings the request with its KV. ``chain`` is the request's own (`pdmesh.model.Request.chain`), and
      ``members`` hold the first ranges of its context.
    * A range belongs to a context that decodes on ``home_id``, by default on the first destination. For a lost range
      only tokens come: the instance computes the KV from them and from the ``members``, which hold earlier ranges.
    * Cached granules (`Then.KEEP`) belong to no request. ``chain`` ends with them, and the request ``wanted_by`` will
      reuse them. The instance holds blocks for the whole chain until they have landed. The last ``num_loaded_granules``
      come from the instance's own offload tier, so that no source sends.
    """

    transfer: TransferPlan
    chain: PrefixHashes = ()
    home_id: InstanceId | None = None
    members: tuple[PartMember, ...] = ()
    wanted_by: tuple[RequestId, Epoch] | None = None
    num_loaded_granules: int = 0
    room: Evictions = NO_EVICTIONS

    @property
    def num_reused_granules(self) -> int:
        """Number of granules that no other instance sends."""
        return self.transfer.num_reused_granules + self.num_loaded_granules

    @property
    def receives_prompt(self) -> bool:
        """Whether the request will decode on this instance once its prompt's KV has landed.

        Other destinations of a hand-over hold ranges of a context.
        """
        return self.transfer.is_hand_over and self.transfer.destinations[0].instance_id == self.instance_id

    @property
    def num_blocks(self) -> int:
        """Number of blocks to reserve on this instance."""
        shards = self.transfer.destinations
        return sum([shard.num_blocks for shard in shards if shard.instance_id == self.instance_id])

    @property
    def record_line(self) -> RecordLine | None:
        if self.transfer.is_move:
            what = "moves here"
        elif self.transfer.is_of_range:
            what = "computes a lost range" if self.transfer.computes else "receives a range"
        else:
            what = "placed for decode" if self.receives_prompt else "holds a range"
        reused = _reused(self.transfer.num_reused_granules)
        return RecordLine(what, f"{self.num_blocks} blocks{reused}", self.instance_id)


class SendCopy(ToInstanceOfRequest, frozen=True, kw_only=True, omit_defaults=True):
    """Let a source of ``transfer`` send: the transfer has a backend of every destination.

    The transfer may be another one than the source knew of: then all computed KV goes to its destinations. The source
    of a move decodes on while it sends, until little is left. Cached granules are sent from ``chain``, whose granules
    are all cached here, except for those cached at the destination.
    """

    transfer: TransferPlan
    chain: PrefixHashes = ()

    @property
    def record_line(self) -> RecordLine | None:
        return RecordLine("granted", f"to {', '.join(self.transfer.destination_ids)}", self.instance_id)


class Stop(StrEnum):
    """How a source stops a transfer.

    * ``PAUSE``: wait for the next grant, because the request was preempted. Answered by TransferPaused.
    * ``WITHDRAW``: keep the KV for a receiver that a later grant names, because this one is lost or refused.
    * ``CANCEL``: continue to decode here, unless the receiver of the move may have begun. Answered by TransferFailed.
    """

    PAUSE = "pause"
    WITHDRAW = "withdraw"
    CANCEL = "cancel"


class StopCopy(ToInstanceOfRequest, frozen=True, kw_only=True):
    """Send no more of a request's KV by a transfer."""

    transfer_id: TransferId
    how: Stop

    @property
    def record_line(self) -> RecordLine | None:
        if self.how is Stop.WITHDRAW:
            return RecordLine("receiver lost", "its KV waits for another receiver", self.instance_id)
        return None


class Hold(ToInstanceOfRequest, frozen=True, kw_only=True, omit_defaults=True):
    """Let a request hold ``num_blocks`` on the instance in all. Idempotent: no block is taken away.

    Other instances hold ``num_elsewhere_blocks`` of its context. Each block that they hold beyond these makes
    ``num_blocks`` one smaller. With ``decodes``, the request decodes here from now on. The KV no longer leaves after
    the prompt, or by the move ``move_id``, whose receiver never began. Otherwise only the room grows. A command of this
    kind comes every few tokens, and is not in the request's record.
    """

    num_blocks: int
    num_elsewhere_blocks: int = 0
    decodes: bool = False
    move_id: TransferId = NO_TRANSFER
    room: Evictions = NO_EVICTIONS

    @property
    def ends_move(self) -> bool:
        """Whether the request decodes on because its move is over."""
        return self.move_id != NO_TRANSFER

    @property
    def record_line(self) -> RecordLine | None:
        if self.ends_move:
            return RecordLine("decodes on", "its move was cancelled", self.instance_id)
        return RecordLine("stays to decode", f"{self.num_blocks} blocks", self.instance_id) if self.decodes else None


#: Instances that have KV of a request, or ask for it (`SetPlaces`).
Places = PrefillGroup | tuple[PartMember, ...] | InstanceId


class SetPlaces(ToInstanceOfRequest, frozen=True, kw_only=True):
    """Name the other instances that have KV of a request, or ask for it. Absolute, and idempotent.

    ``places`` are one of three:

    * The group that computes the prompt, for its members, after some were added or lost. If some were lost, earlier
      chunks that wait for KV end without a token. The leader passes on the lost members' KV that it has, and answers
      with GroupPrefix.
    * The holders of the context's first ranges, one each, in their order, for the instance where it decodes. Between
      two steps it frees its own blocks of these ranges, and answers with MembersSet. For a prompt longer than the
      computing instance's room, the freed blocks are for the tokens that follow.
    * The instance where the context may soon decode, for the holder of a range: it answers questions from there, too.
    """

    places: Places

    @property
    def record_line(self) -> RecordLine | None:
        match self.places:
            case PrefillGroup(lost_ids=lost_ids, member_ids=member_ids):
                if lost_ids and self.instance_id == member_ids[0]:
                    return RecordLine("continues without", f"{lost_ids[-1]}, which helped", self.instance_id)
                return None
            case str():
                return None
            case members:
                holders = ", ".join([member.instance_id for member in members])
                return RecordLine("spread", f"its first ranges are on {holders}", self.instance_id)


class FreeKv(ToInstanceOfRequest, frozen=True, kw_only=True):
    """Stop all work for the request on the instance and free its KV and reservations; answered by KvReleased.

    Applies to ``epoch`` and older. Idempotent: an instance that holds nothing also answers, with the ``transfer_id``
    that was to bring it KV.
    """

    transfer_id: TransferId = NO_TRANSFER

    @property
    def record_line(self) -> RecordLine | None:
        return RecordLine("freed", "", self.instance_id)


class Reject(ToGateway, frozen=True, kw_only=True):
    """Tell the gateway that the request will not be served.

    Similar requests would be refused too for ``reject_ttl_s``, and need not ask the core.
    """

    reason: RejectReason
    message: str
    retry_after_s: float | None
    reject_ttl_s: float = 0.0

    @property
    def record_line(self) -> RecordLine | None:
        return RecordLine(f"rejected: {self.reason}", self.message)


#: Share of the blame on a request for its own restart where something else may have caused it (`Restart.blame`).
SHARED_BLAME = 0.5


class Restart(ToGateway, frozen=True, kw_only=True):
    """Tell the gateway that the request's KV is lost: resume it from the transcript under the next epoch.

    ``retracted``: its KV was evicted for other requests, and nothing has failed. ``blame`` ranges from 0 (the request
    cannot have caused the loss) to 1 (no other cause is known).
    """

    reason: str
    retracted: bool = False
    blame: float = 0.0

    @property
    def record_line(self) -> RecordLine | None:
        return RecordLine("retracted" if self.retracted else "restarted", self.reason)


class Outcome(StrEnum):
    """How the core's care for a request ended.

    - ``CANCELLED``: by its client.
    - ``RESTARTED``: its KV is lost; the next epoch is another request to the core.
    - ``RETRACTED``: restarted because its KV was evicted for other requests.
    - ``SUPERSEDED``: the gateway itself began the next epoch.
    """

    FINISHED = "finished"
    CANCELLED = "cancelled"
    REJECTED = "rejected"
    RESTARTED = "restarted"
    RETRACTED = "retracted"
    SUPERSEDED = "superseded"
    GATEWAY_LOST = "gateway_lost"

    @property
    def goes_on(self) -> bool:
        """Whether the next epoch follows."""
        return self in (Outcome.RESTARTED, Outcome.RETRACTED, Outcome.SUPERSEDED)


class ForgetRequest(ToGateway, frozen=True, kw_only=True):
    """Forget the request, which ended. Comes exactly once for each accepted (request, epoch).

    ``drawn_by``: the instance where it decoded last, if it has.
    """

    outcome: Outcome
    drawn_by: InstanceId | None = None

    @property
    def record_line(self) -> RecordLine | None:
        return None if self.outcome.goes_on else RecordLine("ended", self.outcome)


class SetRole(ToInstance, frozen=True, kw_only=True):
    """Change an instance's role."""

    role: Role


class StopInstance(ToInstance, frozen=True, kw_only=True):
    """End an instance's process as SIGTERM does; its supervisor starts it again."""


class WakeAt(Struct, frozen=True, kw_only=True):
    """Send a Tick at this time, or earlier."""

    at_s: float


#: Commands for a gateway. Of these, a finished request causes a ForgetRequest alone.
GatewayCommand = Reject | Restart | ForgetRequest

#: Commands for an instance about one of its requests.
InstanceRequestCommand = AdmitPrefill | ExpectCopy | SendCopy | StopCopy | Hold | SetPlaces | FreeKv
InstanceCommand = InstanceRequestCommand | RunStep | SetRole | StopInstance

Command = InstanceCommand | GatewayCommand | WakeAt


@dataclass(frozen=True, slots=True, kw_only=True)
class DesiredProcesses:
    """Processes that an actuator should start and stop, unless that is done already.

    The processes in `replace` are replaced by new ones, without a gap where possible. Instances in `stop` and `replace`
    hold nothing, or are gone. The `temporary` instances leave when the rolling restart that started them ends.
    """

    start: tuple[PoolMember, ...] = ()
    stop: tuple[InstanceId, ...] = ()
    replace: tuple[ManagedProcess, ...] = ()
    temporary: tuple[InstanceId, ...] = ()
