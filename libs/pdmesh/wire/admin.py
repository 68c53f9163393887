"""One question to a scheduler's Admin method, and its answer."""

from __future__ import annotations

from typing import Any

import grpc
import msgspec

from pdmesh.config import SecurityConfig
from pdmesh.errors import InstanceUnavailable, PdmeshError, ProtocolError
from pdmesh.wire import messages
from pdmesh.wire.endpoint import open_operator_channel

ADMIN_METHOD = "/pdmesh.v1.Scheduler/Admin"
_DEADLINE_S = 5.0
_CHECK_DEADLINE_S = 10.0  # while instances try each other

#: Answers, though no good ones: asked again they are the same.
_REFUSALS = (
    grpc.StatusCode.UNAUTHENTICATED,
    grpc.StatusCode.PERMISSION_DENIED,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.UNIMPLEMENTED,
)


class QuestionRefused(PdmeshError):
    """The scheduler rejected the call: it wants another token or another version of pdmesh."""


async def ask_scheduler(
    address: str, security: SecurityConfig, question: messages.AdminRequest
) -> messages.AdminResponse:
    """Ask the scheduler's Admin method one question and return its answer.

    Raises InstanceUnavailable, QuestionRefused, ProtocolError, or PdmeshError with the scheduler's reason for saying
    no.
    """
    async with open_operator_channel(address, security) as channel:
        call: Any = channel.unary_unary(ADMIN_METHOD)
        try:
            limit_s = _CHECK_DEADLINE_S if isinstance(question, messages.CheckMesh) else _DEADLINE_S
            frame = await call(msgspec.msgpack.encode([question]), timeout=limit_s, wait_for_ready=False)
        except grpc.aio.AioRpcError as error:
            if error.code() in _REFUSALS:
                raise QuestionRefused(f"the scheduler at {address} rejected the command:  {error.details()}") from error
            raise InstanceUnavailable(
                f"the scheduler at {address} does not answer: {error.code().name}: {error.details()}"
            ) from error
    try:
        (answer,) = msgspec.msgpack.decode(frame, type=list[messages.AdminResponse])
    except (msgspec.MsgspecError, ValueError) as error:
        raise ProtocolError(f"the scheduler at {address} sent a malformed answer: {error}") from error
    if isinstance(answer, messages.AdminError):
        raise PdmeshError(answer.message)
    return answer
