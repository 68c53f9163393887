"""What stands before every call of the gRPC edge: the key, before a message is read, and messages that are none."""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeAlias

import grpc
import grpc.aio
from google.protobuf.message import DecodeError
from grpc_health.v1 import health

from pdmesh.errors import RequestRejected
from pdmesh.wire.endpoint import metadata_of, refusal
from pdmesh_gateway.auth import ApiKeys

_Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"


class Guard(grpc.aio.ServerInterceptor):
    """Probes carry no key, as over HTTP; all else needs one, reflection too."""

    def __init__(self, keys: ApiKeys) -> None:
        self._keys = keys

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[_Handler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> _Handler | None:
        if not handler_call_details.method.startswith(f"/{health.SERVICE_NAME}/"):
            try:
                self._keys.check(metadata_of(handler_call_details).get("authorization"))
            except RequestRejected as error:
                return refusal(grpc.StatusCode.UNAUTHENTICATED, error.message)
        handler = await continuation(handler_call_details)
        return None if handler is None else _careful(handler)


def _careful(handler: _Handler) -> _Handler:
    """``handler``, which ends a call with INVALID_ARGUMENT where a message is malformed; gRPC itself would log a
    traceback and answer UNKNOWN.
    """
    parse = handler.request_deserializer

    def parsed(data: bytes) -> Any:
        try:
            return data if parse is None else parse(data)
        except DecodeError:
            return None

    async def checked(request: Any, context: Any) -> Any:
        if request is None:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "The message is not of the type that is expected.")
        return request

    if handler.unary_unary is not None:
        unary: Any = handler.unary_unary

        async def one_to_one(request: Any, context: Any) -> Any:
            return await unary(await checked(request, context), context)

        return grpc.unary_unary_rpc_method_handler(one_to_one, parsed, handler.response_serializer)

    if handler.unary_stream is not None:
        stream: Any = handler.unary_stream
        if not inspect.isasyncgenfunction(stream):  # it writes to the context by itself

            async def one_to_written(request: Any, context: Any) -> None:
                await stream(await checked(request, context), context)

            return grpc.unary_stream_rpc_method_handler(one_to_written, parsed, handler.response_serializer)

        async def one_to_many(request: Any, context: Any) -> AsyncIterator[Any]:
            async for response in stream(await checked(request, context), context):
                yield response

        return grpc.unary_stream_rpc_method_handler(one_to_many, parsed, handler.response_serializer)

    streams: Any = handler.stream_stream

    async def many_to_many(requests: Any, context: Any) -> AsyncIterator[Any]:
        async def all_checked() -> AsyncIterator[Any]:
            async for request in requests:
                yield await checked(request, context)

        async for response in streams(all_checked(), context):
            yield response

    return grpc.stream_stream_rpc_method_handler(many_to_many, parsed, handler.response_serializer)
