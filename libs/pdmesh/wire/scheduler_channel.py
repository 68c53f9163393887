"""The connection of workers and gateways to the leading scheduler, at one of several addresses.

A standby scheduler names the leader. If it knows no leader, it is asked again, because it may lead next. Leaders have
*terms*, each higher than all before. A client that knows of a term refuses earlier leaders, which were stopped or cut
off and do not know yet that another scheduler leads.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import anyio

from pdmesh.config import SecurityConfig
from pdmesh.errors import InstanceUnavailable, ProtocolError
from pdmesh.late_logger import late_logger
from pdmesh.wire.endpoint import MeshChannel, open_channel
from pdmesh.wire.messages import StandingBy, WelcomeGateway, WelcomeWorker
from pdmesh.wire.session import ANSWER_LIMIT_S

WelcomeT = TypeVar("WelcomeT", WelcomeWorker, WelcomeGateway)

#: Time limits for one of several addresses to accept a connection and to send its welcome: another may lead meanwhile.
CONNECT_LIMIT_S = 1.0
WELCOME_LIMIT_S = 2.0

#: Pause after all addresses were tried in vain.
ROUND_PAUSE_S = 0.2


def scheduler_addresses(setting: str) -> tuple[str, ...]:
    """Return the addresses of a `MeshConfig.scheduler_address`. A gRPC target, such as ``ipv4:a:1,b:2``, is one
    address.
    """
    if setting.startswith(("ipv4:", "ipv6:", "dns:", "unix:")):
        return (setting,)
    return tuple(address.strip() for address in setting.split(",") if address.strip())


class SchedulerChannel:
    """A channel to the leading scheduler. Made by `open_scheduler_channel`.

    Implements `pdmesh.wire.session.ReadyChannel`: each `channel_ready` tries the leader that was named, or else the
    next address. ``unreached_leader`` is the address of a leader that fell silent, or could not be reached since it was
    named.
    """

    def __init__(self, addresses: Sequence[str], security: SecurityConfig) -> None:
        self._addresses = tuple(addresses)
        self._security = security
        self._channels: dict[str, MeshChannel] = {}
        self._num_tried = 0
        self._next: str | None = None  # tried before the other addresses
        self._is_silent = False
        self._named_by: str | None = None
        self._address = ""
        self.unreached_leader = ""
        self._term = 0

    @property
    def answer_limit_s(self) -> float:
        """Time limit in seconds for the first message on a stream."""
        return ANSWER_LIMIT_S if len(self._addresses) == 1 else WELCOME_LIMIT_S

    async def channel_ready(self) -> None:
        """Wait until a scheduler is connected: the leader that was named, or one of the addresses."""
        if len(self._addresses) == 1 and self._next is None:
            self._address = self._addresses[0]
            await self._channel(self._address).channel_ready()
            return
        while True:
            self._address = self._take_next()
            await self._close_others()
            with anyio.move_on_after(CONNECT_LIMIT_S):
                if await self._channel(self._address).connect():
                    return
            if self._named_by:
                self.unreached_leader = self._address
                self._next, self._named_by = self._named_by, None  # the standby may lead soon
            elif self._num_tried % len(self._addresses) == 0:
                await anyio.sleep(ROUND_PAUSE_S)

    def stream_stream(self, method: str) -> Callable[..., Any]:
        """Return a function that begins a call of ``method`` on the connected scheduler."""
        return self._channel(self._address).stream_stream(method)

    def check(self, first: object, kind: type[WelcomeT]) -> WelcomeT:
        """Return a scheduler's first message, which must be a welcome of type ``kind``.

        Raises InstanceUnavailable if the scheduler does not lead, or a later leader is known. Raises ProtocolError for
        any other message.
        """
        if isinstance(first, StandingBy):
            self._next = first.leader or self._address
            self._named_by = self._address if first.leader else None
            raise InstanceUnavailable(f"{self._address} is a standby; the leader is {first.leader or 'unknown'}")
        if not isinstance(first, kind):
            raise ProtocolError(f"the scheduler's first message must be {kind.__name__}")
        welcome = first
        if 0 < welcome.term < self._term:
            late_logger().error("refused an earlier leading scheduler", address=self._address, term=welcome.term)
            raise InstanceUnavailable(
                f"{self._address} leads in an earlier term ({welcome.term}) than another scheduler ({self._term})"
            )
        self._term = max(self._term, welcome.term)
        self.unreached_leader = ""
        return welcome

    def fell_silent(self) -> None:
        """Note that the leader in use has been silent for too long: its connection is opened again."""
        self.unreached_leader = self._address
        self._is_silent = True

    async def aclose(self) -> None:
        """Close all connections."""
        while self._channels:
            _, channel = self._channels.popitem()
            await channel.__aexit__(None, None, None)

    def _take_next(self) -> str:
        named, self._next = self._next, None
        if named is not None:
            return named
        self._named_by = None
        self._num_tried += 1
        return self._addresses[(self._num_tried - 1) % len(self._addresses)]

    def _channel(self, address: str) -> MeshChannel:
        if address not in self._channels:
            self._channels[address] = open_channel(address, self._security)
        return self._channels[address]

    async def _close_others(self) -> None:
        """Close the channels of addresses that are neither configured nor chosen now.

        The channel of a leader that fell silent is closed whatever its address, so that the next use opens a new one.
        """
        kept = {*self._addresses, self._address}
        if self._is_silent:
            kept.discard(self.unreached_leader)
            self._is_silent = False
        for address in self._channels.keys() - kept:
            await self._channels.pop(address).__aexit__(None, None, None)


@asynccontextmanager
async def open_scheduler_channel(setting: str, security: SecurityConfig) -> AsyncGenerator[SchedulerChannel]:
    """Yield a channel that is not connected yet, and close the channel at the end of the block.

    `SchedulerChannel.channel_ready` connects to a scheduler among the addresses in ``setting``, a
    `MeshConfig.scheduler_address`.
    """
    channel = SchedulerChannel(scheduler_addresses(setting), security)
    try:
        yield channel
    finally:
        await channel.aclose()
