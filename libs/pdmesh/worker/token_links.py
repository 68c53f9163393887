"""Streams of tokens to gateways: one for each gateway address, opened at the first request and kept while it is used.

The tokens of one step are sent in one frame, and so are the tokens of several steps within a millisecond. Each link
remembers its latest messages and sends them again after a reconnect. The gateway drops known messages by (epoch,
index), so a broken stream costs nothing. After a longer break the gateway finds a gap and resumes the requests
concerned. An unreachable gateway is reported to the scheduler, which may reach it and let other instances serve it.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from itertools import islice
from typing import Any

import anyio
import anyio.abc
import structlog

from pdmesh.config import SecurityConfig
from pdmesh.core.events import TokenLinkReported
from pdmesh.errors import ProtocolError
from pdmesh.model import Epoch, GatewayId, InstanceId, RequestId
from pdmesh.wire.endpoint import MeshChannel, open_channel
from pdmesh.wire.link import MAX_QUEUED_MESSAGES
from pdmesh.wire.messages import (
    RegisterTokens,
    TokenMessage,
    TokensAccepted,
    TokensDown,
    TokensHeard,
    TokensHeartbeat,
    TokensUp,
)
from pdmesh.wire.session import PeerSession, Terms

log = structlog.get_logger()

METHOD = "/pdmesh.v1.Gateway/Tokens"

#: Least time between two frames to a gateway. Steps of a model take longer, and a frame costs more than its tokens.
FRAME_INTERVAL_S = 0.001

#: Number of messages sent again after a reconnect.
NUM_REMEMBERED = 1024

#: Time after which an unreachable gateway is forgotten; the next request from it connects anew.
GIVE_UP_S = 30.0

#: Limits for a gateway to accept the first stream, and another after a break. A living one needs a tenth of them.
FIRST_OPEN_LIMIT_S = 2.0
OPEN_LIMIT_S = 0.5

#: The limit after a break where the gateway had been silent: either the path is broken, or it will be open again soon.
SILENT_OPEN_LIMIT_S = 0.2

#: Interval of repeated reports of an unreachable gateway, since the scheduler forgets them after a while.
REPEAT_S = 10.0

#: Seconds for gateways to read the last messages when the worker stops.
FLUSH_LIMIT_S = 2.0


#: Requests, as (id, epoch), whose last messages a gateway may lack.
Unconfirmed = tuple[tuple[RequestId, Epoch], ...]


class TokenLinks:
    """Streams to all gateways of one instance. Made by `open_token_links`; a `pdmesh.worker.replies.TokenSink`."""

    def __init__(
        self,
        tasks: anyio.abc.TaskGroup,
        registration: RegisterTokens,
        security: SecurityConfig,
        report: Callable[[TokenLinkReported], None],
        max_queued: int,
    ) -> None:
        self._tasks = tasks
        self._registration = registration
        self._security = security
        self._report = report
        self._max_queued = max_queued
        self._links: dict[str, _GatewayLink] = {}

    def open(self, address: str, gateway_id: GatewayId) -> None:
        """Connect to a gateway in the background, so that the first token need not wait for the connection.

        Does nothing if there is a link to ``address``.
        """
        if address not in self._links:

            def report(is_up: bool, unconfirmed: Unconfirmed) -> None:
                self._report(TokenLinkReported(self._registration.instance_id, gateway_id, is_up, unconfirmed))

            channel = open_channel(address, self._security)
            link = self._links[address] = _GatewayLink(channel, self._registration, report, self._max_queued)
            self._tasks.start_soon(self._keep, address, channel, link)

    def send(self, address: str, gateway_id: GatewayId, message: TokenMessage) -> None:
        self.open(address, gateway_id)
        self._links[address].send(message)

    async def flush(self) -> None:
        """Stop sending, and wait until gateways have read all messages, for `FLUSH_LIMIT_S` at most."""
        with anyio.move_on_after(FLUSH_LIMIT_S):
            async with anyio.create_task_group() as tasks:
                for link in self._links.values():
                    tasks.start_soon(link.finish)

    async def _keep(self, address: str, channel: MeshChannel, link: _GatewayLink) -> None:
        try:
            async with channel:
                await link.run()
        except* TimeoutError:
            log.warning("cannot reach a gateway; its requests end here", address=address)
        finally:
            del self._links[address]


class _GatewayLink:
    """The stream to one gateway, over all reconnects.

    ``report`` gets whether the link is up, after it was down for the first time. ``_num_unconfirmed`` counts the last
    remembered messages that no answered heartbeat followed.
    """

    def __init__(
        self,
        channel: MeshChannel,
        registration: RegisterTokens,
        report: Callable[[bool, Unconfirmed], None],
        max_queued: int,
    ) -> None:
        self._registration = registration
        self._report = report
        self._opened, self._broke = anyio.Event(), anyio.Event()
        self._remembered: deque[TokenMessage] = deque(maxlen=NUM_REMEMBERED)
        self._num_unconfirmed = 0
        #: For each unanswered heartbeat: the number of messages sent between it and the next one.
        self._asked: deque[int] = deque()
        self._session: PeerSession[TokensUp, TokensDown] = PeerSession(
            channel, METHOD, TokensDown, self, max_queued=max_queued, interval_s=FRAME_INTERVAL_S
        )
        self._limit = anyio.CancelScope()
        self.finish = self._session.finish

    def send(self, message: TokenMessage) -> None:
        self._remembered.append(message)
        self._num_unconfirmed += 1
        if self._asked:
            self._asked[-1] += 1
        self._session.post(message)

    @property
    def _unconfirmed(self) -> Unconfirmed:
        """Requests with messages that no answered heartbeat followed."""
        num_confirmed = max(0, len(self._remembered) - self._num_unconfirmed)
        messages = islice(self._remembered, num_confirmed, None)
        return tuple(dict.fromkeys((message.request_id, message.epoch) for message in messages))

    async def run(self) -> None:
        """Stay connected until `finish`.

        Raise an ExceptionGroup with a TimeoutError if the gateway takes no stream for `GIVE_UP_S`.
        """
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._watch)
            with anyio.fail_after(GIVE_UP_S) as self._limit:
                await self._session.run()
            tasks.cancel_scope.cancel()

    async def _watch(self) -> None:
        """Report when the link is down for longer than a living gateway needs, and when it is up again."""
        limit_s = FIRST_OPEN_LIMIT_S
        while True:
            with anyio.move_on_after(limit_s):
                await self._opened.wait()
            if not self._opened.is_set():
                while not self._opened.is_set():
                    self._report(False, self._unconfirmed)
                    with anyio.move_on_after(REPEAT_S):
                        await self._opened.wait()
                self._report(True, ())
            await self._broke.wait()
            limit_s = SILENT_OPEN_LIMIT_S if self._session.was_silent else OPEN_LIMIT_S

    # `pdmesh.wire.session.Talk`.

    async def prepare(self) -> None:
        pass

    def opening(self) -> Sequence[TokensUp]:
        return [self._registration, *self._remembered]

    def welcomed(self, welcome: Any) -> Terms:
        if not isinstance(welcome, TokensAccepted):
            raise ProtocolError("the gateway's first message must be TokensAccepted")
        self._limit.deadline = math.inf
        self._broke = anyio.Event()
        self._opened.set()
        return Terms(heartbeat_s=welcome.heartbeat_s, max_unanswered=welcome.max_unanswered)

    def heartbeat(self) -> TokensUp:
        self._asked.append(0)
        return TokensHeartbeat()

    def handle(self, message: TokensDown) -> None:
        match message:
            case TokensHeard():
                # The gateway has all messages that were sent before the answered heartbeat.
                if not self._asked:
                    raise ProtocolError("the gateway answers a heartbeat that was not sent")
                self._num_unconfirmed = sum(self._asked)
                self._asked.popleft()
            case TokensAccepted():
                raise ProtocolError("TokensAccepted twice")

    def overflowed(self) -> None:
        self._remembered.clear()

    def lost(self) -> None:
        self._asked.clear()
        # If the event is not set, the link was down already, and `_watch` waits for the event.
        if self._opened.is_set():
            self._opened = anyio.Event()
            self._broke.set()
        self._limit.deadline = min(self._limit.deadline, anyio.current_time() + GIVE_UP_S)


@asynccontextmanager
async def open_token_links(
    instance_id: InstanceId,
    security: SecurityConfig,
    *,
    report: Callable[[TokenLinkReported], None] = lambda _: None,
    arithmetic: str = "",
    weights: str = "",
    max_queued: int = MAX_QUEUED_MESSAGES,
) -> AsyncGenerator[TokenLinks]:
    """Yield links that live as long as the block.

    ``arithmetic`` is the instance's arithmetic class, and ``weights`` the identity of its weights. ``report`` gets the
    links that are down, or up again.
    """
    registration = RegisterTokens(instance_id=instance_id, arithmetic=arithmetic, weights=weights)
    async with anyio.create_task_group() as tasks:
        yield TokenLinks(tasks, registration, security, report, max_queued)
        tasks.cancel_scope.cancel()
