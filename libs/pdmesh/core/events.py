"""What the scheduling core is told. Every event is a fact that has happened, in the past tense.

What operators ask for, and what starts and stops processes for them, is in `pdmesh.core.operator_events`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from pdmesh.core.operator_events import OperatorEvent
from pdmesh.core.record_line import RecordLine, ms, over
from pdmesh.model import (
    NO_TRANSFER,
    Epoch,
    FinishReason,
    GatewayId,
    InstanceId,
    InstanceProfile,
    NumTokens,
    OwnDecodeSteps,
    PrefixHashes,
    Request,
    RequestId,
    RequestKey,
    Resident,
    TransferId,
)
from pdmesh.plans import ChunkDone, ResidentContext
from pdmesh.ranges import ANY_COUNT, FINITE, SECONDS


@dataclass(frozen=True, slots=True)
class RequestArrived:
    """A new request, or (``epoch`` > 0) one resumed by its gateway with its transcript.

    ``unheard_id``: the instance whose tokens stopped coming, if that is why.
    """

    request: Request
    unheard_id: InstanceId | None = None


@dataclass(frozen=True, slots=True)
class RequestCancelled:
    """The client went away, or the gateway has all it wants (a stop string). It touches no other gateway's requests."""

    gateway_id: GatewayId
    request_id: RequestId
    epoch: Epoch
    num_output_tokens: NumTokens | None = None  # delivered, in all epochs

    @property
    def record_line(self) -> RecordLine | None:
        return RecordLine("cancelled", "by its gateway")


@dataclass(frozen=True, slots=True)
class GatewayJoined:
    """A gateway (re)connected. ``waiting`` are the requests it still waits for, as (id, epoch).

    ``unbegun`` are those of them that it sent to this very scheduler and has not heard of since: one that is not known
    never came, or its end was not heard.
    """

    gateway_id: GatewayId
    waiting: tuple[tuple[RequestId, Epoch], ...]
    unbegun: tuple[RequestId, ...] = ()


@dataclass(frozen=True, slots=True)
class GatewayLost:
    """A gateway's lease ran out: no client waits for its requests."""

    gateway_id: GatewayId


@dataclass(frozen=True, slots=True)
class InstanceJoined:
    """An instance (re)registered, with the KV it holds. One that is ``stopping`` takes no new work.

    ``kept`` are all granules that it keeps, and ``offloaded`` those in its tier, as in `CacheReported`: the first thing
    that it is told may use them. ``dropped`` are requests that it gave up because a scheduler was gone, and that decode
    nowhere.
    """

    profile: InstanceProfile
    residents: tuple[Resident, ...]
    stopping: bool = False
    kept: PrefixHashes = ()
    offloaded: PrefixHashes = ()
    dropped: tuple[RequestKey, ...] = ()


@dataclass(frozen=True, slots=True)
class InstanceUnreachable:
    """An instance's stream broke. Until it joins again or is lost it gets no plans and no new requests."""

    instance_id: InstanceId


@dataclass(frozen=True, slots=True)
class InstanceSuspected:
    """An instance has been silent for longer than one that lives, or has no stream to speak on.

    Or (``suspected=False``) it has spoken again.

    Meanwhile nothing new is placed on it, and what it has not begun may start again elsewhere. All else goes on.
    """

    instance_id: InstanceId
    suspected: bool = True


@dataclass(frozen=True, slots=True)
class InstanceLost:
    """An instance said goodbye or its lease ran out; all it held is gone."""

    instance_id: InstanceId


@dataclass(frozen=True, slots=True)
class DrainRequested:
    """An instance is about to stop and takes no new work; ``enabled=False`` cancels that.

    It is over when it joins again and is not ``stopping``. What operators ask for are operations.
    """

    instance_id: InstanceId
    enabled: bool = True


@dataclass(frozen=True, slots=True)
class StepDone:
    """An instance finished a planned step. ``duration_s`` is device time.

    ``began_s`` and ``ended_s`` are on the instance's own clock, as in `OwnDecodeSteps`; 0 where nothing was computed.
    """

    instance_id: InstanceId
    plan_id: int
    duration_s: Annotated[float, SECONDS]
    chunks: tuple[ChunkDone, ...]
    num_decodes: Annotated[int, ANY_COUNT]
    num_decode_context_tokens: Annotated[int, ANY_COUNT] = 0  # that the decodes attended to, summed over them
    own_steps: OwnDecodeSteps | None = None  # before this step
    began_s: Annotated[float, FINITE] = 0.0
    ended_s: Annotated[float, FINITE] = 0.0
    waited_s: Annotated[float, SECONDS] = 0.0  # of that time, for KV of other members of a group
    lent_share: Annotated[float, SECONDS] = 0.0  # mean number of lent cores, relative to the instance's own ones


@dataclass(frozen=True, slots=True)
class DecodeStepsDone:
    """An instance ran `OWN_STEPS_PER_REPORT` own decode steps without another report that could carry them."""

    instance_id: InstanceId
    own_steps: OwnDecodeSteps


@dataclass(frozen=True, slots=True)
class RequestReport:
    """An instance's report about a request that the core knows."""

    instance_id: InstanceId
    request_id: RequestId
    epoch: Epoch

    @property
    def record_line(self) -> RecordLine | None:
        """What the request's record says of it; None: nothing."""
        return None


@dataclass(frozen=True, slots=True)
class KvExpected(RequestReport):
    """An instance took the command that announces a request's KV: pieces may arrive.

    Without this report, a fast prefill could be granted its transfer and send before the destination has heard of it.
    A helper, which took an `AdmitPrefill`, names no ``transfer_id``. It can compute chunks of the prompt, too.
    """

    transfer_id: TransferId = NO_TRANSFER

    @property
    def record_line(self) -> RecordLine | None:
        return RecordLine("helps", "", self.instance_id) if self.transfer_id == NO_TRANSFER else None


@dataclass(frozen=True, slots=True)
class GroupPrefix(RequestReport):
    """What the leader of a group has when it hears that ``num_lost`` members were lost in all: what it goes on from."""

    num_tokens: Annotated[int, ANY_COUNT]  # of the prompt, from its first on, whose KV is here in all layers
    num_lost: Annotated[int, ANY_COUNT]

    @property
    def record_line(self) -> RecordLine | None:
        return RecordLine("has", f"the first {self.num_tokens} tokens", self.instance_id)


@dataclass(frozen=True, slots=True)
class TransferOffered(RequestReport):
    """A source began computing the first chunk that it has of a request whose KV must move.

    Once for each request: what it offers is offered to later transfers, too. ``transfer_id`` is the one it knew of,
    `NO_TRANSFER` if there was none.
    """

    transfer_id: TransferId

    @property
    def record_line(self) -> RecordLine | None:
        return RecordLine("offered", "", self.instance_id)


@dataclass(frozen=True, slots=True)
class TransferPaused(RequestReport):
    """A source has stopped sending a request's KV, as StopCopy asked: no piece of it is under way."""

    transfer_id: TransferId

    @property
    def record_line(self) -> RecordLine | None:
        return RecordLine("transfer paused", "", self.instance_id)


@dataclass(frozen=True, slots=True)
class TransferLanded(RequestReport):
    """A destination holds its part of a request's KV, checked; the first destination has begun to decode."""

    transfer_id: TransferId
    num_bytes: Annotated[int, ANY_COUNT]
    duration_s: Annotated[float, SECONDS]

    @property
    def record_line(self) -> RecordLine | None:
        figures = {"num_bytes": float(self.num_bytes), "duration_s": self.duration_s}
        return RecordLine("landed", f"{self.num_bytes} bytes in {ms(self.duration_s)}", self.instance_id, figures)


@dataclass(frozen=True, slots=True)
class TransferSent(RequestReport):
    """All that a source sent was acknowledged; it frees its KV now.

    The request waited ``exposed_s`` for the transfer: after its prompt was computed, or, if it ``was_decoding``, after
    it had paused where it decoded.
    """

    transfer_id: TransferId
    num_bytes: Annotated[int, ANY_COUNT]
    duration_s: Annotated[float, SECONDS]
    exposed_s: Annotated[float, FINITE]
    sent_s: Annotated[float, SECONDS] = 0.0  # while pieces of it were under way; 0: they were read where they lay
    destination_id: InstanceId | None = None  # if it went to one alone
    carrier: str = ""  # see `SentTransfer.carrier`
    was_decoding: bool = False

    @property
    def record_line(self) -> RecordLine | None:
        waited = "frozen_s" if self.was_decoding else "exposed_s"
        figures = {"num_bytes": float(self.num_bytes), "duration_s": self.duration_s, waited: self.exposed_s}
        exposed = f"{ms(self.exposed_s)} after the prompt was computed"
        if self.was_decoding:
            exposed = f"stood still for {ms(self.exposed_s)}"
        detail = f"{self.num_bytes} bytes in {ms(self.duration_s)}, {exposed}{over(self.carrier)}"
        return RecordLine("moved away" if self.was_decoding else "sent", detail, self.instance_id, figures)


@dataclass(frozen=True, slots=True)
class TransferFailed(RequestReport):
    """A transfer that either side ended: a deadline, no progress, a checksum. A source keeps its KV.

    A destination does not. The source of a move also tells whether it ``committed``. If so, the destination may have
    begun to decode, and the source waits for a `Hold`. Otherwise the source decodes on by itself.
    """

    transfer_id: TransferId
    reason: str
    committed: bool | None = None  # only the source of a move sets it

    @property
    def record_line(self) -> RecordLine | None:
        if self.committed is None:
            return RecordLine("transfer failed", self.reason, self.instance_id)
        where = "its target may have begun" if self.committed else "it goes on here"
        return RecordLine("move failed", f"{self.reason}; {where}", self.instance_id)


@dataclass(frozen=True, slots=True)
class MembersSet(RequestReport):
    """Where a context decodes, these others are asked for its first ranges from now on, and none before them."""

    member_ids: tuple[InstanceId, ...]
    of_prompt: bool = False  # where a prompt is computed that is longer than the room there


@dataclass(frozen=True, slots=True)
class PartLost(RequestReport):
    """Where a context decodes, the member with this range of it gave no answer. The request stands still."""

    number: Annotated[int, ANY_COUNT]

    @property
    def record_line(self) -> RecordLine | None:
        return RecordLine("lost KV", f"range {self.number} of its context", self.instance_id)


@dataclass(frozen=True, slots=True)
class RequestDropped(RequestReport):
    """An instance does not take a request, or gives it up: it stops, has no room, or was told what cannot be.

    No transfer failed. The request is started again elsewhere.
    """

    reason: str

    @property
    def record_line(self) -> RecordLine | None:
        return RecordLine("dropped", self.reason, self.instance_id)


@dataclass(frozen=True, slots=True)
class RequestFinished(RequestReport):
    """The instance that held the generation ended it; the last token has been sent to the gateway."""

    reason: FinishReason
    num_output_tokens: NumTokens
    own_steps: OwnDecodeSteps | None = None  # up to the one that ended it
    num_drafted_tokens: Annotated[int, ANY_COUNT] = 0  # by that instance: guesses of what comes next
    num_accepted_tokens: Annotated[int, ANY_COUNT] = 0  # of these, which were right

    @property
    def record_line(self) -> RecordLine | None:
        figures = {"num_output_tokens": float(self.num_output_tokens)}
        detail = f"{self.reason}, {self.num_output_tokens} output tokens"
        if self.num_drafted_tokens:
            detail += f"; {self.num_accepted_tokens} of {self.num_drafted_tokens} drafted tokens accepted"
            figures |= {
                "num_drafted_tokens": float(self.num_drafted_tokens),
                "num_accepted_tokens": float(self.num_accepted_tokens),
            }
        return RecordLine("finished", detail, self.instance_id, figures)


@dataclass(frozen=True, slots=True)
class KvReleased(RequestReport):
    """An instance gave back the blocks (and the reservation) of a request. The core's state follows this alone.

    It may be told twice, and what was given back be promised anew in between: so it says which ``transfer_id`` that was
    for, where one was to bring the KV. ``granules`` are those behind `Request.chain` that drawn tokens completed, in
    order: they stay, as all of the chain do that were computed or landed there, until a command says to drop them. The
    first ``num_known`` of them were kept before, and a command that drops these may have crossed this on its way.
    """

    transfer_id: TransferId = NO_TRANSFER
    granules: PrefixHashes = ()
    num_known: NumTokens = 0

    @property
    def record_line(self) -> RecordLine | None:
        return RecordLine("released", "", self.instance_id)


@dataclass(frozen=True, slots=True)
class KvLow:
    """Requests that decode on an instance have room for few tokens more, or for none and wait.

    Or they hold more than a whole range there, where contexts are spread.
    """

    instance_id: InstanceId
    residents: tuple[ResidentContext, ...]


@dataclass(frozen=True, slots=True)
class CacheReported:
    """An instance's cache, or its offload tier, has other granules than the core thinks.

    ``kept`` are all cached granules, the least recently used first, and replace what the core knows. It comes when the
    instance evicted or lacked a granule unasked; in health it never does.

    ``lost`` are granules that the tier has no more, or never took: its disk is full, or failed, or they were damaged.
    A request that waits for one is dropped by a report of its own.
    """

    instance_id: InstanceId
    kept: PrefixHashes | None = None
    lost: PrefixHashes = ()


@dataclass(frozen=True, slots=True)
class TokenLinkReported:
    """An instance's tokens do not reach a gateway, though both are there; or (``is_up``) they do again.

    ``unconfirmed`` are requests, as (id, epoch), of which the gateway may lack what was sent last.
    """

    instance_id: InstanceId
    gateway_id: GatewayId
    is_up: bool
    unconfirmed: tuple[tuple[RequestId, Epoch], ...] = ()


@dataclass(frozen=True, slots=True)
class LoadReported:
    """An instance's counts of blocks at a heartbeat: ``free + held + kept + quarantined = total`` blocks.

    Held is what requests have, shared blocks counted once, and kept what is there for others alone.
    """

    instance_id: InstanceId
    num_free_blocks: Annotated[int, ANY_COUNT]
    num_held_blocks: Annotated[int, ANY_COUNT]
    num_quarantined_blocks: Annotated[int, ANY_COUNT]
    num_decoding: Annotated[int, ANY_COUNT]
    num_kept_blocks: Annotated[int, ANY_COUNT] = 0
    num_offloaded_granules: Annotated[int, ANY_COUNT] = 0  # in its tier


@dataclass(frozen=True, slots=True)
class Tick:
    """Time passed; due wake-ups (queue limits, leases of orphans) are looked at."""


#: What gateways say of their requests. It travels as it is; what comes with a prompt is `pdmesh.wire.messages.Submit`.
GatewayEvent = RequestCancelled

#: What instances say, each of itself. It travels as it is (`pdmesh.wire.messages.EventMessage`).
InstanceEvent = (
    DrainRequested
    | StepDone
    | DecodeStepsDone
    | GroupPrefix
    | KvExpected
    | TransferOffered
    | TransferPaused
    | TransferLanded
    | TransferSent
    | TransferFailed
    | MembersSet
    | PartLost
    | RequestDropped
    | RequestFinished
    | KvReleased
    | KvLow
    | CacheReported
    | TokenLinkReported
    | LoadReported
)

Event = (
    RequestArrived
    | GatewayEvent
    | GatewayJoined
    | GatewayLost
    | InstanceJoined
    | InstanceUnreachable
    | InstanceSuspected
    | InstanceLost
    | OperatorEvent
    | Tick
    | InstanceEvent
)
