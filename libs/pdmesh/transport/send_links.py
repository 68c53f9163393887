"""The sending half of the transport: a link to each peer, and the sends in progress on it.

A peer that dies breaks its link. The link to a peer that takes nothing is closed, and the next send opens another. A
link decides how a piece travels: `pdmesh.transport.local` inside a host, `pdmesh.transport.ucx_links` between hosts.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from math import inf
from typing import Protocol

import anyio

from pdmesh.errors import KvTransferError
from pdmesh.transport.buffers import PieceBuffer, SendPool
from pdmesh.transport.peers import MAX_PEERS, Peer
from pdmesh.transport.prefix import number_message


class Send:
    """A message on its way. ``error`` is set with ``done`` if it failed.

    ``abandoned`` is set if its sender was cancelled, so its buffer is quarantined.
    """

    __slots__ = ("abandoned", "buffer", "done", "error", "is_notice", "num_bytes", "number", "started_s")

    def __init__(self, number: int, buffer: PieceBuffer, num_bytes: int, *, is_notice: bool) -> None:
        self.number = number
        self.buffer = buffer
        self.num_bytes = num_bytes
        self.is_notice = is_notice
        self.started_s = time.monotonic()
        self.done = anyio.Event()
        self.error: str | None = None
        self.abandoned = False


class Link(Protocol):
    """A connection to one peer. Calls `Links.ended` for each send that has ended, and `Links.close` when broken."""

    @property
    def peer(self) -> Peer: ...

    @property
    def alive(self) -> bool: ...

    @property
    def no_progress_s(self) -> float:
        """Seconds after which a peer that takes nothing is disconnected."""
        ...

    def begin(self, send: Send) -> None:
        """Start sending. Raise KvTransferError if the peer cannot be reached."""
        ...

    def shut(self) -> None:
        """Stop sending and answering."""
        ...


class _Busy:
    """A link and its sends in progress, by number and oldest first."""

    __slots__ = ("last_taken_s", "link", "sends")

    def __init__(self, link: Link) -> None:
        self.link = link
        self.last_taken_s = time.monotonic()
        self.sends: dict[int, Send] = {}

    def patient_until_s(self) -> float:
        """Return the time at which the link is closed, unless the peer takes a piece before."""
        return max(self.last_taken_s, next(iter(self.sends.values())).started_s) + self.link.no_progress_s


class Links:
    """Links by address, the least recently used first.

    A broken link without sends is closed when a link to another peer is opened, or when `close` names its peer.
    """

    def __init__(self, pool: SendPool, open_link: Callable[[bytes], Link]) -> None:
        """``open_link`` makes a link to an address, or raises KvTransferError."""
        self._pool = pool
        self._open_link = open_link
        self._watch_sooner = anyio.Event()
        self._watched_until_s = inf
        self._links: OrderedDict[bytes, _Busy] = OrderedDict()
        self._next_number = 1

    def __len__(self) -> int:
        return len(self._links)

    async def send(self, address: bytes, buffer: PieceBuffer, payload_bytes: int, *, is_notice: bool) -> None:
        busy = self._open(address)
        num_bytes = number_message(buffer, payload_bytes, self._next_number)
        send = Send(self._next_number, buffer, num_bytes, is_notice=is_notice)
        self._next_number += 1
        busy.sends[send.number] = send
        try:
            busy.link.begin(send)
        except KvTransferError as error:
            busy.sends.pop(send.number, None)
            self.close(address, str(error))
            raise
        self._let_watch(busy)
        try:
            await send.done.wait()
        except anyio.get_cancelled_exc_class():
            if not send.done.is_set():
                send.abandoned = True
                self._pool.quarantine(buffer)
            raise
        if send.error is not None:
            raise KvTransferError(f"the piece was not sent: {send.error}")

    async def watch(self) -> None:
        """Close each link whose peer has taken no piece for the link's ``no_progress_s``. Run beside `send`.

        A notice ends when the local kernel has it, so its end says nothing about the peer.
        """
        while True:
            self._watch_sooner = anyio.Event()
            working = [busy for busy in self._links.values() if busy.sends]
            busy = min(working, key=_Busy.patient_until_s, default=None)
            self._watched_until_s = inf if busy is None else busy.patient_until_s()
            left_s = self._watched_until_s - time.monotonic()
            if busy is not None and left_s <= 0:
                self.close(busy.link.peer.address, f"the peer received nothing for {busy.link.no_progress_s:g} s")
                continue
            with anyio.move_on_after(left_s):
                await self._watch_sooner.wait()

    def ended(self, link: Link, number: int, error: str | None) -> None:
        """Note that a send has ended. Ignored if the link was closed or the send is unknown."""
        busy = self._links.get(link.peer.address)
        if busy is None or busy.link is not link:
            return
        send = busy.sends.pop(number, None)
        if send is not None:
            if not send.is_notice:
                busy.last_taken_s = time.monotonic()
            self._end(send, error)

    def reroute(self, link: Link) -> None:
        """Shut a link and begin its unfinished sends again on a new link to the same peer.

        These sends fail if the new link cannot be opened or used. A link that is no longer in use is ignored.
        """
        address = link.peer.address
        busy = self._links.get(address)
        if busy is None or busy.link is not link:
            return
        del self._links[address]
        link.shut()
        reason = "the peer is gone"
        try:
            other = self._open(address)
        except KvTransferError as error:
            reason = str(error)
        else:
            while busy.sends:
                number = next(iter(busy.sends))
                send = busy.sends.pop(number)
                other.sends[number] = send
                try:
                    other.link.begin(send)
                except KvTransferError as error:
                    reason = str(error)
                    self.close(address, reason)
                    break
            self._let_watch(other)
        for send in busy.sends.values():
            self._end(send, reason)

    def close(self, address: bytes, reason: str) -> None:
        """Close a link, if there is one; its sends fail."""
        busy = self._links.pop(address, None)
        if busy is not None:
            busy.link.shut()
            for send in busy.sends.values():
                self._end(send, reason)

    def close_all(self) -> None:
        for address in list(self._links):
            self.close(address, "the transport was closed")

    def _open(self, address: bytes) -> _Busy:
        busy = self._links.get(address)
        if busy is not None:
            self._links.move_to_end(address)
            return busy
        for dead in [address for address, busy in self._links.items() if not busy.link.alive]:
            self.close(dead, "the peer is gone")
        if len(self._links) >= MAX_PEERS:
            idle = next((address for address, busy in self._links.items() if not busy.sends), None)
            if idle is None:
                raise KvTransferError(f"all {MAX_PEERS} links are in use")
            self.close(idle, "unused")
        busy = self._links[address] = _Busy(self._open_link(address))
        return busy

    def _let_watch(self, busy: _Busy) -> None:
        """Wake `watch` if this link is due before its next look. Links differ in ``no_progress_s``."""
        if busy.sends and busy.patient_until_s() < self._watched_until_s:
            self._watch_sooner.set()

    def _end(self, send: Send, error: str | None) -> None:
        send.error = error
        if send.abandoned:
            self._pool.unquarantine(send.buffer)
        send.done.set()
