"""Checks before every call of the gRPC edge: the API key, before a message is read, and malformed messages."""

from __future__ import annotations

import asyncio
import inspect
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from typing import Any, TypeAlias

import grpc
import grpc.aio
from google.protobuf.message import DecodeError
from grpc_health.v1 import health

from pdmesh.errors import RequestRejected
from pdmesh.wire.endpoint import metadata_of, refusal
from pdmesh_gateway.auth import ApiKeys

_Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"


#: Limit of concurrent calls per method of the health service: probes without a key take no place of calls with one.
MAX_PROBES = 64

#: Time for a probe to send its message.
PROBE_LIMIT_S = 5.0


class Guard(grpc.aio.ServerInterceptor):
    """Interceptor that requires a key for every call, reflection included, except probes, whose number is limited."""

    def __init__(self, keys: ApiKeys) -> None:
        self._keys = keys
        #: Running probes by method.
        self._num_probes: Counter[str] = Counter()

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[_Handler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> _Handler | None:
        method = handler_call_details.method
        if method.startswith(f"/{health.SERVICE_NAME}/"):
            handler = await continuation(handler_call_details)
            return None if handler is None else self._probe(method, handler)
        try:
            self._keys.check(metadata_of(handler_call_details).get("authorization"))
        except RequestRejected as error:
            return refusal(grpc.StatusCode.UNAUTHENTICATED, error.message)
        handler = await continuation(handler_call_details)
        return None if handler is None else _careful(handler)

    def _probe(self, method: str, handler: _Handler) -> _Handler:
        """Return ``handler`` with limits for calls without a key.

        At most `MAX_PROBES` calls of ``method`` run at once, and each has `PROBE_LIMIT_S` to send its message. A call
        beyond a limit is refused, and so is a malformed message.

        The result is a handler of streams. gRPC calls a handler of single messages only after the message has arrived,
        which is too late to limit the wait.
        """
        answer: Any = handler.unary_unary or handler.unary_stream

        async def probe(_requests: Any, context: Any) -> None:
            if self._num_probes[method] >= MAX_PROBES:
                await context.abort(
                    grpc.StatusCode.RESOURCE_EXHAUSTED, f"{MAX_PROBES} health probes are already running."
                )
            self._num_probes[method] += 1
            try:
                data: Any = grpc.aio.EOF
                with suppress(TimeoutError):
                    data = await asyncio.wait_for(context.read(), PROBE_LIMIT_S)
                request = None if data is grpc.aio.EOF else data
                if request is None:
                    await context.abort(grpc.StatusCode.INVALID_ARGUMENT, NO_MESSAGE)
                # A handler that writes to the context returns None.
                if (response := await answer(request, context)) is not None:
                    await context.write(response)
            finally:
                self._num_probes[method] -= 1

        return grpc.stream_stream_rpc_method_handler(probe, _parsed(handler), handler.response_serializer)


#: Message of a call that ends because a message is malformed or missing.
NO_MESSAGE = "The message does not have the expected type."


def _parsed(handler: _Handler) -> Callable[[bytes], Any]:
    """Return a parser of the handler's messages that returns None for a malformed one."""
    parse = handler.request_deserializer

    def parsed(data: bytes) -> Any:
        try:
            return data if parse is None else parse(data)
        except DecodeError:
            return None

    return parsed


def _careful(handler: _Handler) -> _Handler:
    """Return ``handler`` with malformed messages ending the call as INVALID_ARGUMENT.

    Without this gRPC would log a traceback and answer UNKNOWN.
    """
    parsed = _parsed(handler)

    async def checked(request: Any, context: Any) -> Any:
        if request is None:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, NO_MESSAGE)
        return request

    if handler.unary_unary is not None:
        unary: Any = handler.unary_unary

        async def one_to_one(request: Any, context: Any) -> Any:
            return await unary(await checked(request, context), context)

        return grpc.unary_unary_rpc_method_handler(one_to_one, parsed, handler.response_serializer)

    if handler.unary_stream is not None:
        stream: Any = handler.unary_stream
        # The handler writes to the context by itself.
        if not inspect.isasyncgenfunction(stream):

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
