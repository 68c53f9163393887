"""Streams of workers and gateways, by the id of the peer at the other end, and the peers' leases."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import anyio
import structlog

from pdmesh.errors import InstanceUnavailable, OutboxFull
from pdmesh.wire.link import FrameLink

log = structlog.get_logger()

IdT = TypeVar("IdT", bound=str)
DownT = TypeVar("DownT")

#: Seconds in which a peer whose stream broke may open another. A live peer tries within a tenth of a second, but may
#: first wait for the end of a step.
BROKEN_STREAM_GRACE_S = 0.5

#: Seconds since a deadline, or a fourth of the lease if that is less, after which a missed deadline means that this
#: process was paused.
STOOD_STILL_S = 0.5


@dataclass(slots=True, eq=False)
class Connection(Generic[IdT, DownT]):
    """A registered stream. Cancelling the scope ends it.

    `address` names the other end in messages for people. While `is_open` is False, messages to the peer are dropped.
    The core decided them before it handled the peer's registration, so they belong to the previous stream.
    """

    peer_id: IdT
    link: FrameLink[DownT, Any]
    scope: anyio.CancelScope
    address: str
    is_open: bool = True

    def open(self) -> None:
        self.is_open = True


class Peers(Generic[IdT, DownT]):
    """The connected peers. A peer that registers again replaces its old stream."""

    def __init__(self) -> None:
        self._connections: dict[IdT, Connection[IdT, DownT]] = {}

    def __len__(self) -> int:
        return len(self._connections)

    def get(self, peer_id: IdT) -> Connection[IdT, DownT] | None:
        return self._connections.get(peer_id)

    def __iter__(self) -> Iterator[IdT]:
        return iter(tuple(self._connections))

    def add(self, connection: Connection[IdT, DownT]) -> None:
        self.end(connection.peer_id)
        self._connections[connection.peer_id] = connection

    def remove(self, connection: Connection[IdT, DownT]) -> bool:
        """Forget a stream. Return whether it was still the peer's current stream."""
        if self._connections.get(connection.peer_id) is not connection:
            return False
        del self._connections[connection.peer_id]
        return True

    def end(self, peer_id: IdT) -> bool:
        """Forget a peer's stream and end it. Return whether there was one."""
        connection = self._connections.pop(peer_id, None)
        if connection is not None:
            connection.scope.cancel()
        return connection is not None

    def post(self, peer_id: IdT, message: DownT) -> None:
        """Send a message, or drop it if the peer has no open stream: a registration exchanges the whole state.

        End the stream of a peer that does not read.
        """
        connection = self._connections.get(peer_id)
        if connection is None or not connection.is_open:
            return
        try:
            connection.link.post(message)
        except InstanceUnavailable:
            pass  # the stream is about to end
        except OutboxFull as error:
            log.error("a peer does not read its stream; closing it", peer=peer_id, error=str(error))
            connection.scope.cancel()


class Leases(Generic[IdT]):
    """The deadline by which each peer must be heard from.

    All leases are equally long, except after a broken stream: that peer is most likely dead, and a live one reconnects
    at once. If this process itself was paused, every lease is renewed. Then the peers' messages of the meantime are
    read before any lease runs out, and peers that left have a whole lease to come back.
    """

    def __init__(self, lease_s: float) -> None:
        self._lease_s = lease_s
        self._stood_still_s = min(STOOD_STILL_S, lease_s / 4)
        self._deadlines: dict[IdT, float] = {}
        self._changed = anyio.Event()
        self._still_until_s = -math.inf  # end of the time without shortened leases

    def renew(self, peer_id: IdT) -> None:
        if peer_id not in self._deadlines:  # otherwise `run` wakes at the earliest old deadline
            self._changed.set()
        self._deadlines[peer_id] = anyio.current_time() + self._lease_s

    def silent_s(self, peer_id: IdT) -> float:
        """Return the seconds since the peer was heard from, more after its stream broke; infinity without a lease.

        A pause of this process counts as hearing from all peers.
        """
        return anyio.current_time() + self._lease_s - self._deadlines.get(peer_id, -math.inf)

    def stream_broke(self, peer_id: IdT) -> None:
        """Shorten the peer's lease to at most `BROKEN_STREAM_GRACE_S`, unless this process was paused lately.

        If the call finds that this process was paused, every lease is renewed.
        """
        now_s = anyio.current_time()
        self._excuse_standing_still(now_s)
        deadline_s = self._deadlines.get(peer_id)
        if deadline_s is not None and now_s >= self._still_until_s:
            self._deadlines[peer_id] = min(deadline_s, now_s + BROKEN_STREAM_GRACE_S)
            self._changed.set()

    def _excuse_standing_still(self, now_s: float) -> None:
        """Renew every lease if the earliest deadline was missed by `_stood_still_s`: this process was paused."""
        if self._deadlines and min(self._deadlines.values()) < now_s - self._stood_still_s:
            self._still_until_s = now_s + self._lease_s
            for peer_id in self._deadlines:
                self._deadlines[peer_id] = self._still_until_s

    def drop(self, peer_id: IdT) -> None:
        self._deadlines.pop(peer_id, None)

    async def run(self, expired: Callable[[IdT], None]) -> None:
        """End leases that run out, and call ``expired`` once for each, until cancelled."""
        while True:
            self._changed = changed = anyio.Event()
            with anyio.CancelScope(deadline=min(self._deadlines.values(), default=math.inf)):
                await changed.wait()
                continue
            now_s = anyio.current_time()
            self._excuse_standing_still(now_s)
            for peer_id in [peer_id for peer_id, deadline_s in self._deadlines.items() if deadline_s <= now_s]:
                del self._deadlines[peer_id]
                expired(peer_id)
