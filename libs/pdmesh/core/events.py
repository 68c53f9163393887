"""What the scheduling core is told. Every event is a fact that has happened, in the past tense."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from pdmesh.model import (
    NO_TRANSFER,
    Epoch,
    FinishReason,
    GatewayId,
    InstanceId,
    InstanceProfile,
    NumTokens,
    OperationId,
    OperationKind,
    OwnDecodeSteps,
    PoolCounts,
    PoolMember,
    Request,
    RequestId,
    Resident,
    Role,
    TransferId,
)
from pdmesh.plans import ChunkDone, ResidentContext
from pdmesh.ranges import ANY_COUNT, FINITE, SECONDS, Range

#: No operator waits longer for requests to leave an instance by themselves.
MAX_OPERATION_S = 86_400.0


@dataclass(frozen=True, slots=True)
class RequestArrived:
    """A new request, or (``epoch`` > 0) one resumed by its gateway with its transcript."""

    request: Request


@dataclass(frozen=True, slots=True)
class RequestCancelled:
    """The client went away, or the gateway has all it wants (a stop string). It touches no other gateway's requests."""

    gateway_id: GatewayId
    request_id: RequestId
    epoch: Epoch
    num_output_tokens: NumTokens | None = None  # delivered, in all epochs


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
    """A gateway's lease ran out: nobody waits for its requests."""

    gateway_id: GatewayId


@dataclass(frozen=True, slots=True)
class InstanceJoined:
    """An instance (re)registered, with the KV it holds. One that is ``stopping`` takes no new work."""

    profile: InstanceProfile
    residents: tuple[Resident, ...]
    stopping: bool = False


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
    """An instance says that it is about to stop, and takes no new work; ``enabled=False`` takes it back.

    It is over when it joins again and is not ``stopping``. What operators ask for are operations.
    """

    instance_id: InstanceId
    enabled: bool = True


@dataclass(frozen=True, slots=True)
class RoleChangeRequested:
    """An operator gives an instance another role."""

    instance_id: InstanceId
    role: Role


@dataclass(frozen=True, slots=True, kw_only=True)
class OperationRequested:
    """An operator asks for an operation on an instance, or (``again``) a scheduler that is gone had taken it on.

    A move brings ``request_id``, which decodes elsewhere, to the instance. Of others: what has not left the instance
    ``timeout_s`` after it began starts again elsewhere. ``force`` is for the last instance of its kind.
    """

    operation_id: OperationId
    kind: OperationKind
    instance_id: InstanceId
    timeout_s: Annotated[float, Range(0, MAX_OPERATION_S)]
    role: Role | None = None  # of an operation that changes it
    force: bool = False
    again: bool = False
    pid: int | None = None  # of the process that a restart is to end: once another one is there, it is done
    stopped_pid: int | None = None  # of the process that a restart had stopped already
    request_id: RequestId | None = None  # of a move
    judged: bool = False  # a change of roles that makes things worse is taken back
    role_before: Role | None = None  # of one that is asked for again: the instance may have its new role already


@dataclass(frozen=True, slots=True)
class OperationCancelled:
    """An operator takes an operation back."""

    operation_id: OperationId


@dataclass(frozen=True, slots=True, kw_only=True)
class ActuatorFacts:
    """Who starts and stops processes, as it was when an operator asked for something."""

    instance_ids: tuple[InstanceId, ...]  # that it looks after
    available_bytes: Annotated[int, ANY_COUNT]  # of the host's memory
    instance_bytes: Annotated[int, ANY_COUNT]  # that another instance would take; 0: not known
    name_prefix: str = ""  # of the ids of instances


@dataclass(frozen=True, slots=True, kw_only=True)
class ResizeRequested:
    """An operator wants pools of other sizes, or (``again``) a scheduler that is gone had taken that on.

    Instances that are to leave are drained as `OperationRequested` does, with ``timeout_s``. One that is to be started
    has ``start_timeout_s`` to register. ``actuator`` is None where nobody starts and stops processes.
    """

    operation_id: OperationId
    pools: PoolCounts
    timeout_s: Annotated[float, Range(0, MAX_OPERATION_S)]
    start_timeout_s: Annotated[float, Range(0, MAX_OPERATION_S)]
    actuator: ActuatorFacts | None = None
    again: bool = False
    # What was decided, of one that is asked for again. Of another one ``leaves`` says who goes before others.
    flips: tuple[PoolMember, ...] = ()
    starts: tuple[PoolMember, ...] = ()
    leaves: tuple[InstanceId, ...] = ()


@dataclass(frozen=True, slots=True)
class InstanceStartFailed:
    """The actuator could not start an instance that is wanted."""

    instance_id: InstanceId
    reason: str


@dataclass(frozen=True, slots=True)
class ProcessesReported:
    """The actuator has another set of processes: of instances that run, are being started, or end."""

    instance_ids: tuple[InstanceId, ...]


@dataclass(frozen=True, slots=True)
class BundleChangeRequested:
    """An operator switches the policy bundle."""

    bundle: str


@dataclass(frozen=True, slots=True)
class BatchingChangeRequested:
    """An operator switches the batching mode, until the next change of bundles; empty: the bundle's own.

    ``threshold`` is the share of idle seats at which `eb` ends a decode phase; None: the best in theory.
    """

    batching: str
    threshold: float | None = None


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


@dataclass(frozen=True, slots=True)
class DecodeStepsDone:
    """An instance made `OWN_STEPS_PER_REPORT` decode steps by itself, and had no other report to tell of them with."""

    instance_id: InstanceId
    own_steps: OwnDecodeSteps


@dataclass(frozen=True, slots=True)
class HelperJoined:
    """A helper took its `AdmitPrefill`: it can compute chunks of the request, and pieces of its KV may arrive."""

    instance_id: InstanceId
    request_id: RequestId
    epoch: Epoch


@dataclass(frozen=True, slots=True)
class GroupPrefix:
    """What the leader of a group has when it hears that ``num_lost`` members were lost in all: what it goes on from."""

    instance_id: InstanceId
    request_id: RequestId
    epoch: Epoch
    num_tokens: Annotated[int, ANY_COUNT]  # of the prompt, from its first on, whose KV is here in all layers
    num_lost: Annotated[int, ANY_COUNT]


@dataclass(frozen=True, slots=True)
class DecodeReserved:
    """A destination took a `PlaceDecode`: it knows the request, and pieces of its KV may arrive.

    Without this, a fast prefill could be granted its transfer and send before the receiver has heard of it.
    """

    instance_id: InstanceId
    request_id: RequestId
    epoch: Epoch
    transfer_id: TransferId


@dataclass(frozen=True, slots=True)
class TransferOffered:
    """A source began computing the first chunk that it has of a request whose KV must move.

    Once for each request: what it offers is offered to later transfers, too. ``transfer_id`` is the one it knew of,
    `NO_TRANSFER` if there was none.
    """

    instance_id: InstanceId
    request_id: RequestId
    epoch: Epoch
    transfer_id: TransferId


@dataclass(frozen=True, slots=True)
class TransferPaused:
    """A source has stopped sending a request's KV, as PauseTransfer asked: no piece of it is under way."""

    instance_id: InstanceId
    request_id: RequestId
    epoch: Epoch
    transfer_id: TransferId


@dataclass(frozen=True, slots=True)
class TransferLanded:
    """A destination holds its part of a request's KV, checked; the first destination has begun to decode."""

    instance_id: InstanceId
    request_id: RequestId
    epoch: Epoch
    transfer_id: TransferId
    num_bytes: Annotated[int, ANY_COUNT]
    duration_s: Annotated[float, SECONDS]


@dataclass(frozen=True, slots=True)
class TransferSent:
    """All that a source sent was acknowledged; it frees its KV now.

    ``exposed_s`` was waited for after the prompt was computed.
    """

    instance_id: InstanceId
    request_id: RequestId
    epoch: Epoch
    transfer_id: TransferId
    num_bytes: Annotated[int, ANY_COUNT]
    duration_s: Annotated[float, SECONDS]
    exposed_s: Annotated[float, FINITE]


@dataclass(frozen=True, slots=True)
class TransferFailed:
    """Either side gave a transfer up: a deadline, no progress, a checksum. A source keeps its KV.

    A destination does not.
    """

    instance_id: InstanceId
    request_id: RequestId
    epoch: Epoch
    transfer_id: TransferId
    reason: str


@dataclass(frozen=True, slots=True)
class MoveSent:
    """A running decode went on elsewhere, as its new instance acknowledged; the old one frees its KV now.

    ``frozen_s`` is how long the old one had stood still with it.
    """

    instance_id: InstanceId  # the old one
    request_id: RequestId
    epoch: Epoch
    transfer_id: TransferId
    num_bytes: Annotated[int, ANY_COUNT]
    duration_s: Annotated[float, SECONDS]
    frozen_s: Annotated[float, FINITE]


@dataclass(frozen=True, slots=True)
class MoveFailed:
    """An instance has stopped moving a running decode away.

    It decodes on by itself, unless the new instance may have begun: then (``committed``) it waits for ResumeDecode.
    """

    instance_id: InstanceId  # the old one
    request_id: RequestId
    epoch: Epoch
    transfer_id: TransferId
    committed: bool
    reason: str


@dataclass(frozen=True, slots=True)
class RequestDropped:
    """An instance does not take a request, or gives it up: it stops, has no room, or was told what cannot be.

    No transfer failed. The request is started again elsewhere.
    """

    instance_id: InstanceId
    request_id: RequestId
    epoch: Epoch
    reason: str


@dataclass(frozen=True, slots=True)
class RequestFinished:
    """The instance that held the generation ended it; the last token has been sent to the gateway."""

    instance_id: InstanceId
    request_id: RequestId
    epoch: Epoch
    reason: FinishReason
    num_output_tokens: NumTokens
    own_steps: OwnDecodeSteps | None = None  # up to the one that ended it


@dataclass(frozen=True, slots=True)
class KvReleased:
    """An instance gave back the blocks (and the reservation) of a request. The core's books follow this alone.

    It may be told twice, and what was given back be promised anew in between: so it says which ``transfer_id`` that was
    for, where one was to bring the KV.
    """

    instance_id: InstanceId
    request_id: RequestId
    epoch: Epoch
    transfer_id: TransferId = NO_TRANSFER


@dataclass(frozen=True, slots=True)
class CreditLow:
    """Requests that decode on an instance have room for few tokens more, or for none and wait."""

    instance_id: InstanceId
    residents: tuple[ResidentContext, ...]


@dataclass(frozen=True, slots=True)
class LoadReported:
    """An instance's books at a heartbeat: ``free + held + quarantined = total`` blocks."""

    instance_id: InstanceId
    num_free_blocks: Annotated[int, ANY_COUNT]
    num_held_blocks: Annotated[int, ANY_COUNT]
    num_quarantined_blocks: Annotated[int, ANY_COUNT]
    num_decoding: Annotated[int, ANY_COUNT]


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
    | HelperJoined
    | GroupPrefix
    | DecodeReserved
    | TransferOffered
    | TransferPaused
    | TransferLanded
    | TransferSent
    | TransferFailed
    | MoveSent
    | MoveFailed
    | RequestDropped
    | RequestFinished
    | KvReleased
    | CreditLow
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
    | RoleChangeRequested
    | OperationRequested
    | OperationCancelled
    | ResizeRequested
    | InstanceStartFailed
    | ProcessesReported
    | BundleChangeRequested
    | BatchingChangeRequested
    | Tick
    | InstanceEvent
)
