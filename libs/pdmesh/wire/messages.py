"""The frames between our services: msgspec tagged structs, msgpack-encoded.

A gRPC message is one *frame*: a msgpack array of messages of one union. Fields are added with defaults and never
retyped, so that a newer peer can talk to an older one. Values of ``pdmesh.model`` are embedded.

Streams (all long-lived and bidirectional, generic gRPC handlers):

=============================  =====================  =======================
method                         client sends           server sends
=============================  =====================  =======================
``/pdmesh.v1.Scheduler/Worker``   `WorkerUp`             `WorkerDown`
``/pdmesh.v1.Scheduler/Gateway``  `GatewayUp`            `GatewayDown`
``/pdmesh.v1.Gateway/Tokens``     `TokensUp`             `TokensDown`
=============================  =====================  =======================

``/pdmesh.v1.Scheduler/Admin`` is unary: `AdminRequest` to `AdminResponse`. Where a mesh token is configured, every call
carries it as metadata (`pdmesh.wire.endpoint`).
"""

from __future__ import annotations

import array
import dataclasses
import sys
from collections.abc import Iterator, Mapping
from typing import Annotated, TypeVar, get_args

import msgspec

from pdmesh.core.commands import AdmitPrefill, GatewayCommand, GrantTransfer, PlaceDecode, PlainInstanceCommand
from pdmesh.core.events import GatewayEvent, InstanceEvent, OperationRequested
from pdmesh.errors import ProtocolError
from pdmesh.model import (
    Epoch,
    FinishReason,
    GatewayId,
    InstanceId,
    InstanceProfile,
    OperationId,
    OperationKind,
    RequestId,
    Resident,
    Role,
    SamplingParams,
)
from pdmesh.ranges import out_of_range

#: Bumped when a peer of the last version could misread us. Checked at registration.
PROTOCOL_VERSION = 6


class Message(msgspec.Struct, frozen=True, kw_only=True, tag=True, omit_defaults=True):
    """Base of all messages; the tag is the class name."""


def pack_token_ids(token_ids: list[int] | array.array[int]) -> bytes:
    """Token ids as little-endian int32, four bytes a token: 1M tokens decode without a million objects."""
    packed = array.array("i", token_ids)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def unpack_token_ids(packed: bytes) -> array.array[int]:
    """Inverse of `pack_token_ids`. Raises ValueError if ``packed`` is not whole tokens."""
    token_ids = array.array("i")
    token_ids.frombytes(packed)
    if sys.byteorder == "big":
        token_ids.byteswap()
    return token_ids


# --- a request's payload -----------------------------------------------------------------------------------------


class Generation(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """All that a worker needs to run a request; the scheduler passes it on without looking inside the tokens.

    ``token_ids`` is the transcript: the client's prompt and, for a resumed request, the output tokens delivered
    before. ``params.max_tokens`` and ``min_tokens`` count from the client's prompt, not from here.
    """

    request_id: RequestId  # the gateway's own: never a client's, never used again, not to be guessed
    epoch: Epoch
    gateway_id: GatewayId
    token_address: str  # host:port of the gateway's Tokens stream
    token_ids: bytes  # see `pack_token_ids`
    num_prompt_tokens: int  # of them, the client's own; the rest are output tokens delivered before
    params: SamplingParams
    traceparent: str | None = None  # W3C trace context
    label: str = ""  # what its client calls it, for people to find it by; several requests may have the same

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids) // 4

    @property
    def num_output_tokens(self) -> int:
        """Output tokens delivered before this epoch; the next one has this index."""
        return self.num_tokens - self.num_prompt_tokens

    @property
    def max_tokens_left(self) -> int:
        return self.params.max_tokens - self.num_output_tokens


# --- worker <-> scheduler ----------------------------------------------------------------------------------------


class RegisterWorker(Message, frozen=True, kw_only=True):
    """First message of a worker's stream, also after a reconnect."""

    profile: InstanceProfile
    residents: tuple[Resident, ...]
    stopping: bool = False  # it takes no new work
    version: int = PROTOCOL_VERSION


class EventMessage(Message, frozen=True, kw_only=True):
    """An event for the scheduling core as whoever raises it says it: its name and its fields.

    The event log has events in the same form. A new event needs no message of its own.
    """

    name: str
    fields: msgspec.Raw

    @classmethod
    def of(cls, event: InstanceEvent | GatewayEvent) -> EventMessage:
        return cls(name=type(event).__name__, fields=msgspec.Raw(msgspec.msgpack.encode(event)))

    @property
    def event(self) -> InstanceEvent:
        """What an instance says. Raises ProtocolError if it is nothing that an instance may."""
        return _decoded(_INSTANCE_EVENTS, self.name, self.fields)

    @property
    def gateway_event(self) -> GatewayEvent:
        """What a gateway says. Raises ProtocolError if it is nothing that a gateway may."""
        return _decoded(_GATEWAY_EVENTS, self.name, self.fields)


class CommandMessage(Message, frozen=True, kw_only=True):
    """A command of the scheduling core that needs nothing more than it says, in the form of `EventMessage`."""

    name: str
    fields: msgspec.Raw

    @classmethod
    def of(cls, command: PlainInstanceCommand | GatewayCommand) -> CommandMessage:
        return cls(name=type(command).__name__, fields=msgspec.Raw(msgspec.msgpack.encode(command)))

    @property
    def command(self) -> PlainInstanceCommand:
        """Raises ProtocolError if it is none for an instance."""
        return _decoded(_INSTANCE_COMMANDS, self.name, self.fields)

    @property
    def gateway_command(self) -> GatewayCommand:
        """Raises ProtocolError if it is none for a gateway."""
        return _decoded(_GATEWAY_COMMANDS, self.name, self.fields)


_INSTANCE_EVENTS: Mapping[str, msgspec.msgpack.Decoder[InstanceEvent]] = {
    kind.__name__: msgspec.msgpack.Decoder(kind) for kind in get_args(InstanceEvent)
}
_GATEWAY_EVENTS: Mapping[str, msgspec.msgpack.Decoder[GatewayEvent]] = {
    GatewayEvent.__name__: msgspec.msgpack.Decoder(GatewayEvent)
}
_INSTANCE_COMMANDS: Mapping[str, msgspec.msgpack.Decoder[PlainInstanceCommand]] = {
    kind.__name__: msgspec.msgpack.Decoder(kind) for kind in get_args(PlainInstanceCommand)
}
_GATEWAY_COMMANDS: Mapping[str, msgspec.msgpack.Decoder[GatewayCommand]] = {
    kind.__name__: msgspec.msgpack.Decoder(kind) for kind in get_args(GatewayCommand)
}

SaidT = TypeVar("SaidT")


def _decoded(decoders: Mapping[str, msgspec.msgpack.Decoder[SaidT]], name: str, fields: msgspec.Raw) -> SaidT:
    decoder = decoders.get(name)
    if decoder is None:
        raise ProtocolError(f"nothing that can be said here is called {name!r}")
    try:
        said = decoder.decode(fields)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:  # ValueError: text that is no UTF-8
        raise ProtocolError(f"malformed {name}: {error}") from error
    if (problem := out_of_range(said)) is not None:
        raise ProtocolError(f"malformed {name}: {problem}")
    return said


class Goodbye(Message, frozen=True, kw_only=True):
    """The worker is stopping in good order: no lease to wait for."""


WorkerUp = RegisterWorker | EventMessage | Goodbye


class WelcomeWorker(Message, frozen=True, kw_only=True):
    """The registration is accepted. Without a heartbeat for ``lease_s`` the instance is given up."""

    lease_s: float
    heartbeat_s: float


class Admit(Message, frozen=True, kw_only=True):
    """An `AdmitPrefill` with the prompt; precedes the first plan that names the request."""

    command: AdmitPrefill
    generation: Generation


class ExpectKv(Message, frozen=True, kw_only=True):
    """A `PlaceDecode` with the request. ``generation.token_ids`` is empty unless sampling needs the prompt."""

    command: PlaceDecode
    generation: Generation
    num_context_tokens: int  # tokens whose KV will land
    source_addresses: tuple[bytes, ...]  # data addresses of the transfer's sources, for the acknowledgement


class Grant(Message, frozen=True, kw_only=True):
    """A `GrantTransfer` with the data addresses of the transfer's destinations."""

    command: GrantTransfer
    destination_addresses: tuple[bytes, ...]


class PeerGone(Message, frozen=True, kw_only=True):
    """An instance was lost, or has begun anew: nobody will answer at this data address any more."""

    data_address: bytes


WorkerDown = WelcomeWorker | CommandMessage | Admit | ExpectKv | Grant | PeerGone


# --- gateway <-> scheduler ---------------------------------------------------------------------------------------


class RegisterGateway(Message, frozen=True, kw_only=True):
    gateway_id: GatewayId
    waiting: tuple[tuple[RequestId, Epoch], ...]
    version: int = PROTOCOL_VERSION


class GatewayHeartbeat(Message, frozen=True, kw_only=True):
    pass


class OtherChoice(msgspec.Struct, frozen=True, array_like=True):
    """What tells a choice from the first one of the same prompt."""

    request_id: RequestId
    seed: int


class Submit(Message, frozen=True, kw_only=True):
    """One request, or the choices of one prompt, which is sent once: each of them is a request of its own."""

    generation: Generation
    priority: int = 0
    slo_ttft_s: float | None = None
    slo_tpot_s: float | None = None
    others: tuple[OtherChoice, ...] = ()
    tenant: str = ""  # the name of the key that it came with
    share: int = 1  # of that key
    num_tokens_before: int = 0  # of the prompts of the same client request that were sent before
    age_s: float = 0.0  # since it was first submitted, of one that is resumed
    num_preemptions: int = 0

    def generations(self) -> Iterator[Generation]:
        """Yield one for every choice; they share the tokens' bytes."""
        first = self.generation
        yield first
        for other in self.others:
            params = dataclasses.replace(first.params, seed=other.seed)
            yield msgspec.structs.replace(first, request_id=other.request_id, params=params)


class NextActivity(Message, frozen=True, kw_only=True):
    """Somebody watches the mesh: send an `Activity` when there is one. Each is asked for by itself."""


GatewayUp = RegisterGateway | GatewayHeartbeat | Submit | EventMessage | NextActivity


class WelcomeGateway(Message, frozen=True, kw_only=True):
    scheduler_id: str  # of this process: one that was started again has another
    lease_s: float
    heartbeat_s: float


class BatchingStatus(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What an instance that prefills and decodes does at once."""

    mode: str  # "mb" or "eb"
    phase: str = ""  # of "eb": "prefill" or "decode"
    idle_share: float = 0.0  # of the seats, at which a decode phase ends
    num_seats: int = 0
    gain: float | None = None  # predicted throughput of "eb" over "mb", less 1
    reason: str = ""  # why the faster mode is not chosen


class InstanceStatus(Message, frozen=True, kw_only=True):
    """One row of `pdmesh status`."""

    instance_id: InstanceId
    role: Role
    model: str
    device: str
    pid: int
    draining: bool
    num_blocks: int
    num_free_blocks: int
    num_held_blocks: int
    num_quarantined_blocks: int
    num_prefilling: int
    num_decoding: int
    num_queued_tokens: int
    num_taken_blocks: int = 0  # held, or promised to requests on their way
    reachable: bool = True  # its stream is open; else it is given up once its lease ends
    suspected: bool = False  # its stream is open, and silent
    batching: BatchingStatus | None = None  # of one that prefills and decodes

    @property
    def state(self) -> str:
        """Say in one word what can be asked of the instance: up, draining, unreachable or silent."""
        if self.draining:
            return "draining"
        return "unreachable" if not self.reachable else "silent" if self.suspected else "up"


class TenantStatus(Message, frozen=True, kw_only=True):
    """What a key, or the keys not told apart, have and had of the mesh."""

    tenant: str
    share: int  # of the key; 0 for several
    num_waiting: int  # in line
    num_running: int
    used_of_late: float  # share of the tokens charged in the last minute, 0 to 1


class MeshState(Message, frozen=True, kw_only=True):
    """Pushed to gateways at each change of readiness and at each heartbeat; also what `pdmesh status` prints."""

    ready: bool  # a prefill and a decode instance can take a request
    reason: str  # why not, if not
    instances: tuple[InstanceStatus, ...]
    num_waiting: int
    num_running: int
    bundle: str
    batching: str = ""
    max_model_len: int = 0  # smallest of the instances; 0 while there is none
    num_gateways: int = 0
    num_coming: int = 0  # instances that served, have died and are being started again
    tenants: tuple[TenantStatus, ...] = ()  # for operators alone


class RequestActivity(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A request that waits or runs."""

    id: RequestId
    label: str = ""  # what its client calls it
    phase: str  # "waiting", "prefilling" or "decoding"
    where: tuple[InstanceId, ...]  # where its prompt is computed, then where it decodes
    num_prompt_tokens: int
    num_planned_tokens: int  # of the prompt, computed or in a plan
    age_s: float


class StepBar(msgspec.Struct, frozen=True, array_like=True):
    """A planned step that ended. Times are on the scheduler's clock."""

    instance_id: InstanceId
    begin_s: float
    end_s: float
    num_tokens: int  # of prompts
    num_decodes: int
    urgent: bool


class KvMove(msgspec.Struct, frozen=True, array_like=True):
    """A KV transfer that was acknowledged."""

    source_id: InstanceId
    destination_id: InstanceId
    begin_s: float
    end_s: float
    num_bytes: int
    request_id: RequestId


class ActivityMark(msgspec.Struct, frozen=True, array_like=True):
    """Something that happened at one moment: "preempted", "restarted", "transfer failed", "lost" or "joined"."""

    instance_id: InstanceId
    at_s: float
    what: str
    request_id: str


class Activity(Message, frozen=True, kw_only=True):
    """What the mesh does, and did since the last one; only so much of each as one can look at."""

    now_s: float  # the scheduler's clock
    state: MeshState
    requests: tuple[RequestActivity, ...]
    steps: tuple[StepBar, ...]
    moves: tuple[KvMove, ...]
    marks: tuple[ActivityMark, ...]


GatewayDown = WelcomeGateway | CommandMessage | MeshState | Activity


# --- worker -> gateway -------------------------------------------------------------------------------------------


class RegisterTokens(Message, frozen=True, kw_only=True):
    """First message of a worker's token stream."""

    instance_id: InstanceId
    version: int = PROTOCOL_VERSION


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Log-probabilities at one position. ``logprob`` is that of the token at hand; ``top`` the most likely ones."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class TokenOut(Message, frozen=True, kw_only=True):
    """One output token. It is delivered only if ``epoch`` is current, ``index`` is the next one, and it came from the
    instance whose turn it is: that which opened the epoch, or which the last token named as the next.

    ``token_id`` is None only if the generation ended without one (``finish_reason`` error or cancelled).
    """

    request_id: RequestId
    epoch: Epoch
    index: int
    token_id: int | None
    logprobs: TokenLogprobs | None = None
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None  # which stop token id ended it; None for eos
    next_instance_id: InstanceId | None = None  # who sends the token after this one, if it is another instance
    error: str | None = None


class PromptLogprobs(Message, frozen=True, kw_only=True):
    """Log-probabilities of prompt tokens ``start`` … ``start + len - 1``; the first prompt token has none."""

    request_id: RequestId
    epoch: Epoch
    start: int
    logprobs: tuple[TokenLogprobs, ...]


TokensUp = RegisterTokens | TokenOut | PromptLogprobs


class TokensAccepted(Message, frozen=True, kw_only=True):
    """The gateway's answer to `RegisterTokens`."""


TokensDown = TokensAccepted


# --- admin -------------------------------------------------------------------------------------------------------


class GetStatus(Message, frozen=True, kw_only=True):
    pass


class GetRequest(Message, frozen=True, kw_only=True):
    """Answered by a `RequestRecord`, or a `RequestList` of several."""

    request_id: str  # its id, a response's, a client's label, or how one of these begins


class ListRequests(Message, frozen=True, kw_only=True):
    """Answered by a `RequestList`: those that arrived last, the newest first, without their entries."""

    limit: int = 20


class GetPolicies(Message, frozen=True, kw_only=True):
    pass


class SetPolicy(Message, frozen=True, kw_only=True):
    """Switch the policy bundle while serving."""

    bundle: str


class ExpectInstances(Message, frozen=True, kw_only=True):
    """These are being started again by whoever looks after them, and no others: answered by a `MeshState`."""

    instance_ids: tuple[InstanceId, ...]


class SetBatching(Message, frozen=True, kw_only=True):
    """Switch the batching mode while serving, whatever the bundle."""

    batching: str
    threshold: float | None = None  # share of idle seats at which `eb` ends a decode phase


class StartOperation(Message, frozen=True, kw_only=True):
    """Answered by an `OperationStatus` once the core has decided: it runs, or was refused."""

    wish: OperationRequested


class CancelOperation(Message, frozen=True, kw_only=True):
    """Answered by an `OperationStatus`."""

    operation_id: OperationId


class ListOperations(Message, frozen=True, kw_only=True):
    """Answered by an `OperationList`, the newest first."""


#: Longer, a question is asked again.
MAX_WAIT_S = 4.0


class WaitOperation(Message, frozen=True, kw_only=True):
    """Answered by an `OperationStatus`: once it is over, or has not ``num_left`` left, or after ``wait_s``."""

    operation_id: OperationId
    num_left: int
    wait_s: Annotated[float, msgspec.Meta(ge=0, le=MAX_WAIT_S)]


AdminRequest = (
    GetStatus
    | GetRequest
    | ListRequests
    | GetPolicies
    | SetPolicy
    | SetBatching
    | ExpectInstances
    | StartOperation
    | CancelOperation
    | ListOperations
    | WaitOperation
)

#: What changes a mesh: for operators, not for everybody who may look.
Change = SetPolicy | SetBatching | StartOperation | CancelOperation


class OperationStatus(Message, frozen=True, kw_only=True):
    operation_id: OperationId
    kind: OperationKind
    instance_id: InstanceId
    role: Role | None
    state: str  # as in `pdmesh.core.operations.OperationState`
    detail: str
    num_left: int  # requests that have to leave the instance
    began_at: float  # Unix time, seconds
    ended_at: float | None
    timeout_s: float


class OperationList(Message, frozen=True, kw_only=True):
    operations: tuple[OperationStatus, ...]


class RecordEntry(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One line of a request's life: when (seconds since its arrival), what, where, and figures."""

    at_s: float
    what: str
    instance_id: InstanceId | None = None
    detail: str = ""
    figures: dict[str, float] = {}  # with their units in their names, for programs


class RequestRecord(Message, frozen=True, kw_only=True):
    request_id: str
    label: str = ""  # what its client calls it
    arrived_at: float  # Unix time, seconds
    num_prompt_tokens: int  # the client's own, also of a resumed request
    bundle: str  # that placed it; while it waits, the one in use when it came
    entries: tuple[RecordEntry, ...]
    state: str = ""  # "queued", "placed", or how it ended
    num_output_tokens: int | None = None  # None until it finished
    # Seconds since its arrival, as the scheduler heard of them.
    first_token_s: float | None = None  # the prompt was computed, and the first token drawn from it
    last_token_s: float | None = None
    # Its targets, and whether it kept them all; None without any, and until it finished.
    slo_ttft_s: float | None = None
    slo_tpot_s: float | None = None
    slo_met: bool | None = None


class RequestList(Message, frozen=True, kw_only=True):
    """All that fit a question: the choices of one HTTP request (``n``, several prompts; ``id-0``, ``id-1`` and so on),
    requests with the same label, or with ids that begin alike."""

    requests: tuple[RequestRecord, ...]


class Policies(Message, frozen=True, kw_only=True):
    """The answer to `GetPolicies`, `SetPolicy` and `SetBatching`."""

    bundle: str  # in use
    bundles: tuple[str, ...]  # to choose from
    batching: str = ""  # the mode in use
    batchings: tuple[str, ...] = ()  # to choose from


class AdminError(Message, frozen=True, kw_only=True):
    message: str


AdminResponse = MeshState | RequestRecord | RequestList | Policies | OperationStatus | OperationList | AdminError
