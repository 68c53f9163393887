"""Events of the scheduling core. Every event is a fact that has happened, in the past tense.

Events from operators and actuators are in `pdmesh.core.operator_events`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta

from pdmesh.core.operator_events import OperatorEvent
from pdmesh.core.record_line import RecordLine, ms, over
from pdmesh.model import (
    NO_TRANSFER,
    NO_USES,
    Epoch,
    FinishReason,
    GatewayId,
    InstanceId,
    InstanceProfile,
    Jumps,
    LastUses,
    NumTokens,
    OwnDecodeSteps,
    PrefixHashes,
    Request,
    RequestId,
    RequestKey,
    Resident,
    SessionKey,
    TransferId,
)
from pdmesh.plans import ChunkDone, ResidentContext
from pdmesh.ranges import ANY_COUNT, FINITE, SECONDS


@dataclass(frozen=True, slots=True)
class RequestArrived:
    """A new request, or (``epoch`` > 0) one resumed by its gateway with its transcript.

    ``silent_source_id``: the instance whose tokens did not reach the gateway, if that is why the request was resumed.
    """

    request: Request
    silent_source_id: InstanceId | None = None


@dataclass(frozen=True, slots=True)
class RequestCancelled:
    """Cancellation by a gateway, for its own request: the client left, or a stop string was found.

    ``num_output_tokens`` is the number delivered in all epochs.
    """

    gateway_id: GatewayId
    request_id: RequestId
    epoch: Epoch
    num_output_tokens: NumTokens | None = None

    @property
    def record_line(self) -> RecordLine | None:
        return RecordLine("cancelled", "by its gateway")


@dataclass(frozen=True, slots=True)
class GatewayJoined:
    """(Re)connection of a gateway. ``waiting`` are the requests that it still waits for, as (id, epoch).

    ``unbegun`` are the waiting requests that it sent to this very scheduler without any answer. If the core does not
    know such a request, either its arrival or its end was not received.
    """

    gateway_id: GatewayId
    waiting: tuple[tuple[RequestId, Epoch], ...]
    unbegun: tuple[RequestId, ...] = ()


@dataclass(frozen=True, slots=True)
class SessionEnded:
    """End of a session, as its client or an operator says: no more requests are expected."""

    session: Annotated[SessionKey, Meta(min_length=16, max_length=16)]


@dataclass(frozen=True, slots=True)
class GatewayLost:
    """Loss of a gateway, whose lease ran out: no client waits for its requests."""

    gateway_id: GatewayId


@dataclass(frozen=True, slots=True)
class InstanceJoined:
    """(Re)registration of an instance, with the KV that it holds. A ``stopping`` one takes no new work.

    ``kept`` are all cached granules, and ``offloaded`` the granules in its tier, as in `CacheReported`: already the
    first command may use them. ``jumps`` say which cached granules follow which (`pdmesh.core.instances.kept_chains`),
    and ``uses`` their last users (`last_uses` there). ``states`` are the cached granules with a state. ``dropped`` are
    requests that the instance ended while no scheduler was there; they decode on no instance.
    """

    profile: InstanceProfile
    residents: tuple[Resident, ...]
    stopping: bool = False
    kept: PrefixHashes = ()
    offloaded: PrefixHashes = ()
    dropped: tuple[RequestKey, ...] = ()
    jumps: Jumps = ()
    states: PrefixHashes = ()
    uses: LastUses = NO_USES


@dataclass(frozen=True, slots=True)
class InstanceUnreachable:
    """Break of an instance's stream. Until it joins again or is lost it gets no plans and no new requests."""

    instance_id: InstanceId


@dataclass(frozen=True, slots=True)
class InstanceSuspected:
    """Suspicion that an instance is lost: it has been silent for long, or has no stream to report on.

    With ``suspected=False`` the instance has reported again. No new work is placed on a suspected instance, and its
    requests that have not begun may start again elsewhere. Everything else continues.
    """

    instance_id: InstanceId
    suspected: bool = True


@dataclass(frozen=True, slots=True)
class InstanceLost:
    """Loss of an instance: it left or its lease ran out, and all its KV is gone."""

    instance_id: InstanceId


@dataclass(frozen=True, slots=True)
class DrainRequested:
    """Announcement of an instance that it will stop and takes no new work; ``enabled=False`` cancels that.

    The drain also ends when the instance joins again and is not ``stopping``. Requests of operators are operations.
    """

    instance_id: InstanceId
    enabled: bool = True


@dataclass(frozen=True, slots=True)
class StepDone:
    """End of a planned step on an instance. ``duration_s`` is device time.

    ``began_s`` and ``ended_s`` are on the instance's own clock, as in `OwnDecodeSteps`; 0 if nothing was computed.
    ``own_steps`` came before this step. ``num_decode_context_tokens`` sums the contexts that the decodes attended to.
    ``waited_s`` is the part of the duration spent waiting for KV of other group members. ``lent_share`` is the mean
    number of lent cores, relative to the instance's own ones.
    """

    instance_id: InstanceId
    plan_id: int
    duration_s: Annotated[float, SECONDS]
    chunks: tuple[ChunkDone, ...]
    num_decodes: Annotated[int, ANY_COUNT]
    num_decode_context_tokens: Annotated[int, ANY_COUNT] = 0
    own_steps: OwnDecodeSteps | None = None
    began_s: Annotated[float, FINITE] = 0.0
    ended_s: Annotated[float, FINITE] = 0.0
    waited_s: Annotated[float, SECONDS] = 0.0
    lent_share: Annotated[float, SECONDS] = 0.0


@dataclass(frozen=True, slots=True)
class DecodeStepsDone:
    """Report of `OWN_STEPS_PER_REPORT` own decode steps, since no other report could carry them."""

    instance_id: InstanceId
    own_steps: OwnDecodeSteps


@dataclass(frozen=True, slots=True)
class RequestReport:
    """Report of an instance about one request."""

    instance_id: InstanceId
    request_id: RequestId
    epoch: Epoch

    @property
    def record_line(self) -> RecordLine | None:
        """Line for the request's record; None: no line."""
        return None


@dataclass(frozen=True, slots=True)
class KvExpected(RequestReport):
    """Confirmation of a command that announces a request's KV: pieces may arrive.

    Without this report, a fast prefill could be granted its transfer and send before the destination knows of it. A
    helper, which got an `AdmitPrefill`, names no ``transfer_id``, and can compute chunks of the prompt.
    """

    transfer_id: TransferId = NO_TRANSFER

    @property
    def record_line(self) -> RecordLine | None:
        return RecordLine("helps", "", self.instance_id) if self.transfer_id == NO_TRANSFER else None


@dataclass(frozen=True, slots=True)
class GroupPrefix(RequestReport):
    """Length of the prompt's prefix whose KV a group's leader has in all layers, after ``num_lost`` losses in all.

    The group continues from these tokens and the living members' chunks.
    """

    num_tokens: Annotated[int, ANY_COUNT]
    num_lost: Annotated[int, ANY_COUNT]

    @property
    def record_line(self) -> RecordLine | None:
        return RecordLine("has", f"the first {self.num_tokens} tokens", self.instance_id)


@dataclass(frozen=True, slots=True)
class TransferOffered(RequestReport):
    """Offer of a source, which began computing its first chunk of a request whose KV must move.

    The offer comes once for each request, also for later transfers. The source knew the transfer ``transfer_id``.
    """

    transfer_id: TransferId

    @property
    def record_line(self) -> RecordLine | None:
        return RecordLine("offered", "", self.instance_id)


@dataclass(frozen=True, slots=True)
class TransferPaused(RequestReport):
    """Confirmation of a source that it paused a request's transfer as StopCopy asked: no piece is under way."""

    transfer_id: TransferId

    @property
    def record_line(self) -> RecordLine | None:
        return RecordLine("transfer paused", "", self.instance_id)


@dataclass(frozen=True, slots=True)
class TransferLanded(RequestReport):
    """Arrival of a request's KV at a destination, checked; the first destination has begun to decode."""

    transfer_id: TransferId
    num_bytes: Annotated[int, ANY_COUNT]
    duration_s: Annotated[float, SECONDS]

    @property
    def record_line(self) -> RecordLine | None:
        figures = {"num_bytes": float(self.num_bytes), "duration_s": self.duration_s}
        return RecordLine("landed", f"{self.num_bytes} bytes in {ms(self.duration_s)}", self.instance_id, figures)


@dataclass(frozen=True, slots=True)
class TransferSent(RequestReport):
    """Acknowledgement of everything that a source sent; the source frees its KV now.

    The request waited ``exposed_s`` for the transfer: after its prompt was computed, or, if it ``was_decoding``, after
    it had paused where it decoded. ``sent_s`` is the time in which pieces were under way; 0 if they were read in place.
    ``destination_id`` is set if there was one destination alone. ``carrier`` is as in `SentTransfer.carrier`.
    """

    transfer_id: TransferId
    num_bytes: Annotated[int, ANY_COUNT]
    duration_s: Annotated[float, SECONDS]
    exposed_s: Annotated[float, FINITE]
    sent_s: Annotated[float, SECONDS] = 0.0
    destination_id: InstanceId | None = None
    carrier: str = ""
    was_decoding: bool = False

    @property
    def record_line(self) -> RecordLine | None:
        waited = "frozen_s" if self.was_decoding else "exposed_s"
        figures = {"num_bytes": float(self.num_bytes), "duration_s": self.duration_s, waited: self.exposed_s}
        exposed_s = ms(self.exposed_s)
        exposed = f"paused for {exposed_s}" if self.was_decoding else f"{exposed_s} after the prompt was computed"
        detail = f"{self.num_bytes} bytes in {ms(self.duration_s)}, {exposed}{over(self.carrier)}"
        return RecordLine("moved away" if self.was_decoding else "sent", detail, self.instance_id, figures)


@dataclass(frozen=True, slots=True)
class TransferFailed(RequestReport):
    """Failure of a transfer at either side: a deadline, no progress, a checksum. A source keeps its KV.

    A destination frees its KV. The source of a move also reports whether it ``committed`` (None from others). If so,
    the destination may have begun to decode, and the source waits for a `Hold`. Otherwise the source decodes on.
    """

    transfer_id: TransferId
    reason: str
    committed: bool | None = None

    @property
    def record_line(self) -> RecordLine | None:
        if self.committed is None:
            return RecordLine("transfer failed", self.reason, self.instance_id)
        where = "the receiver may have begun" if self.committed else "it decodes here again"
        return RecordLine("move failed", f"{self.reason}; {where}", self.instance_id)


@dataclass(frozen=True, slots=True)
class MembersSet(RequestReport):
    """Confirmation of the decoding instance that it now asks these members for its context's first ranges.

    ``of_prompt``: the instance computes a prompt that is longer than its room.
    """

    member_ids: tuple[InstanceId, ...]
    of_prompt: bool = False


@dataclass(frozen=True, slots=True)
class RangeLost(RequestReport):
    """Loss of a context's range: its holder did not answer the decoding instance. The request pauses."""

    number: Annotated[int, ANY_COUNT]

    @property
    def record_line(self) -> RecordLine | None:
        return RecordLine("lost KV", f"range {self.number} of its context", self.instance_id)


@dataclass(frozen=True, slots=True)
class RequestDropped(RequestReport):
    """Refusal of an instance to take or continue a request: it stops, has no room, or got an impossible command.

    No transfer failed. The request is started again elsewhere.
    """

    reason: str

    @property
    def record_line(self) -> RecordLine | None:
        return RecordLine("dropped", self.reason, self.instance_id)


@dataclass(frozen=True, slots=True)
class RequestFinished(RequestReport):
    """End of a request's generation on an instance; the last token has been sent to the gateway.

    ``own_steps`` include the step that ended it. Of the tokens that the instance drafted, the accepted ones were right.
    """

    reason: FinishReason
    num_output_tokens: NumTokens
    own_steps: OwnDecodeSteps | None = None
    num_drafted_tokens: Annotated[int, ANY_COUNT] = 0
    num_accepted_tokens: Annotated[int, ANY_COUNT] = 0

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
    """Release of a request's blocks and reservation by an instance. The core frees them on this report alone.

    The report may come twice, and the released room may be promised again in between. So ``transfer_id`` names the
    transfer that was to bring the KV, if there was one. ``granules`` follow `Request.chain` and were completed by drawn
    tokens, in order. These granules stay cached until a command evicts them, like all granules of the chain that were
    computed or landed there. The first ``num_known`` of them were cached before, and a command that evicts these may
    have crossed this report. ``states`` are granules whose states the instance caches from now on, unasked.
    """

    transfer_id: TransferId = NO_TRANSFER
    granules: PrefixHashes = ()
    num_known: NumTokens = 0
    states: PrefixHashes = ()

    @property
    def record_line(self) -> RecordLine | None:
        return RecordLine("released", "", self.instance_id)


@dataclass(frozen=True, slots=True)
class KvLow:
    """Requests that decode on an instance and have little room left, or pause because they have none.

    Where contexts are spread, also requests that hold more than a whole range there.
    """

    instance_id: InstanceId
    residents: tuple[ResidentContext, ...]


@dataclass(frozen=True, slots=True)
class CacheReported:
    """Correction of the core's view of an instance's cache or offload tier.

    ``kept`` are all cached granules, the least recently used first, and replace the core's view. An instance sends them
    after it evicted or lacked a granule or a state unasked; a healthy instance never does. ``states`` are the granules
    of ``kept`` with a state.

    ``lost`` are granules that the tier no longer has, or never took: its disk is full, or failed, or they were damaged.
    A request that waits for one is dropped by a report of its own.
    """

    instance_id: InstanceId
    kept: PrefixHashes | None = None
    lost: PrefixHashes = ()
    states: PrefixHashes = ()


@dataclass(frozen=True, slots=True)
class TokenLinkReported:
    """Loss of the connection for an instance's tokens to a gateway, or (``is_up``) its return. Both are present.

    ``unconfirmed`` are requests, as (id, epoch), whose last tokens the gateway may lack.
    """

    instance_id: InstanceId
    gateway_id: GatewayId
    is_up: bool
    unconfirmed: tuple[tuple[RequestId, Epoch], ...] = ()


@dataclass(frozen=True, slots=True)
class LoadReported:
    """Block counts of an instance at a heartbeat: ``free + held + kept + quarantined = total`` blocks.

    Requests hold the held blocks, shared ones counted once. The kept blocks are cached and held by no request.
    ``num_offloaded_granules`` are in its tier.
    """

    instance_id: InstanceId
    num_free_blocks: Annotated[int, ANY_COUNT]
    num_held_blocks: Annotated[int, ANY_COUNT]
    num_quarantined_blocks: Annotated[int, ANY_COUNT]
    num_decoding: Annotated[int, ANY_COUNT]
    num_cached_blocks: Annotated[int, ANY_COUNT] = 0
    num_offloaded_granules: Annotated[int, ANY_COUNT] = 0


@dataclass(frozen=True, slots=True)
class Tick:
    """Passage of time, so that the core looks at due wake-ups (queue limits, leases of orphans)."""


#: Events of gateways about their requests, sent in this form. A prompt is sent in `pdmesh.wire.messages.Submit`.
GatewayEvent = RequestCancelled

#: Events of instances, each about itself, sent in this form (`pdmesh.wire.messages.EventMessage`).
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
    | RangeLost
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
    | SessionEnded
    | InstanceJoined
    | InstanceUnreachable
    | InstanceSuspected
    | InstanceLost
    | OperatorEvent
    | Tick
    | InstanceEvent
)
