"""A side of a long-lived frame stream: a bounded outbox, a writer, and decoded frames to read.

A `FrameLink` is the same for the client's and the server's end of a gRPC stream. ``post`` never blocks: messages that
are posted while a frame is being sent leave together in the next frames, so a burst costs few gRPC messages.
"""

from __future__ import annotations

import asyncio
import math
import struct
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, Generic, Protocol, TypeVar

import anyio
import anyio.lowlevel
import grpc
import grpc.aio
import msgspec

from pdmesh.errors import InstanceUnavailable, OutboxFull, ProtocolError, leaves
from pdmesh.late_logger import late_logger
from pdmesh.wire.rejected_peers import RejectedPeerKind
from pdmesh.wire.roles import RoleRule

SendT = TypeVar("SendT")
RecvT = TypeVar("RecvT")
T = TypeVar("T")

#: Maximum size of a frame, enough for a prompt of several million tokens. gRPC refuses larger ones before reading them.
MAX_FRAME_BYTES = 64 * 1024 * 1024

#: A frame of this size takes no further message. Only a single message can make it exceed `MAX_FRAME_BYTES`.
FRAME_BYTES = 1024 * 1024

#: msgpack's head of an array, with a 32-bit count that is filled in last.
_FRAME_HEAD = b"\xdd\0\0\0\0"

#: Maximum number of messages in an outbox. A peer with a full outbox is not reading.
MAX_QUEUED_MESSAGES = 65_536

#: Options of all channels and servers. Keepalive ends connections to peers that do not answer (half-open TCP).
GRPC_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_send_message_length", MAX_FRAME_BYTES),
    ("grpc.max_receive_message_length", MAX_FRAME_BYTES),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.so_reuseport", 0),
    # A proxy of the environment is for the internet, not for the mesh's services.
    ("grpc.enable_http_proxy", 0),
    # Waits between connection attempts. gRPC's defaults (1 s to 2 min) would outlast a restart's grace.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 1_000),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    # A service restarted elsewhere has another address under its name. The default is 30 s.
    ("grpc.dns_min_time_between_resolutions_ms", 250),
)


class Channel(Protocol):
    """The gRPC channel that a stream is opened on; `pdmesh.wire.endpoint.open_channel` makes one."""

    def stream_stream(self, method: str) -> Callable[..., Any]:
        """Return a function that begins a call of ``method``."""
        ...


class FrameLink(Generic[SendT, RecvT]):
    """A typed, framed, bidirectional stream.

    Run `pump` in a task group; it returns when `close` was called and the outbox is drained, and raises
    `InstanceUnavailable` when the stream breaks. Read with ``async for messages in link.frames()``.
    """

    def __init__(
        self,
        *,
        write: Callable[[bytes], Awaitable[Any]],
        read: Callable[[], Awaitable[Any]],
        receive_type: Any,
        max_queued: int = MAX_QUEUED_MESSAGES,
        interval_s: float = 0.0,
        finish: Callable[[], Awaitable[Any]] | None = None,
    ) -> None:
        """``interval_s`` is the minimum time between the starts of two frames. ``finish`` half-closes the stream."""
        self._write = write
        self._read = read
        self._finish = finish
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[list[RecvT]] = msgspec.msgpack.Decoder(list[receive_type])
        self._outbox: deque[SendT] = deque()
        self._max_queued = max_queued
        self._interval_s = interval_s
        self._wake = anyio.Event()
        self._closed = False

    def post(self, message: SendT) -> None:
        """Queue a message. Raises `OutboxFull` if the peer does not read, `InstanceUnavailable` after `close`."""
        if self._closed:
            raise InstanceUnavailable("the stream is closed")
        if len(self._outbox) >= self._max_queued:
            raise OutboxFull(f"{self._max_queued} messages are waiting for a peer that does not read")
        self._outbox.append(message)
        self._wake.set()

    def close(self) -> None:
        """Refuse further messages; `pump` ends once the queued ones have been written.

        A client's end is then half-closed: when `frames` ends too, the peer has read everything.
        """
        self._closed = True
        self._wake.set()

    async def pump(self) -> None:
        """Write frames until the link is closed and its outbox empty. Raises InstanceUnavailable on a broken stream."""
        next_s = -math.inf
        try:
            while not (self._closed and not self._outbox):
                if not self._outbox:
                    self._wake = anyio.Event()
                    await self._wake.wait()
                    continue
                if self._interval_s:
                    if (now_s := anyio.current_time()) < next_s and not self._closed:
                        await anyio.sleep(next_s - now_s)
                    next_s = anyio.current_time() + self._interval_s
                await _of_call(self._write(self._next_frame()))
            if self._finish is not None:
                await _of_call(self._finish())
        except (grpc.RpcError, grpc.aio.UsageError, asyncio.InvalidStateError) as error:  # the last: RPC has ended
            self._closed = True
            raise InstanceUnavailable(f"the peer's stream broke: {_describe(error)}") from error

    def _next_frame(self) -> bytes:
        """Remove and encode the first messages of the outbox, as many as one frame takes."""
        frame = bytearray(_FRAME_HEAD)
        num_messages = 0
        while self._outbox and len(frame) < FRAME_BYTES:
            self._encoder.encode_into(self._outbox.popleft(), frame, -1)
            num_messages += 1
        struct.pack_into(">I", frame, 1, num_messages)
        return bytes(frame)

    async def frames(self) -> AsyncIterator[list[RecvT]]:
        """Yield the messages of each frame until the peer ends the stream.

        Raises `ProtocolError` for a malformed frame and `InstanceUnavailable` when the stream breaks.
        """
        while True:
            try:
                data = await _of_call(self._read())
            except grpc.RpcError as error:
                raise InstanceUnavailable(f"the peer's stream broke: {_describe(error)}") from error
            if data is grpc.aio.EOF:
                return
            try:
                yield self._decoder.decode(data)
            except (msgspec.MsgspecError, ValueError, RecursionError) as error:  # ValueError: invalid UTF-8
                raise ProtocolError(f"malformed frame of {len(data)} bytes: {error}") from error


async def _of_call(operation: Awaitable[T]) -> T:
    """Await an operation of a gRPC call. Raises InstanceUnavailable if the call was cancelled, but not this task.

    grpc.aio answers a cancellation with a new, bare CancelledError, and raises one for a call that has been cancelled
    already. Task groups do not recognise these as their own, so they would unwind the whole service without an error.
    """
    try:
        return await operation
    except asyncio.CancelledError:
        await anyio.lowlevel.checkpoint_if_cancelled()  # raises if this scope is cancelled
        task = asyncio.current_task()
        if task is None or task.cancelling():  # gRPC's server ends a handler
            raise
        raise InstanceUnavailable("the call was cancelled") from None


def _describe(error: Exception) -> str:
    if isinstance(error, grpc.aio.AioRpcError):
        return f"{error.code().name}: {error.details()}"
    return str(error) or type(error).__name__


@asynccontextmanager
async def open_link(
    channel: Channel,
    method: str,
    receive_type: Any,
    *,
    max_queued: int = MAX_QUEUED_MESSAGES,
    interval_s: float = 0.0,
) -> AsyncGenerator[FrameLink[Any, Any]]:
    """Yield the client's end of a stream. The call is cancelled when the block is left."""
    call = channel.stream_stream(method)()
    try:
        yield FrameLink(
            write=call.write,
            read=call.read,
            receive_type=receive_type,
            max_queued=max_queued,
            interval_s=interval_s,
            finish=call.done_writing,
        )
    finally:
        call.cancel()


def serve_link(
    serve: Callable[[FrameLink[Any, Any], str], Awaitable[None]], receive_type: Any, rule: RoleRule | None = None
) -> grpc.RpcMethodHandler[Any, Any]:
    """Return a generic handler that passes the server's end of each stream, with the peer's name, to ``serve``.

    A `ProtocolError`, even one raised inside a task group, ends only its stream, with INVALID_ARGUMENT and the reason.
    An `InstanceUnavailable` ends it with UNAVAILABLE. A peer that ``rule`` refuses gets PERMISSION_DENIED.
    """

    async def handle(_requests: Any, context: Any) -> None:
        link: FrameLink[Any, Any] = FrameLink(write=context.write, read=context.read, receive_type=receive_type)
        # Otherwise the first message's write sends the metadata, and no call can be aborted during a write.
        await context.send_initial_metadata(())
        if rule is not None and (why_not := rule.why_not(context)) is not None:
            rule.rejected_peers.refuse(RejectedPeerKind.ROLE)
            late_logger().error("a peer was refused", peer=context.peer(), reason=why_not)
            await context.abort(grpc.StatusCode.PERMISSION_DENIED, why_not)
        try:
            await serve(link, str(context.peer()))
        except* ProtocolError as group:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(leaves(group)[0]))
        except* InstanceUnavailable as group:
            await context.abort(grpc.StatusCode.UNAVAILABLE, str(leaves(group)[0]))

    return grpc.stream_stream_rpc_method_handler(handle)
