"""Streams of workers and gateways, by the id of who is at the other end, and their leases."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import anyio
import structlog

from pdmesh.errors import InstanceUnavailable, OutboxFull, ProtocolError, leaves
from pdmesh.wire.link import FrameLink

log = structlog.get_logger()

IdT = TypeVar("IdT", bound=str)
DownT = TypeVar("DownT")
MessageT = TypeVar("MessageT")

#: For a peer that has opened a stream to say who it is.
REGISTRATION_LIMIT_S = 10.0


@dataclass(frozen=True, slots=True, eq=False)
class Connection(Generic[IdT, DownT]):
    """A registered stream. Cancelling its scope ends it."""

    peer_id: IdT
    link: FrameLink[DownT, Any]
    scope: anyio.CancelScope


class Peers(Generic[IdT, DownT]):
    """Who is connected. A peer that registers again takes the place of its old stream."""

    def __init__(self) -> None:
        self._connections: dict[IdT, Connection[IdT, DownT]] = {}

    def __len__(self) -> int:
        return len(self._connections)

    def __iter__(self) -> Iterator[IdT]:
        return iter(tuple(self._connections))

    def add(self, connection: Connection[IdT, DownT]) -> None:
        self.end(connection.peer_id)
        self._connections[connection.peer_id] = connection

    def remove(self, connection: Connection[IdT, DownT]) -> bool:
        """Whether it still was its peer's stream."""
        if self._connections.get(connection.peer_id) is not connection:
            return False
        del self._connections[connection.peer_id]
        return True

    def end(self, peer_id: IdT) -> None:
        """Forget a peer's stream and end it, if there is one."""
        connection = self._connections.pop(peer_id, None)
        if connection is not None:
            connection.scope.cancel()

    def post(self, peer_id: IdT, message: DownT) -> None:
        """Send, or drop the message if the peer is away: registering again tells both sides all they must know."""
        connection = self._connections.get(peer_id)
        if connection is None:
            return
        try:
            connection.link.post(message)
        except InstanceUnavailable:
            pass  # its stream is about to end
        except OutboxFull as error:
            log.error("a peer does not read its stream", peer=peer_id, error=str(error))
            connection.scope.cancel()


class Leases(Generic[IdT]):
    """Who must be heard of, and until when. All leases are equally long."""

    def __init__(self, lease_s: float) -> None:
        self._lease_s = lease_s
        self._deadlines: dict[IdT, float] = {}
        self._first = anyio.Event()

    def renew(self, peer_id: IdT) -> None:
        self._deadlines[peer_id] = anyio.current_time() + self._lease_s
        self._first.set()

    def drop(self, peer_id: IdT) -> None:
        self._deadlines.pop(peer_id, None)

    async def run(self, expired: Callable[[IdT], None]) -> None:
        """Call ``expired`` once for each lease that runs out."""
        while True:
            if not self._deadlines:
                self._first = anyio.Event()
                await self._first.wait()
            await anyio.sleep_until(min(self._deadlines.values()))
            now_s = anyio.current_time()
            for peer_id in [peer_id for peer_id, deadline_s in self._deadlines.items() if deadline_s <= now_s]:
                del self._deadlines[peer_id]
                expired(peer_id)


async def first_message(frames: AsyncIterator[list[Any]], message_type: type[MessageT]) -> tuple[MessageT, list[Any]]:
    """A stream's registration, and what came in the same frame. Raises ProtocolError."""
    with anyio.move_on_after(REGISTRATION_LIMIT_S):
        match await anext(frames, []):
            case [first, *rest] if isinstance(first, message_type):
                return first, rest
            case _:
                raise ProtocolError(f"the first message must be {message_type.__name__}")
    raise ProtocolError(f"no {message_type.__name__} within {REGISTRATION_LIMIT_S:g} s")


async def converse(link: FrameLink[Any, Any], read: Callable[[], Awaitable[None]], stopping: anyio.Event) -> None:
    """Write and ``read`` until the peer ends the stream.

    Raises ProtocolError or InstanceUnavailable bare, as `pdmesh.wire.link.serve_link` wants them.
    """

    async def end_at_stop() -> None:
        await stopping.wait()
        raise InstanceUnavailable("the scheduler is stopping")

    try:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(link.pump)
            tasks.start_soon(end_at_stop)
            await read()
            tasks.cancel_scope.cancel()
    except BaseExceptionGroup as group:
        errors = leaves(group)
        unexpected = [error for error in errors if not isinstance(error, ProtocolError | InstanceUnavailable)]
        raise (unexpected or errors)[0] from None
