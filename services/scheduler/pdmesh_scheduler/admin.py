"""The Admin method: an operator's questions and changes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio
import msgspec

from pdmesh.core.events import BundleChangeRequested
from pdmesh.errors import ConfigError
from pdmesh.policy.base import PolicyConfig
from pdmesh.policy.bundles import BUNDLES, make_bundle
from pdmesh.wire.messages import (
    AdminError,
    AdminRequest,
    AdminResponse,
    ExpectInstances,
    GetPolicies,
    GetRequest,
    GetStatus,
    ListRequests,
    Policies,
    RequestList,
    SetPolicy,
)
from pdmesh_scheduler.driver import Driver
from pdmesh_scheduler.records import RequestRecords


@dataclass(frozen=True, slots=True)
class Admin:
    driver: Driver
    records: RequestRecords

    def handler(self) -> grpc.RpcMethodHandler[Any, Any]:
        decoder = msgspec.msgpack.Decoder(list[AdminRequest])

        async def handle(frame: bytes, context: Any) -> bytes:
            try:
                (question,) = decoder.decode(frame)
            except (msgspec.MsgspecError, ValueError) as error:
                reason = f"malformed frame of {len(frame)} bytes: {error}"
                return bytes(await context.abort(grpc.StatusCode.INVALID_ARGUMENT, reason))  # raises
            return msgspec.msgpack.encode([self._answer(question)])

        return grpc.unary_unary_rpc_method_handler(handle)

    def _answer(self, question: AdminRequest) -> AdminResponse:
        match question:
            case GetStatus():
                return self.driver.state()
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
            case GetPolicies():
                return Policies(bundle=self.driver.state().bundle, bundles=tuple(sorted(BUNDLES)))
            case ExpectInstances(instance_ids=instance_ids):
                self.driver.expect(instance_ids)
                return self.driver.state()
            case SetPolicy(bundle=name):
                try:
                    make_bundle(name, PolicyConfig())
                except ConfigError as error:
                    return AdminError(message=str(error))
                self.driver.post(BundleChangeRequested(name))
                return Policies(bundle=name, bundles=tuple(sorted(BUNDLES)))
