"""Streams of tokens to gateways: one for each gateway address, opened at the first request, kept while it is used.

What one step gives is posted in one go and leaves in one frame. Each link remembers its latest messages and sends them
again after a reconnect: a gateway drops what it has by (epoch, index), so a stream that broke costs nothing. One that
was away for longer finds a gap and resumes the requests concerned.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import anyio
import anyio.abc
import structlog

from pdmesh.config import SecurityConfig
from pdmesh.errors import InstanceUnavailable, OutboxFull, ProtocolError, leaves
from pdmesh.model import InstanceId
from pdmesh.wire.endpoint import MeshChannel, open_channel
from pdmesh.wire.link import MAX_QUEUED_MESSAGES, FrameLink, open_link
from pdmesh.wire.messages import RegisterTokens, TokensDown, TokensUp
from pdmesh.worker.reconnect import backoff_s

log = structlog.get_logger()

METHOD = "/pdmesh.v1.Gateway/Tokens"

#: Messages sent again after a reconnect.
NUM_REMEMBERED = 1024

#: A gateway that cannot be reached for so long is forgotten; the next request from it begins anew.
GIVE_UP_S = 30.0

#: For a gateway to read what is left when we stop.
FLUSH_LIMIT_S = 2.0


class TokenLinks:
    """All gateways of one instance. Made by `open_token_links`; a `pdmesh.worker.instance.TokenSink`."""

    def __init__(
        self, tasks: anyio.abc.TaskGroup, registration: RegisterTokens, security: SecurityConfig, max_queued: int
    ) -> None:
        self._tasks = tasks
        self._registration = registration
        self._security = security
        self._max_queued = max_queued
        self._links: dict[str, _GatewayLink] = {}

    def open(self, address: str) -> None:
        """Connect in the background, so that the first token need not wait for it."""
        if address not in self._links:
            link = _GatewayLink(self._registration, self._max_queued)
            self._links[address] = link
            self._tasks.start_soon(self._keep, address, link)

    def send(self, address: str, message: TokensUp) -> None:
        self.open(address)
        self._links[address].send(message)

    async def flush(self) -> None:
        """Send nothing more, and wait for a while until gateways have read what was sent."""
        with anyio.move_on_after(FLUSH_LIMIT_S):
            async with anyio.create_task_group() as tasks:
                for link in self._links.values():
                    tasks.start_soon(link.finish)

    async def _keep(self, address: str, link: _GatewayLink) -> None:
        try:
            async with open_channel(address, self._security) as channel:
                await link.run(channel)
        except TimeoutError:
            log.warning("giving up on a gateway", address=address)
        finally:
            del self._links[address]


class _GatewayLink:
    """The stream to one gateway, over all its reconnects."""

    def __init__(self, registration: RegisterTokens, max_queued: int) -> None:
        self._registration = registration
        self._max_queued = max_queued
        self._remembered: deque[TokensUp] = deque(maxlen=NUM_REMEMBERED)
        self._link: FrameLink[TokensUp, TokensDown] | None = None
        self._session = anyio.CancelScope()
        self._finishing = False
        self._finished = anyio.Event()

    def send(self, message: TokensUp) -> None:
        self._remembered.append(message)
        if self._link is None:
            return
        try:
            self._link.post(message)
        except InstanceUnavailable:  # the stream broke; its session is about to notice
            self._link = None
        except OutboxFull:
            log.error("a gateway does not read its tokens; dropping them")
            self._remembered.clear()
            self._link = None
            self._session.cancel()

    async def finish(self) -> None:
        """Return when the gateway has read everything."""
        self._finishing = True
        if self._link is not None:
            self._link.close()
        await self._finished.wait()

    async def run(self, channel: MeshChannel) -> None:
        """Stay connected until `finish`. Raises TimeoutError if the gateway takes no stream for `GIVE_UP_S`."""
        num_failures = 0
        with anyio.fail_after(GIVE_UP_S) as limit:
            while True:
                await channel.channel_ready()
                num_failures += 1
                try:
                    with anyio.CancelScope() as self._session:
                        await self._serve(channel, limit)
                except* (InstanceUnavailable, ProtocolError) as group:
                    log.warning("lost a gateway's stream", reason="; ".join(str(leaf) for leaf in leaves(group)))
                finally:
                    self._link = None
                if self._finishing:
                    break
                if limit.deadline == math.inf:
                    num_failures = 0
                    limit.deadline = anyio.current_time() + GIVE_UP_S
                await anyio.sleep(backoff_s(num_failures))
        self._finished.set()

    async def _serve(self, channel: MeshChannel, limit: anyio.CancelScope) -> None:
        """One stream, until it ends; ``limit`` is lifted once the gateway has accepted it."""
        async with open_link(channel, METHOD, TokensDown, max_queued=self._max_queued) as link:
            link.post(self._registration)
            for message in self._remembered:
                link.post(message)
            self._link = link
            if self._finishing:
                link.close()
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(link.pump)
                async for _accepted in link.frames():
                    limit.deadline = math.inf
                tasks.cancel_scope.cancel()


@asynccontextmanager
async def open_token_links(
    instance_id: InstanceId, security: SecurityConfig, *, max_queued: int = MAX_QUEUED_MESSAGES
) -> AsyncGenerator[TokenLinks]:
    """Links that live as long as the block."""
    registration = RegisterTokens(instance_id=instance_id)
    async with anyio.create_task_group() as tasks:
        yield TokenLinks(tasks, registration, security, max_queued)
        tasks.cancel_scope.cancel()
