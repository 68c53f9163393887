"""The life of a long-lived stream between two services, the same for all: registration, welcome, heartbeats, loss.

The client's end is a `Session`: it registers, is welcomed, sends heartbeats, and begins anew, after a pause, whenever
the stream ends. The server's end is served by `registration` and `converse`. Every wait for the other side has a time
limit.
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

#: For the first message of either side, and for the server to hear a client's last.
ANSWER_LIMIT_S = 10.0

#: Pauses between attempts: doubled from the first to the last, each cut by a random part, so that a mesh does not knock
#: all at once. The last is below the scheduler's grace for orphans, so that residents are claimed in time.
FIRST_PAUSE_S = 0.1
LAST_PAUSE_S = 1.0


class Versioned(Protocol):
    """A registration, which says which protocol version its sender speaks."""

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
    """What a welcome says about heartbeats and silence."""

    heartbeat_s: float | None = None  # how often to say that we live; None: never
    #: So many heartbeats without a word back and the stream is given up; None: gRPC's keepalive decides. They do not
    #: become more while this process stands still.
    max_unanswered: int | None = None


class Talk(Protocol[SaysT, HearsT]):
    """The messages of a client's stream: what it says, and what it does with what it hears."""

    async def prepare(self) -> None:
        """Get ready to register; awaited before each registration."""
        ...

    def opening(self) -> Sequence[SaysT]:
        """Return the registration, as things are now, and the messages that follow it at once."""
        ...

    def welcomed(self, welcome: Any) -> Terms:
        """Return the terms of a welcome, the first message of the server. Raises ProtocolError if it is no welcome."""
        ...

    def heartbeat(self) -> SaysT:
        """Return a heartbeat; called only if the terms have heartbeats."""
        ...

    def handle(self, message: HearsT) -> None:
        """Take a message that came after the welcome."""
        ...

    def overflowed(self) -> None:
        """Note that the peer does not read: messages queued for it are dropped, and the stream begins anew."""
        ...

    def lost(self) -> None:
        """Note that the stream ended, or could not be opened."""
        ...


class Session(Generic[SendT, RecvT]):
    """A stream that is kept up whenever possible. Only `run` and `finish` wait."""

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
        """``answer_limit_s`` is for the welcome, ``interval_s`` the least time between two frames."""
        self._channel = channel
        self._answer_limit_s = answer_limit_s
        self._method = method
        self._receive_type = receive_type
        self._talk = talk
        self._max_queued = max_queued
        self._interval_s = interval_s
        self._link: FrameLink[SendT, RecvT] | None = None
        self._scope = anyio.CancelScope()
        self._pause_s = 0.0  # so far
        self._num_unanswered = 0  # heartbeats since the peer's last word
        #: Whether the last stream was given up because the peer was silent, though it was not broken.
        self.was_silent = False
        self._finishing = False
        self._finished = anyio.Event()

    def post(self, message: SendT) -> bool:
        """Queue a message behind the registration; False if there is no stream to carry it."""
        if self._link is None:
            return False
        try:
            self._link.post(message)
        except InstanceUnavailable:  # the stream broke, and is about to notice
            self._link = None
        except OutboxFull as error:
            late_logger().error("a peer does not read its stream; reconnecting", method=self._method, error=str(error))
            self._link = None
            self._talk.overflowed()
            self._scope.cancel()
        return self._link is not None

    async def run(self) -> None:
        """Stay connected until cancelled or `finish`."""
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
        """Post nothing more, and return when the peer has read everything."""
        self._finishing = True
        if self._link is not None:
            self._link.close()
        await self._finished.wait()

    async def _hold(self) -> None:
        """One stream, until it ends."""
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
            self._link = link  # what is posted from here on comes after the registration
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
                raise TimeoutError(f"no word from the peer for {max_unanswered * heartbeat_s:g} s")
            self._num_unanswered += 1
            link.post(self._talk.heartbeat())
            await anyio.sleep(heartbeat_s)


async def _next(frames: AsyncIterator[list[RecvT]], limit_s: float | None) -> list[RecvT] | None:
    """The next frame, or None at the end of the stream. Raises TimeoutError."""
    frame: list[RecvT] | None = None
    with anyio.fail_after(limit_s):
        frame = await anext(frames, None)
    return frame


# --- the server's end ---


async def registration(
    frames: AsyncIterator[list[Any]], message_type: type[RegistrationT]
) -> tuple[RegistrationT, list[Any]]:
    """Return the other end's registration and the messages that came in the same frame. Raises ProtocolError."""
    with anyio.move_on_after(ANSWER_LIMIT_S):
        match await anext(frames, []):
            case [first, *rest] if isinstance(first, message_type):
                if first.version != PROTOCOL_VERSION:
                    raise ProtocolError(f"protocol version {first.version}, ours is {PROTOCOL_VERSION}: update both")
                return first, rest
            case _:
                raise ProtocolError(f"the first message must be {message_type.__name__}")
    raise ProtocolError(f"no {message_type.__name__} within {ANSWER_LIMIT_S:g} s")


class Silence:
    """How long a peer has said nothing, in ticks of this process: while it stands still, there are none."""

    def __init__(self, tick_s: float, max_ticks: int) -> None:
        self._tick_s = tick_s
        self._max_ticks = max_ticks
        self._num_ticks = 0

    def heard(self) -> None:
        """Note that the peer has said something."""
        self._num_ticks = 0

    @property
    def is_too_long(self) -> bool:
        return self._num_ticks >= self._max_ticks

    async def watch(self) -> None:
        """Raise InstanceUnavailable once the peer has been silent for too long."""
        while not self.is_too_long:
            await anyio.sleep(self._tick_s)
            self._num_ticks += 1
        raise InstanceUnavailable(f"no word for {self._max_ticks * self._tick_s:g} s")


async def converse(
    link: FrameLink[Any, Any],
    read: Callable[[], Awaitable[None]],
    stopping: anyio.Event | None = None,
    silence: Silence | None = None,
) -> None:
    """Write the link's messages and ``read`` the peer's until the peer ends the stream, or until ``stopping``.

    With ``silence`` the stream is given up once the peer has said nothing for too long; ``read`` tells what was heard.
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
