"""The sending half of the UCX transport: endpoints to peers, and the sends under way on each.

Endpoints have error handling: a peer that dies breaks them, and one that takes nothing is given up by closing its
endpoint, which cancels what is in flight; the next send opens another.

Inside a host a piece is *offered*: a small message says where it lies, the receiver reads it there
(`pdmesh.transport.reading`) and answers. A peer that was given up and goes on may still read a buffer that is in use
again. That is harmless: it reads a whole message with its own number, header and checksum, and drops it. A receiver
that may not read our memory says so; it gets this piece and all later ones as messages.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import anyio
import structlog

from pdmesh.errors import KvTransferError
from pdmesh.transport.address import unpack_address
from pdmesh.transport.buffers import HEADER_BYTES, PieceBuffer, SendPool
from pdmesh.transport.ucx_api import (
    ANSWER,
    ANSWER_MAGIC,
    OFFER,
    OFFER_MAGIC,
    PIECE_MAGIC,
    PREFIX,
    RENDEZVOUS_BYTES,
    Answer,
    Offer,
    UcxApi,
)

log = structlog.get_logger()

MAX_ENDPOINTS = 1024

#: Receives posted for answers; more wait in UCX, and are small.
POSTED_ANSWERS = 4


class _Send:
    """One piece on its way. ``error`` is set with ``done`` if it failed."""

    __slots__ = (
        "abandoned",
        "buffer",
        "done",
        "error",
        "message",
        "num_bytes",
        "number",
        "offered",
        "request",
        "started_s",
    )

    def __init__(self, number: int, buffer: PieceBuffer, num_bytes: int) -> None:
        self.number = number
        self.buffer = buffer
        self.num_bytes = num_bytes
        self.offered = False
        self.message: Any = None
        self.request: Any = None
        self.started_s = time.monotonic()
        self.done = anyio.Event()
        self.error: str | None = None
        self.abandoned = False  # nobody waits for it; its buffer is quarantined


class _Link:
    """An endpoint and the sends under way on it."""

    __slots__ = ("address", "answers", "endpoint", "last_progress_s", "may_read", "sends")

    def __init__(self, address: bytes, endpoint: Any, *, may_read: bool) -> None:
        self.address = address
        self.endpoint = endpoint
        self.may_read = may_read  # the peer our memory
        self.last_progress_s = time.monotonic()
        self.sends: list[_Send] = []
        self.answers: list[tuple[Any, bytes]] = []  # requests and their messages

    def waiting_since_s(self) -> float:
        return max(self.last_progress_s, self.sends[0].started_s)


class UcxLinks:
    """Endpoints by address, the least recently used first.

    A broken one that nobody uses is closed when the next peer comes, or is forgotten by name.
    """

    def __init__(
        self,
        api: UcxApi,
        pool: SendPool,
        *,
        own_address: bytes,
        no_progress_s: float,
        wake: Callable[[], None],
    ) -> None:
        self._api = api
        self._pool = pool
        self._own_address = own_address
        self._host_id = unpack_address(own_address).host_id
        self._no_progress_s = no_progress_s
        self._wake = wake
        self._sending = anyio.Event()
        self._links: OrderedDict[bytes, _Link] = OrderedDict()
        self._numbers = itertools.count(1)
        self._offered: dict[int, tuple[_Link, _Send]] = {}
        self._answers = [self._post_answer(bytearray(ANSWER.size)) for _ in range(POSTED_ANSWERS)]
        self._pid = os.getpid()
        self._zombies: list[tuple[Any, Any]] = []  # endpoint, request: given up, but UCX has not let go of the request

    def __len__(self) -> int:
        return len(self._links)

    async def send(self, address: bytes, buffer: PieceBuffer, payload_bytes: int) -> None:
        link = self._open(address)
        send = _Send(next(self._numbers), buffer, PREFIX.size + HEADER_BYTES + payload_bytes)
        PREFIX.pack_into(buffer.memory, 0, PIECE_MAGIC, payload_bytes, send.number)
        self._begin(link, send)
        link.sends.append(send)
        self._sending.set()
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
        """Give up a link when none of its sends has ended for ``no_progress_s``. Run beside `send`."""
        while True:
            busy = [link for link in self._links.values() if link.sends]
            if not busy:
                self._sending = anyio.Event()
                await self._sending.wait()
                continue
            link = min(busy, key=_Link.waiting_since_s)
            left_s = link.waiting_since_s() + self._no_progress_s - time.monotonic()
            if left_s > 0:
                await anyio.sleep(left_s)
                continue
            self.close(link.address, f"the peer took nothing for {self._no_progress_s:g} s")

    def reap(self) -> bool:
        """End the sends that UCX has completed or the peer has answered. True if there were any."""
        reaped = self._reap_answers()
        for link in list(self._links.values()):
            if not link.sends and not link.answers:
                continue
            ended = [send for send in link.sends if send.request.completed]
            errors = [self._api.error_of(send.request) for send in ended]
            for send, error in zip(ended, errors, strict=True):
                if not send.offered or error is not None:
                    self._end(link, send, error)
                    reaped = True
            if link.answers:
                answered = [request for request, _ in link.answers if request.completed]
                errors += [self._api.error_of(request) for request in answered]
                link.answers = [answer for answer in link.answers if answer[0] not in answered]
            broken = next(filter(None, errors), None)
            if broken is None and not link.endpoint.alive:  # an offer that was sent does not tell
                broken = "the peer is gone"
            if broken is not None:
                self.close(link.address, broken)
        self._zombies = [zombie for zombie in self._zombies if not zombie[1].completed]
        return reaped

    def answer(self, address: bytes, number: int, *, taken: bool) -> None:
        """Tell a peer what became of its offer; if it cannot be told, it is gone."""
        try:
            link = self._open(address)
            message = ANSWER.pack(ANSWER_MAGIC, taken, number)
            link.answers.append((link.endpoint.tag_send(self._api.array(message), self._api.answer_tag), message))
            self._wake()
        except (KvTransferError, self._api.ucx.UCXError) as error:
            self.close(address, str(error))

    def close(self, address: bytes, reason: str) -> None:
        """Close an endpoint, if there is one; its sends fail."""
        link = self._links.pop(address, None)
        if link is None:
            return
        with contextlib.suppress(self._api.ucx.UCXError):
            link.endpoint.close_blocking()  # cancels what is in flight
        self._zombies += [(link.endpoint, request) for request, _ in link.answers if not request.completed]
        for send in list(link.sends):
            if not send.request.completed:
                self._zombies.append((link.endpoint, send.request))
            self._end(link, send, reason)
        self._wake()

    def close_all(self) -> None:
        for address in list(self._links):
            self.close(address, "the transport was closed")
        self._zombies.clear()

    def _open(self, address: bytes) -> _Link:
        link = self._links.get(address)
        if link is not None:
            self._links.move_to_end(address)
            return link
        peer = unpack_address(address)
        for dead in [link.address for link in self._links.values() if not link.endpoint.alive]:
            self.close(dead, "the peer is gone")
        if len(self._links) >= MAX_ENDPOINTS:
            idle = next((link for link in self._links.values() if not link.sends), None)
            if idle is None:
                raise KvTransferError(f"all {MAX_ENDPOINTS} endpoints are in use")
            self.close(idle.address, "unused")
        ucx = self._api.ucx
        try:
            endpoint = ucx.UCXEndpoint.create_from_worker_address(
                self._api.worker, ucx.UCXAddress.create_from_buffer(peer.worker), endpoint_error_handling=True
            )
        except ucx.UCXError as error:
            raise KvTransferError(f"the peer cannot be reached: {error}") from error
        may_read = self._api.reads_memory and peer.host_id == self._host_id
        link = self._links[address] = _Link(address, endpoint, may_read=may_read)
        return link

    def _begin(self, link: _Link, send: _Send) -> None:
        """Give a piece, or the offer of it, to UCX. Raises KvTransferError."""
        send.offered = link.may_read
        if send.offered:
            offer = Offer(
                magic=OFFER_MAGIC,
                return_bytes=len(self._own_address),
                number=send.number,
                num_bytes=send.num_bytes,
                pid=self._pid,
                address=send.buffer.address,
            )
            send.message = OFFER.pack(*offer) + self._own_address
            self._offered[send.number] = (link, send)
        else:
            send.message = send.buffer.memory[: max(send.num_bytes, RENDEZVOUS_BYTES)]
        try:
            send.request = link.endpoint.tag_send(self._api.array(send.message), self._api.tag)
        except self._api.ucx.UCXError as error:
            self._offered.pop(send.number, None)
            self.close(link.address, str(error))
            raise KvTransferError(f"the peer cannot be reached: {error}") from error
        self._wake()

    def _post_answer(self, buffer: bytearray) -> tuple[Any, bytearray]:
        buffer[:] = bytes(ANSWER.size)  # a shorter message must not find the answer before
        return self._api.worker.tag_recv(self._api.array(buffer), self._api.answer_tag, self._api.any_tag), buffer

    def _reap_answers(self) -> bool:
        reaped = False
        for index, (request, buffer) in enumerate(self._answers):
            if not request.completed:
                continue
            reaped = True
            answer = Answer._make(ANSWER.unpack(buffer))
            well = self._api.error_of(request) is None and answer.magic == ANSWER_MAGIC
            self._answers[index] = self._post_answer(buffer)
            offered = self._offered.pop(answer.number, None) if well else None
            if offered is None:
                continue  # given up before
            link, send = offered
            if answer.taken:
                self._end(link, send, None)
            else:
                if link.may_read:
                    log.warning("a peer may not read this process's memory: its KV goes through UCX")
                link.may_read = False
                with contextlib.suppress(KvTransferError):  # then the link is closed, and the send has failed
                    self._begin(link, send)
        return reaped

    def _end(self, link: _Link, send: _Send, error: str | None) -> None:
        link.sends.remove(send)
        link.last_progress_s = time.monotonic()
        self._offered.pop(send.number, None)
        send.error = error
        if send.abandoned:
            self._pool.unquarantine(send.buffer)
        send.done.set()
