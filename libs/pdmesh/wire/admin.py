"""Questions to a scheduler's Admin method, and their answers."""

from __future__ import annotations

from typing import Any

import grpc
import msgspec

from pdmesh.config import SecurityConfig
from pdmesh.errors import InstanceUnavailable, PdmeshError, ProtocolError
from pdmesh.wire import messages
from pdmesh.wire.endpoint import open_operator_channel
from pdmesh.wire.scheduler_channel import scheduler_addresses

ADMIN_METHOD = "/pdmesh.v1.Scheduler/Admin"
_DEADLINE_S = 5.0
# Longer, because instances try each other.
_CHECK_DEADLINE_S = 10.0

#: Status codes that repeat if the question is asked again.
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
    """Ask the leading scheduler one question and return its answer.

    ``address`` is as in `MeshConfig.scheduler_address`. Raises InstanceUnavailable if no leader answers,
    QuestionRefused, ProtocolError, or PdmeshError with the scheduler's reason for a refusal.
    """
    left = list(scheduler_addresses(address)) or [address]
    asked: set[str] = set()
    problems: list[str] = []
    while left:
        if (asking := left.pop(0)) in asked:
            continue
        asked.add(asking)
        try:
            answer = await ask_one(asking, security, question)
        except InstanceUnavailable as error:
            problems.append(str(error))
            continue
        match answer:
            case messages.StandingBy():
                problems.append(f"the scheduler at {asking} stands by")
                if answer.leader:
                    left.insert(0, answer.leader)
            case messages.AdminError():
                raise PdmeshError(answer.message)
            case _:
                return answer
    raise InstanceUnavailable("; ".join(problems))


async def ask_one(address: str, security: SecurityConfig, question: messages.AdminRequest) -> messages.AdminResponse:
    """Ask one scheduler, as `ask_scheduler` does. The answer may also be a `StandingBy` or an `AdminError`."""
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
    return answer
