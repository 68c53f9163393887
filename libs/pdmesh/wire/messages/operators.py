"""Questions and changes of operators and other observers for the scheduler: ``/pdmesh.v1.Scheduler/Admin``."""

from __future__ import annotations

from typing import Annotated

import msgspec

from pdmesh.core.operator_events import OperationRequested, OperationTime
from pdmesh.model import GatewayId, InstanceId, InstanceProfile, RequestId, Role
from pdmesh.operations import OperationId, OperationKind, PoolCounts
from pdmesh.wire.messages.actuator_messages import MAX_WAIT_S, FollowPools, PoolsDesired
from pdmesh.wire.messages.envelope import Message, StandingBy
from pdmesh.wire.messages.status_messages import MeshStatus, SessionStatus
from pdmesh.wire.messages.workers import PeersChecked


class GetStatus(Message, frozen=True, kw_only=True):
    """A question for the mesh's state. Answered by a `MeshStatus`."""


class CheckMesh(Message, frozen=True, kw_only=True):
    """A request to check all connections: instances try each other, and the gateways. Answered by a `MeshChecked`."""


class InstanceChecked(msgspec.Struct, frozen=True, kw_only=True):
    """The result of one instance; ``checked`` is None if it did not answer.

    ``clock_offset_s`` is the instance's clock less the scheduler's, and includes the message's latency.
    """

    instance_id: InstanceId
    host: str
    checked: PeersChecked | None
    clock_offset_s: float = 0.0


class MeshChecked(Message, frozen=True, kw_only=True):
    """The answer to `CheckMesh`.

    ``version`` is the scheduler's pdmesh. ``gateways`` are the tested ones, with their token addresses.
    """

    version: str
    certificate_expires_at: float | None
    instances: tuple[InstanceChecked, ...]
    gateways: tuple[tuple[GatewayId, str], ...]


class GetRequest(Message, frozen=True, kw_only=True):
    """A question for one request. Answered by a `RequestRecord`, or a `RequestList` of several.

    ``request_id`` is a request's or response's id, a client's label, or the beginning of one of these.
    """

    request_id: str


class ListRequests(Message, frozen=True, kw_only=True):
    """A question for the latest requests. Answered by a `RequestList`, newest first, without their entries."""

    limit: int = 20


class ListSessions(Message, frozen=True, kw_only=True):
    """A question for sessions. Answered by a `SessionList`, newest first.

    ``session`` is the beginning of an id; if it is set, the answer has the sessions whose ids begin like this.
    """

    limit: int = 20
    session: str = ""


class CloseSession(Message, frozen=True, kw_only=True):
    """The end of a session, by the beginning of its id. Answered by a `SessionList` with this session."""

    session: str


class GetPolicies(Message, frozen=True, kw_only=True):
    """A question for the policies in use. Answered by `Policies`."""


class GetDecisions(Message, frozen=True, kw_only=True):
    """A question for the decisions from number ``start`` on. Answered by `LatestDecisions`."""

    start: int = 0


class SetPolicy(Message, frozen=True, kw_only=True):
    """A switch of the policy bundle while serving. Answered by `Policies`."""

    bundle: str


class SetBatching(Message, frozen=True, kw_only=True):
    """A switch of the batching mode while serving, for any bundle. Answered by `Policies`.

    ``threshold`` is the share of idle seats at which `eb` ends a decode phase.
    """

    batching: str
    threshold: float | None = None


class StartOperation(Message, frozen=True, kw_only=True):
    """The start of an operation. Answered by an `OperationStatus` once the core has started or refused it."""

    requested: OperationRequested


class StartResize(Message, frozen=True, kw_only=True):
    """A change of the pools' sizes. Answered as `StartOperation`.

    Roles in ``kept`` stay as large as they are, whatever ``pools`` says. ``timeout_s`` limits the time for requests to
    leave an instance, and ``start_timeout_s`` the time for an instance to register.
    """

    operation_id: OperationId
    pools: PoolCounts
    kept: tuple[Role, ...] = ()
    timeout_s: OperationTime
    start_timeout_s: OperationTime


class StartRolling(Message, frozen=True, kw_only=True):
    """A restart of every process, one after the other. Answered as `StartOperation`.

    ``timeout_s`` limits the time for requests to leave an instance, and ``start_timeout_s`` the start of an instance
    beside the last of its kind. ``force`` restarts the last of a kind even if no other serves meanwhile.
    """

    operation_id: OperationId
    timeout_s: OperationTime
    start_timeout_s: OperationTime
    force: bool = False


class CancelOperation(Message, frozen=True, kw_only=True):
    """The end of a running operation. Answered by an `OperationStatus`."""

    operation_id: OperationId


class ListOperations(Message, frozen=True, kw_only=True):
    """A question for all operations. Answered by an `OperationList`, newest first."""


class WaitOperation(Message, frozen=True, kw_only=True):
    """A question for an operation's progress. Answered by an `OperationStatus`.

    The answer comes once the operation is over, once its ``num_left`` differs, or after ``wait_s``.
    """

    operation_id: OperationId
    num_left: int
    wait_s: Annotated[float, msgspec.Meta(ge=0, le=MAX_WAIT_S)]


AdminRequest = (
    GetStatus
    | CheckMesh
    | GetRequest
    | ListRequests
    | ListSessions
    | GetPolicies
    | GetDecisions
    | SetPolicy
    | SetBatching
    | StartOperation
    | StartResize
    | StartRolling
    | CancelOperation
    | CloseSession
    | ListOperations
    | WaitOperation
    | FollowPools
)

#: Requests that change the mesh, which only operators may send.
Change = SetPolicy | SetBatching | StartOperation | StartResize | StartRolling | CancelOperation | CloseSession


class OperationStatus(Message, frozen=True, kw_only=True):
    """An operation of an operator, and its progress.

    * ``state``: as in `pdmesh.operations.OperationState`.
    * ``num_left``: number of requests that must leave the instance; for the whole mesh, of instances or processes.
    * ``began_at``, ``ended_at``: in Unix time.
    * ``pools``: of a resize, which has no instance. ``request_id``: of a move.
    * ``needs_actuator``: refused because there is no actuator; ``resize_command`` is a command to use instead, if
      known.
    """

    operation_id: OperationId
    kind: OperationKind
    instance_id: InstanceId
    role: Role | None
    state: str
    detail: str
    num_left: int
    began_at: float
    ended_at: float | None
    timeout_s: float
    pools: PoolCounts | None = None
    needs_actuator: bool = False
    resize_command: str = ""
    request_id: RequestId | None = None


class LatestDecisions(Message, frozen=True, kw_only=True):
    """A page of the decisions that the scheduler keeps in memory, and the mesh as it was before the oldest.

    ``header`` is a `pdmesh.eventlog.Header` as msgpack, and ``decisions`` are from `pdmesh.decisions.encode_decision`.
    ``next_start`` is the start of the next page; None after the last.
    """

    header: bytes
    bundle: str
    profiles: tuple[InstanceProfile, ...]
    decisions: tuple[bytes, ...]
    next_start: int | None


class OperationList(Message, frozen=True, kw_only=True):
    """The answer to `ListOperations`."""

    operations: tuple[OperationStatus, ...]


class RecordEntry(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A line of a request's record: when (seconds since its arrival), what, where, and figures.

    ``figures`` have their units in their names, for programs.
    """

    at_s: float
    what: str
    instance_id: InstanceId | None = None
    detail: str = ""
    figures: dict[str, float] = {}


class RequestRecord(Message, frozen=True, kw_only=True):
    """A request's history, as reported to the scheduler.

    * ``label``: the client's name for the request.
    * ``arrived_at``: in Unix time.
    * ``num_prompt_tokens``: of the client's own prompt, also for a resumed request.
    * ``bundle``: the bundle that placed the request; while it waits, the bundle in use when it came.
    * ``state``: "queued", "prefilling", "decoding", or how the request ended.
    * ``num_output_tokens``: None until the request has finished.
    * ``first_token_s``, ``last_token_s``: seconds since the arrival. The first token is drawn when the prompt is
      computed.
    * ``slo_met``: whether all targets were met; None without targets, and until the request has finished.
    """

    request_id: str
    label: str = ""
    arrived_at: float
    num_prompt_tokens: int
    bundle: str
    entries: tuple[RecordEntry, ...]
    state: str = ""
    num_output_tokens: int | None = None
    first_token_s: float | None = None
    last_token_s: float | None = None
    slo_ttft_s: float | None = None
    slo_tpot_s: float | None = None
    slo_met: bool | None = None

    @property
    def is_under_way(self) -> bool:
        """Whether the request has not ended in its newest epoch."""
        return self.state in ("", "queued", "prefilling", "decoding")


class RequestList(Message, frozen=True, kw_only=True):
    """All requests that match a question.

    They are the choices of one HTTP request, or have the same label or the same beginning of their ids. Choices come
    from ``n`` or several prompts, and have the ids ``id-0``, ``id-1`` and so on.
    """

    requests: tuple[RequestRecord, ...]


class SessionList(Message, frozen=True, kw_only=True):
    """The answer to `ListSessions` and `CloseSession`."""

    sessions: tuple[SessionStatus, ...]


class Policies(Message, frozen=True, kw_only=True):
    """The answer to `GetPolicies`, `SetPolicy` and `SetBatching`.

    ``bundle`` and ``batching`` are in use; ``bundles`` and ``batchings`` are the possible ones.
    """

    bundle: str
    bundles: tuple[str, ...]
    batching: str = ""
    batchings: tuple[str, ...] = ()


class AdminError(Message, frozen=True, kw_only=True):
    """The reason why a question has no answer, or a change was refused, in one sentence."""

    message: str


AdminResponse = (
    MeshStatus
    | MeshChecked
    | RequestRecord
    | RequestList
    | SessionList
    | Policies
    | LatestDecisions
    | OperationStatus
    | OperationList
    | PoolsDesired
    | StandingBy
    | AdminError
)
