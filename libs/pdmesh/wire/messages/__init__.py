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

from pdmesh.wire.messages.actuators import MAX_WAIT_S, FollowPools, PoolsDesired
from pdmesh.wire.messages.envelope import PROTOCOL_VERSION, CommandMessage, EventMessage, Message
from pdmesh.wire.messages.gateways import (
    GatewayDown,
    GatewayHeartbeat,
    GatewayUp,
    NextActivity,
    OtherChoice,
    RegisterGateway,
    Submit,
    WelcomeGateway,
)
from pdmesh.wire.messages.generation import Generation, pack_token_ids, unpack_token_ids
from pdmesh.wire.messages.operators import (
    AdminError,
    AdminRequest,
    AdminResponse,
    CancelOperation,
    Change,
    ExpectInstances,
    GetPolicies,
    GetRequest,
    GetStatus,
    ListOperations,
    ListRequests,
    OperationList,
    OperationStatus,
    Policies,
    RecordEntry,
    RequestList,
    RequestRecord,
    SetBatching,
    SetPolicy,
    StartOperation,
    StartResize,
    StartRolling,
    WaitOperation,
)
from pdmesh.wire.messages.state import (
    Activity,
    ActivityMark,
    BatchingStatus,
    GroupStatus,
    InstanceStatus,
    KvMove,
    LinkStatus,
    MeshStatus,
    RequestActivity,
    StepBar,
    TenantStatus,
    in_order,
)
from pdmesh.wire.messages.tokens import (
    PromptLogprobs,
    RegisterTokens,
    TokenLogprobs,
    TokenOut,
    TokensAccepted,
    TokensDown,
    TokensHeard,
    TokensHeartbeat,
    TokensUp,
    TurnOver,
)
from pdmesh.wire.messages.workers import (
    Admit,
    ExpectKv,
    ExpectMove,
    Goodbye,
    Grant,
    PeerGone,
    RegisterWorker,
    Regroup,
    WelcomeWorker,
    WorkerDown,
    WorkerUp,
)

__all__ = [
    "MAX_WAIT_S",
    "PROTOCOL_VERSION",
    "Activity",
    "ActivityMark",
    "AdminError",
    "AdminRequest",
    "AdminResponse",
    "Admit",
    "BatchingStatus",
    "CancelOperation",
    "Change",
    "CommandMessage",
    "EventMessage",
    "ExpectInstances",
    "ExpectKv",
    "ExpectMove",
    "FollowPools",
    "GatewayDown",
    "GatewayHeartbeat",
    "GatewayUp",
    "Generation",
    "GetPolicies",
    "GetRequest",
    "GetStatus",
    "Goodbye",
    "Grant",
    "GroupStatus",
    "InstanceStatus",
    "KvMove",
    "LinkStatus",
    "ListOperations",
    "ListRequests",
    "MeshStatus",
    "Message",
    "NextActivity",
    "OperationList",
    "OperationStatus",
    "OtherChoice",
    "PeerGone",
    "Policies",
    "PoolsDesired",
    "PromptLogprobs",
    "RecordEntry",
    "RegisterGateway",
    "RegisterTokens",
    "RegisterWorker",
    "Regroup",
    "RequestActivity",
    "RequestList",
    "RequestRecord",
    "SetBatching",
    "SetPolicy",
    "StartOperation",
    "StartResize",
    "StartRolling",
    "StepBar",
    "Submit",
    "TenantStatus",
    "TokenLogprobs",
    "TokenOut",
    "TokensAccepted",
    "TokensDown",
    "TokensHeard",
    "TokensHeartbeat",
    "TokensUp",
    "TurnOver",
    "WaitOperation",
    "WelcomeGateway",
    "WelcomeWorker",
    "WorkerDown",
    "WorkerUp",
    "in_order",
    "pack_token_ids",
    "unpack_token_ids",
]
