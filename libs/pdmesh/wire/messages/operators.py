"""What operators and other observers ask of the scheduler: ``/pdmesh.v1.Scheduler/Admin``."""

from __future__ import annotations

from typing import Annotated

import msgspec

from pdmesh.core.operator_events import OperationRequested, OperationTime
from pdmesh.model import (
    GatewayId,
    InstanceId,
    InstanceProfile,
    OperationId,
    OperationKind,
    PoolCounts,
    RequestId,
    Role,
)
from pdmesh.wire.messages.actuator_messages import MAX_WAIT_S, FollowPools, PoolsDesired
from pdmesh.wire.messages.envelope import Message, StandingBy
from pdmesh.wire.messages.status_messages import MeshStatus
from pdmesh.wire.messages.workers import PeersChecked


class GetStatus(Message, frozen=True, kw_only=True):
    """Answered by a `MeshStatus`."""


class CheckMesh(Message, frozen=True, kw_only=True):
    """Answered by a `MeshChecked`: instances try each other, and the gateways."""


class InstanceChecked(msgspec.Struct, frozen=True, kw_only=True):
    """What one instance found."""

    instance_id: InstanceId
    host: str
    checked: PeersChecked | None  # None: it did not answer
    clock_offset_s: float = 0.0  # its clock, less the scheduler's; the message's way is in it


class MeshChecked(Message, frozen=True, kw_only=True):
    """The answer to `CheckMesh`."""

    version: str  # of the scheduler's pdmesh
    certificate_expires_at: float | None
    instances: tuple[InstanceChecked, ...]
    gateways: tuple[tuple[GatewayId, str], ...]  # that were tried, by their token addresses


class GetRequest(Message, frozen=True, kw_only=True):
    """Answered by a `RequestRecord`, or a `RequestList` of several."""

    request_id: str  # its id, a response's, a client's label, or how one of these begins


class ListRequests(Message, frozen=True, kw_only=True):
    """Answered by a `RequestList`: those that arrived last, the newest first, without their entries."""

    limit: int = 20


class GetPolicies(Message, frozen=True, kw_only=True):
    """Answered by `Policies`."""


class GetDecisions(Message, frozen=True, kw_only=True):
    """Ask for decisions from number ``start`` on; answered by `LatestDecisions`."""

    start: int = 0


class SetPolicy(Message, frozen=True, kw_only=True):
    """Switch the policy bundle while serving."""

    bundle: str


class SetBatching(Message, frozen=True, kw_only=True):
    """Switch the batching mode while serving, whatever the bundle."""

    batching: str
    threshold: float | None = None  # share of idle seats at which `eb` ends a decode phase


class StartOperation(Message, frozen=True, kw_only=True):
    """Answered by an `OperationStatus` once the core has decided: it runs, or was refused."""

    requested: OperationRequested


class StartResize(Message, frozen=True, kw_only=True):
    """Give the pools other sizes: answered as `StartOperation` is."""

    operation_id: OperationId
    pools: PoolCounts
    kept: tuple[Role, ...] = ()  # of these as many as there are, whatever ``pools`` says
    timeout_s: OperationTime  # limit for requests to leave an instance
    start_timeout_s: OperationTime  # limit for an instance to register


class StartRolling(Message, frozen=True, kw_only=True):
    """Restart every process, one after the other: answered as `StartOperation` is."""

    operation_id: OperationId
    timeout_s: OperationTime  # limit for requests to leave an instance
    start_timeout_s: OperationTime  # limit for an instance that is started beside the last one
    force: bool = False  # though nobody does meanwhile what the last of a kind does


class CancelOperation(Message, frozen=True, kw_only=True):
    """Answered by an `OperationStatus`."""

    operation_id: OperationId


class ListOperations(Message, frozen=True, kw_only=True):
    """Answered by an `OperationList`, the newest first."""


class WaitOperation(Message, frozen=True, kw_only=True):
    """Answered by an `OperationStatus`: once it is over, or has not ``num_left`` left, or after ``wait_s``."""

    operation_id: OperationId
    num_left: int
    wait_s: Annotated[float, msgspec.Meta(ge=0, le=MAX_WAIT_S)]


AdminRequest = (
    GetStatus
    | CheckMesh
    | GetRequest
    | ListRequests
    | GetPolicies
    | GetDecisions
    | SetPolicy
    | SetBatching
    | StartOperation
    | StartResize
    | StartRolling
    | CancelOperation
    | ListOperations
    | WaitOperation
    | FollowPools
)

#: What changes a mesh: for operators, not for everybody who may look.
Change = SetPolicy | SetBatching | StartOperation | StartResize | StartRolling | CancelOperation


class OperationStatus(Message, frozen=True, kw_only=True):
    """One operation of an operator, and how far it is."""

    operation_id: OperationId
    kind: OperationKind
    instance_id: InstanceId
    role: Role | None
    state: str  # as in `pdmesh.model.OperationState`
    detail: str
    num_left: int  # requests that have to leave the instance; instances, or processes, of the whole mesh
    began_at: float  # Unix time, seconds
    ended_at: float | None
    timeout_s: float
    pools: PoolCounts | None = None  # of a resize, which is on no instance
    needs_actuator: bool = False  # refused since nobody starts and stops processes
    resize_command: str = ""  # if so, what does, where this is known
    request_id: RequestId | None = None  # of a move


class LatestDecisions(Message, frozen=True, kw_only=True):
    """A page of the decisions that the scheduler keeps in memory, and the mesh as it was before the oldest."""

    header: bytes  # `pdmesh.eventlog.Header` as msgpack
    bundle: str
    profiles: tuple[InstanceProfile, ...]
    decisions: tuple[bytes, ...]  # `pdmesh.decisions.encode_decision`
    next_start: int | None  # start of the next page; None after the last


class OperationList(Message, frozen=True, kw_only=True):
    """The answer to `ListOperations`."""

    operations: tuple[OperationStatus, ...]


class RecordEntry(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One line of a request's life: when (seconds since its arrival), what, where, and figures."""

    at_s: float
    what: str
    instance_id: InstanceId | None = None
    detail: str = ""
    figures: dict[str, float] = {}  # with their units in their names, for programs


class RequestRecord(Message, frozen=True, kw_only=True):
    """A request's life as the scheduler heard of it."""

    request_id: str
    label: str = ""  # what its client calls it
    arrived_at: float  # Unix time, seconds
    num_prompt_tokens: int  # the client's own, also of a resumed request
    bundle: str  # that placed it; while it waits, the one in use when it came
    entries: tuple[RecordEntry, ...]
    state: str = ""  # "queued", "prefilling", "decoding", or how it ended
    num_output_tokens: int | None = None  # None until it finished
    # Seconds since its arrival, as the scheduler heard of them.
    first_token_s: float | None = None  # the prompt was computed, and the first token drawn from it
    last_token_s: float | None = None
    # Its targets, and whether it kept them all; None without any, and until it finished.
    slo_ttft_s: float | None = None
    slo_tpot_s: float | None = None
    slo_met: bool | None = None

    @property
    def is_under_way(self) -> bool:
        """Whether it has not ended, in its newest epoch."""
        return self.state in ("", "queued", "prefilling", "decoding")


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
    """Why a question has no answer, or a change was refused: one sentence."""

    message: str


AdminResponse = (
    MeshStatus
    | MeshChecked
    | RequestRecord
    | RequestList
    | Policies
    | LatestDecisions
    | OperationStatus
    | OperationList
    | PoolsDesired
    | StandingBy
    | AdminError
)
