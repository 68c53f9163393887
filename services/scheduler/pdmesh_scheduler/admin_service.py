"""The Admin method: an operator's questions and changes.

Callers with the mesh token, or with an operator's, may ask. Changes need an operator with the scope for them. If no
operators are known, changes must come from this machine. Actuators' reports are accepted only from the mesh's own
processes.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, assert_never
from urllib.parse import unquote

import grpc
import grpc.aio
import msgspec
import structlog

from pdmesh.apikeys import Operator
from pdmesh.core.events import SessionEnded
from pdmesh.core.operator_events import (
    BatchingChangeRequested,
    BundleChangeRequested,
    OperationCancelled,
    OperationRequested,
    ResizeRequested,
    RollingRequested,
)
from pdmesh.errors import ConfigError
from pdmesh.host import is_loopback
from pdmesh.model import RequestId, Role
from pdmesh.operations import OperationKind, PoolCounts
from pdmesh.policy.batching import NOTHING_EXCLUSIVE
from pdmesh.policy.bundles import BATCHINGS, installed_bundles, make_batching, make_bundle
from pdmesh.policy.config import PolicyConfig
from pdmesh.wire.endpoint import is_ours
from pdmesh.wire.messages import (
    AdminError,
    AdminRequest,
    AdminResponse,
    CancelOperation,
    Change,
    CheckMesh,
    CloseSession,
    FollowPools,
    GetDecisions,
    GetPolicies,
    GetRequest,
    GetStatus,
    ListOperations,
    ListRequests,
    ListSessions,
    OperationList,
    Policies,
    RequestList,
    SessionList,
    SetBatching,
    SetPolicy,
    StartOperation,
    StartResize,
    StartRolling,
    WaitOperation,
)
from pdmesh_scheduler.actuator_streams import ActuatorLinks
from pdmesh_scheduler.driver import Driver
from pdmesh_scheduler.latest_decisions import DecisionKeeper
from pdmesh_scheduler.mesh_check import MeshCheck
from pdmesh_scheduler.operation_progress import OperationStatuses
from pdmesh_scheduler.operator_tokens import Operators
from pdmesh_scheduler.request_records import RequestRecords
from pdmesh_scheduler.session_statuses import SessionStatuses
from pdmesh_scheduler.startup_grace import StartupGrace
from pdmesh_scheduler.tenants import TenantUsage

log = structlog.get_logger()

#: Longest id of an operator's operation, in characters. The ids of its parts, for single instances, are longer.
MAX_ID_LENGTH = 64

_WANTED_ID = f"an operation's id has 1 to {MAX_ID_LENGTH} characters, none of them a slash"


@dataclass(frozen=True, slots=True, kw_only=True)
class Admin:
    """Server of ``/pdmesh.v1.Scheduler/Admin``.

    `is_wide` says that other machines reach the port. Then calls from this machine may be forwarded, so they need a
    token, too.
    """

    driver: Driver
    records: RequestRecords
    sessions: SessionStatuses
    operations: OperationStatuses
    actuators: ActuatorLinks
    startup_grace: StartupGrace
    operators: Operators
    mesh_token: str
    tenants: TenantUsage
    check: MeshCheck
    decisions: DecisionKeeper
    is_wide: bool = False

    def handler(self) -> grpc.RpcMethodHandler[Any, Any]:
        decoder = msgspec.msgpack.Decoder(list[AdminRequest])

        async def handle(frame: bytes, context: Any) -> bytes:
            try:
                (question,) = decoder.decode(frame)
            except (msgspec.MsgspecError, ValueError) as error:
                reason = f"malformed frame of {len(frame)} bytes: {error}"
                return bytes(await context.abort(grpc.StatusCode.INVALID_ARGUMENT, reason))  # raises
            metadata = {key: value for key, value in context.invocation_metadata() or () if isinstance(value, str)}
            if isinstance(question, Change):
                answer = await self._change(question, metadata, context.peer())
            elif isinstance(question, FollowPools) and not is_ours(metadata, self.mesh_token.encode().hex()):
                answer = AdminError(message="only the mesh's own services may send this: it needs the mesh token")
            else:
                answer = await self._answer(question)
            return msgspec.msgpack.encode([answer])

        return grpc.unary_unary_rpc_method_handler(handle)

    # --- questions ---

    async def _answer(
        self,
        question: GetStatus
        | CheckMesh
        | GetRequest
        | ListRequests
        | ListSessions
        | GetPolicies
        | GetDecisions
        | ListOperations
        | WaitOperation
        | FollowPools,
    ) -> AdminResponse:
        match question:
            case GetStatus():
                return msgspec.structs.replace(self.driver.state(), tenants=self.tenants.statuses)
            case CheckMesh():
                return await self.check.run()
            case GetRequest():
                match self.records.find(question.request_id):
                    case ():
                        pass
                    case (record,):
                        return record
                    case records:
                        return RequestList(requests=records)
                return AdminError(message=f"no request {question.request_id!r} is remembered")
            case ListRequests(limit=limit):
                return RequestList(requests=self.records.newest(limit))
            case ListSessions(limit=limit, session=""):
                return SessionList(sessions=self.sessions.newest(limit))
            case ListSessions(session=beginning):
                found = self.sessions.find(beginning)
                return SessionList(sessions=self.sessions.statuses(found)) if found else _unknown_session(beginning)
            case GetPolicies():
                return self._policies()
            case GetDecisions(start=start):
                return self.decisions.page(start)
            case ListOperations():
                return OperationList(operations=self.operations.all())
            case WaitOperation(operation_id=operation_id, num_left=num_left, wait_s=wait_s):
                status = await self.operations.wait(operation_id, num_left, wait_s)
                return status or _unknown(operation_id)
            case FollowPools():
                return await self.actuators.follow(question)
            case _:
                assert_never(question)

    def _policies(self) -> Policies:
        state = self.driver.state()
        return Policies(
            bundle=state.bundle, bundles=installed_bundles(), batching=state.batching, batchings=tuple(BATCHINGS)
        )

    # --- changes ---

    async def _change(self, change: Change, metadata: Mapping[str, str], peer: str) -> AdminResponse:
        operator = self.operators.who(metadata)
        if (reason := self._why_not(operator, peer)) is not None:
            answer: AdminResponse = AdminError(message=reason)
        else:
            answer = await self._carry_out(change)
        name = "" if operator is None else operator.name
        audit = {"change": msgspec.to_builtins(change), "operator": name, "peer": peer}
        if isinstance(answer, AdminError):
            log.warning("operator's change refused", **audit, reason=answer.message)
        else:
            log.info("operator's change applied", **audit, answer=msgspec.to_builtins(answer))
        return answer

    def _why_not(self, operator: Operator | None, peer: str) -> str | None:
        """Return why the caller may change nothing; None if it may."""
        if operator is not None:
            if operator.may_write:
                return None
            return f"the operator {operator.name!r} may not change the mesh: its entry needs the scope 'write'"
        if self.operators:
            return "changing the mesh needs an operator token: set security.operator_token to one it accepts"
        if is_local(peer) and not self.is_wide:
            return None
        whence = "" if self.is_wide else " from other machines"
        return (
            f"changing the mesh{whence} needs an operator token: give the scheduler a security.operator_token "
            "or a security.operators_file, and send one of its tokens"
        )

    async def _carry_out(self, change: Change) -> AdminResponse:
        match change:
            case SetPolicy(bundle=name):
                try:
                    bundle = make_bundle(name, self.driver.policy)
                except ConfigError as error:
                    return AdminError(message=str(error))
                if (why_not := bundle.why_not(self.driver.instances)) is not None:
                    return AdminError(message=why_not)
                await self.driver.act(BundleChangeRequested(name))
                return self._policies()
            case SetBatching():
                return await self._set_batching(change)
            case StartOperation(requested=requested):
                if (
                    requested.again
                    or requested.of_service
                    or requested.stopped_pid is not None
                    or requested.role_before is not None
                ):
                    return AdminError(message="only a scheduler may send an operation again")
                if (requested.kind is OperationKind.ROLE) is (requested.role is None):
                    return AdminError(message="only a role change takes a role")
                if requested.kind in (OperationKind.RESIZE, OperationKind.ROLLING):
                    return AdminError(message="this operation is for the whole mesh, not for one instance")
                if (requested.kind is OperationKind.MOVE) is (requested.request_id is None):
                    return AdminError(message="only a move takes a request")
                if requested.request_id is not None:
                    records = self.records.find(requested.request_id)
                    if len(records) > 1:
                        return AdminError(
                            message=f"{len(records)} requests match {requested.request_id!r}: give a full request id"
                        )
                    if records:
                        requested = replace(requested, request_id=RequestId(records[0].request_id))
                if not _is_id(requested.operation_id):
                    return AdminError(message=_WANTED_ID)
                return await self._begin(requested)
            case StartResize():
                if not _is_id(change.operation_id):
                    return AdminError(message=_WANTED_ID)
                await self.startup_grace.wait()
                there = Counter(view.role for view in self.driver.instances)
                pools = {str(role): there[role] if role in change.kept else change.pools.of(role) for role in Role}
                resize = ResizeRequested(
                    operation_id=change.operation_id,
                    pools=PoolCounts(**pools),
                    timeout_s=change.timeout_s,
                    start_timeout_s=change.start_timeout_s,
                )
                return await self._begin(resize)
            case StartRolling():
                if not _is_id(change.operation_id):
                    return AdminError(message=_WANTED_ID)
                rolling = RollingRequested(
                    operation_id=change.operation_id,
                    timeout_s=change.timeout_s,
                    start_timeout_s=change.start_timeout_s,
                    force=change.force,
                    began_at=time.time(),
                )
                return await self._begin(rolling)
            case CancelOperation(operation_id=operation_id):
                await self.driver.act(OperationCancelled(operation_id))
                return self.operations.of(operation_id) or _unknown(operation_id)
            case CloseSession(session=beginning):
                found = self.sessions.find(beginning)
                if len(found) != 1:
                    return _unknown_session(beginning, len(found))
                await self.driver.act(SessionEnded(found[0].key))
                return SessionList(sessions=self.sessions.statuses(found))
            case _:
                assert_never(change)

    async def _begin(self, requested: OperationRequested | ResizeRequested | RollingRequested) -> AdminResponse:
        """Wait until the startup grace ends, ask the core for an operation, and return its status, also if refused."""
        await self.startup_grace.wait()
        await self.driver.act(requested)
        return self.operations.of(requested.operation_id) or _unknown(requested.operation_id)

    async def _set_batching(self, question: SetBatching) -> AdminResponse:
        name, threshold = question.batching, question.threshold
        try:
            make_batching(name, PolicyConfig(eb_threshold=threshold))
        except ConfigError as error:
            return AdminError(message=str(error))
        instances = self.driver.state().instances
        if name == "eb" and instances and all(instance.batching is None for instance in instances):
            return AdminError(message=NOTHING_EXCLUSIVE)
        await self.driver.act(BatchingChangeRequested(name, threshold))
        return self._policies()


def is_local(peer: str) -> bool:
    """Return whether a gRPC peer, such as ``ipv4:127.0.0.1:5000``, is on this machine."""
    scheme, _, address = peer.partition(":")
    return scheme == "unix" or (
        scheme in ("ipv4", "ipv6") and is_loopback(unquote(address).rpartition(":")[0].strip("[]"))
    )


def _is_id(operation_id: str) -> bool:
    return 0 < len(operation_id) <= MAX_ID_LENGTH and "/" not in operation_id


def _unknown_session(beginning: str, num_found: int = 0) -> AdminError:
    if num_found:
        return AdminError(message=f"{num_found} sessions begin with {beginning!r}: give more of the id")
    return AdminError(message=f"no session begins with {beginning!r}: `pdmesh sessions` lists them")


def _unknown(operation_id: str) -> AdminError:
    return AdminError(message=f"no operation {operation_id!r} is known: `pdmesh ops` lists them")
