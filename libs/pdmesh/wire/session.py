"""A long-lived stream between two services: registration, welcome, heartbeats, loss.

The client's end is a `PeerSession`: it registers, is welcomed, sends heartbeats, and connects again, after a pause,
whenever the stream ends. The server's end is served by `registration` and `converse`. Every wait for the other side has
a time limit.
"""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import anyio

from pdmesh.errors import InstanceUnavailable, OutboxFull, ProtocolError, leaves
from pdmesh.late_logger import late_logger
from pdmesh.wire.link import MAX_QUEUED_MESSAGES, Channel, FrameLink, open_link
from pdmesh.wire.messages import PROTOCOL_VERSION

SendT = TypeVar("SendT")
RecvT = TypeVar("RecvT")
SaysT = TypeVar("SaysT", covariant=True)
HearsT = TypeVar("HearsT", contravariant=True)
RegistrationT = TypeVar("RegistrationT", bound="Versioned")

#: Time limit for the first message of either side, and for the server to read a client's last one.
ANSWER_LIMIT_S = 10.0

#: Pauses between attempts: doubled from the first to the last, each cut by a random part, so that services do not all
#: connect at once. The last is below the scheduler's grace for orphans, so that residents are claimed in time.
FIRST_PAUSE_S = 0.1
LAST_PAUSE_S = 1.0


class Versioned(Protocol):
    """A registration with the protocol version of its sender."""

    @property
    def version(self) -> int: ...


# --- the client's end ---


class ReadyChannel(Channel, Protocol):
    """The channel that a session uses; `pdmesh.wire.endpoint.open_channel` makes one."""

    async def channel_ready(self) -> None:
        """Wait until the channel is connected."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """Intervals that a welcome sets. ``heartbeat_s`` is None for no heartbeats.

    After ``max_unanswered`` heartbeats without any message from the peer, the stream is closed; None: gRPC's keepalive
    decides. While this process is paused, the count does not grow.
    """

    heartbeat_s: float | None = None
    max_unanswered: int | None = None


class Talk(Protocol[SaysT, HearsT]):
    """The messages of a client's stream: messages to send, and the handling of received ones."""

    async def prepare(self) -> None:
        """Get ready to register; awaited before each registration."""
        ...

    def opening(self) -> Sequence[SaysT]:
        """Return the current registration, and the messages that follow it at once."""
        ...

    def welcomed(self, welcome: Any) -> Terms:
        """Return the terms of the server's first message. Raises ProtocolError if it is no welcome."""
        ...

    def heartbeat(self) -> SaysT:
        """Return a heartbeat; called only if the terms have heartbeats."""
        ...

    def handle(self, message: HearsT) -> None:
        """Handle a message that came after the welcome."""
        ...

    def overflowed(self) -> None:
        """Handle a peer that does not read: the queued messages are dropped, and the session connects again."""
        ...

    def lost(self) -> None:
        """Handle the end of the stream, or a failed attempt to open it."""
        ...


class PeerSession(Generic[SendT, RecvT]):
    """A stream that reconnects whenever it ends. Only `run` and `finish` wait.

    ``was_silent`` is set if the last stream was closed because the peer was silent.
    """

    def __init__(
        self,
        channel: ReadyChannel,
        method: str,
        receive_type: Any,
        talk: Talk[SendT, RecvT],
        *,
        max_queued: int = MAX_QUEUED_MESSAGES,
        answer_limit_s: float = ANSWER_LIMIT_S,
        interval_s: float = 0.0,
    ) -> None:
        """``answer_limit_s`` limits the wait for the welcome. ``interval_s`` is the minimum time between two frames."""
        self._channel = channel
        self._answer_limit_s = answer_limit_s
        self._method = method
        self._receive_type = receive_type
        self._talk = talk
        self._max_queued = max_queued
        self._interval_s = interval_s
        self._link: FrameLink[SendT, RecvT] | None = None
        self._scope = anyio.CancelScope()
        self._pause_s = 0.0
        self._num_unanswered = 0
        self.was_silent = False
        self._finishing = False
        self._finished = anyio.Event()

    def post(self, message: SendT) -> bool:
        """Queue a message after the registration. Return False if no stream can carry it."""
        if self._link is None:
            return False
        try:
            self._link.post(message)
        except InstanceUnavailable:
            self._link = None
        except OutboxFull as error:
            late_logger().error("a peer does not read its stream; reconnecting", method=self._method, error=str(error))
            self._link = None
            self._talk.overflowed()
            self._scope.cancel()
        return self._link is not None

    async def run(self) -> None:
        """Stay connected, reconnecting after pauses, until cancelled or `finish`."""
        while True:
            await self._channel.channel_ready()
            reason, self.was_silent = "the peer ended it", False
            try:
                with anyio.CancelScope() as self._scope:
                    await self._hold()
            except* (InstanceUnavailable, OutboxFull, ProtocolError, TimeoutError) as group:
                reason = "; ".join(str(leaf) or type(leaf).__name__ for leaf in leaves(group))
            finally:
                self._link = None
                self._talk.lost()
            if self._finishing:
                break
            late_logger().warning("a stream ended", method=self._method, reason=reason)
            self._pause_s = min(max(2 * self._pause_s, FIRST_PAUSE_S), LAST_PAUSE_S)
            await anyio.sleep(self._pause_s * random.uniform(0.5, 1.0))
        self._finished.set()

    async def finish(self) -> None:
        """Post no more messages. Return when the peer has read everything, or the stream has ended."""
        self._finishing = True
        if self._link is not None:
            self._link.close()
        await self._finished.wait()

    async def _hold(self) -> None:
        """Open one stream and serve it until it ends. Raise InstanceUnavailable if it ends unanswered."""
        talk = self._talk
        await talk.prepare()
        async with (
            open_link(
                self._channel,
                self._method,
                self._receive_type,
                max_queued=self._max_queued,
                interval_s=self._interval_s,
            ) as link,
            anyio.create_task_group() as tasks,
        ):
            for said in talk.opening():
                link.post(said)
            self._link = link  # `post` queues after the registration
            if self._finishing:
                link.close()
            tasks.start_soon(link.pump)
            frames = link.frames()
            first = await _next(frames, self._answer_limit_s)
            if not first:
                raise InstanceUnavailable("the peer ended the stream")
            terms = talk.welcomed(first[0])
            self._pause_s = 0.0
            if terms.heartbeat_s is not None:
                tasks.start_soon(self._beat, link, terms.heartbeat_s, terms.max_unanswered)
            frame: list[RecvT] | None = first[1:]
            while frame is not None:
                self._num_unanswered = 0
                for message in frame:
                    talk.handle(message)
                frame = await anext(frames, None)
            tasks.cancel_scope.cancel()

    async def _beat(self, link: FrameLink[SendT, RecvT], heartbeat_s: float, max_unanswered: int | None) -> None:
        while not self._finishing:
            if max_unanswered is not None and self._num_unanswered >= max_unanswered:
                self.was_silent = True
                raise TimeoutError(f"no message from the peer for {max_unanswered * heartbeat_s:g} s")
            self._num_unanswered += 1
            link.post(self._talk.heartbeat())
            await anyio.sleep(heartbeat_s)


async def _next(frames: AsyncIterator[list[RecvT]], limit_s: float | None) -> list[RecvT] | None:
    """Return the next frame, or None at the end of the stream. Raises TimeoutError after ``limit_s``."""
    frame: list[RecvT] | None = None
    with anyio.fail_after(limit_s):
        frame = await anext(frames, None)
    return frame


# --- the server's end ---


async def registration(
    frames: AsyncIterator[list[Any]], message_type: type[RegistrationT]
) -> tuple[RegistrationT, list[Any]]:
    """Return the peer's registration and the messages that came in the same frame.

    Raise ProtocolError if none comes in time or its version differs.
    """
    with anyio.move_on_after(ANSWER_LIMIT_S):
        match await anext(frames, []):
            case [first, *rest] if isinstance(first, message_type):
                if first.version != PROTOCOL_VERSION:
                    raise ProtocolError(
                        f"protocol version {first.version} differs from {PROTOCOL_VERSION} here: install the same "
                        "version of pdmesh on both sides"
                    )
                return first, rest
            case _:
                raise ProtocolError(f"the first message must be {message_type.__name__}")
    raise ProtocolError(f"no {message_type.__name__} within {ANSWER_LIMIT_S:g} s")


class Silence:
    """Duration of a peer's silence, in ticks of this process. While this process is paused, the count does not grow."""

    def __init__(self, tick_s: float, max_ticks: int) -> None:
        self._tick_s = tick_s
        self._max_ticks = max_ticks
        self._num_ticks = 0

    def heard(self) -> None:
        """Note that the peer has sent a message."""
        self._num_ticks = 0

    @property
    def is_too_long(self) -> bool:
        return self._num_ticks >= self._max_ticks

    async def watch(self) -> None:
        """Raise InstanceUnavailable once the peer has been silent for too long."""
        while not self.is_too_long:
            await anyio.sleep(self._tick_s)
            self._num_ticks += 1
        raise InstanceUnavailable(f"no message for {self._max_ticks * self._tick_s:g} s")


async def converse(
    link: FrameLink[Any, Any],
    read: Callable[[], Awaitable[None]],
    stopping: anyio.Event | None = None,
    silence: Silence | None = None,
) -> None:
    """Write the link's messages and ``read`` the peer's until the peer ends the stream, or until ``stopping``.

    With ``silence`` the stream ends once the peer has been silent for too long; ``read`` must call `Silence.heard`.
    Raises ProtocolError or InstanceUnavailable outside of any exception group, as `pdmesh.wire.link.serve_link`
    expects.
    """

    async def end_at_stop(stopping: anyio.Event) -> None:
        await stopping.wait()
        raise InstanceUnavailable("the service is stopping")

    try:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(link.pump)
            if stopping is not None:
                tasks.start_soon(end_at_stop, stopping)
            if silence is not None:
                tasks.start_soon(silence.watch)
            await read()
            tasks.cancel_scope.cancel()
    except BaseExceptionGroup as group:
        errors = leaves(group)
        unexpected = [error for error in errors if not isinstance(error, ProtocolError | InstanceUnavailable)]
        raise (unexpected or errors)[0] from None
