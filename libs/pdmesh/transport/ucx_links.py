"""The sending half of the UCX transport: endpoints to peers, and the sends under way on each.

Between hosts endpoints have error handling: a peer that takes nothing is given up by closing its endpoint, which
cancels what is in flight; the next send opens another. Inside a host they have none (it would forbid shared memory),
nothing can be cancelled, and closing would break the peer's way back to us: the endpoint stays, and a peer that was
given up and goes on may still *read* a send buffer that is in use again. That is harmless: it reads a whole message
with its own header, capability and checksum, and drops it.
"""

from __future__ import annotations

import contextlib
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import anyio

from pdmesh.errors import KvTransferError
from pdmesh.transport.address import unpack_address
from pdmesh.transport.buffers import HEADER_BYTES, PieceBuffer, SendPool
from pdmesh.transport.ucx_api import PREFIX, PREFIX_MAGIC, UcxApi

MAX_ENDPOINTS = 1024


class _Send:
    """One piece on its way. ``error`` is set with ``done`` if it failed."""

    __slots__ = ("abandoned", "buffer", "done", "error", "request", "started_s")

    def __init__(self, request: Any, buffer: PieceBuffer) -> None:
        self.request = request
        self.buffer = buffer
        self.started_s = time.monotonic()
        self.done = anyio.Event()
        self.error: str | None = None
        self.abandoned = False  # nobody waits for it; its buffer is quarantined


class _Link:
    """An endpoint and the sends under way on it."""

    __slots__ = ("address", "endpoint", "handles_errors", "last_progress_s", "sends")

    def __init__(self, address: bytes, endpoint: Any, handles_errors: bool) -> None:
        self.address = address
        self.endpoint = endpoint
        self.handles_errors = handles_errors
        self.last_progress_s = time.monotonic()
        self.sends: list[_Send] = []

    def waiting_since_s(self) -> float:
        return max(self.last_progress_s, self.sends[0].started_s)


class UcxLinks:
    """Endpoints by address, the least recently used first."""

    def __init__(
        self,
        api: UcxApi,
        pool: SendPool,
        *,
        host_id: bytes,
        no_progress_s: float,
        wake: Callable[[], None],
    ) -> None:
        self._api = api
        self._pool = pool
        self._host_id = host_id
        self._no_progress_s = no_progress_s
        self._wake = wake
        self._sending = anyio.Event()
        self._links: OrderedDict[bytes, _Link] = OrderedDict()
        self._zombies: list[tuple[Any, Any]] = []  # endpoint, request: given up, but UCX has not let go of the request

    async def send(self, address: bytes, buffer: PieceBuffer, payload_bytes: int) -> None:
        link = self._open(address)
        PREFIX.pack_into(buffer.memory, 0, PREFIX_MAGIC, payload_bytes, 0)
        message = self._api.array(buffer.memory[: PREFIX.size + HEADER_BYTES + payload_bytes])
        try:
            request = link.endpoint.tag_send(message, self._api.tag)
        except self._api.ucx.UCXError as error:
            self.close(address, str(error))
            raise KvTransferError(f"the peer cannot be reached: {error}") from error
        send = _Send(request, buffer)
        link.sends.append(send)
        self._sending.set()
        self._wake()
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
        """Give up the sends of a link when none of them has ended for ``no_progress_s``. Run beside `send`."""
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
            reason = f"the peer took nothing for {self._no_progress_s:g} s"
            if link.handles_errors:
                self.close(link.address, reason)
            else:
                self._give_up_sends(link, reason)

    def reap(self) -> bool:
        """End the sends that UCX has completed. True if there were any."""
        reaped = False
        for link in list(self._links.values()):
            ended = [send for send in link.sends if send.request.completed]
            if not ended:
                continue
            reaped = True
            link.last_progress_s = time.monotonic()
            link.sends = [send for send in link.sends if send not in ended]
            errors = [self._api.error_of(send.request) for send in ended]
            for send, error in zip(ended, errors, strict=True):
                self._end(send, error)
            if broken := next(filter(None, errors), None):
                self.close(link.address, broken)
        self._zombies = [zombie for zombie in self._zombies if not zombie[1].completed]
        return reaped

    def close(self, address: bytes, reason: str) -> None:
        """Close an endpoint, if there is one; its sends fail."""
        link = self._links.pop(address, None)
        if link is None:
            return
        if link.handles_errors:
            with contextlib.suppress(self._api.ucx.UCXError):
                link.endpoint.close_blocking()  # cancels what is in flight
        else:
            link.endpoint.close()
        self._give_up_sends(link, reason)
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
        if len(self._links) >= MAX_ENDPOINTS:
            idle = next((link for link in self._links.values() if not link.sends), None)
            if idle is None:
                raise KvTransferError(f"all {MAX_ENDPOINTS} endpoints are in use")
            self.close(idle.address, "unused")
        handles_errors = peer.host_id != self._host_id or not self._api.shares_memory
        ucx = self._api.ucx
        try:
            endpoint = ucx.UCXEndpoint.create_from_worker_address(
                self._api.worker,
                ucx.UCXAddress.create_from_buffer(peer.worker),
                endpoint_error_handling=handles_errors,
            )
        except ucx.UCXError as error:
            raise KvTransferError(f"the peer cannot be reached: {error}") from error
        link = self._links[address] = _Link(address, endpoint, handles_errors)
        return link

    def _give_up_sends(self, link: _Link, reason: str) -> None:
        for send in link.sends:
            if not send.request.completed:
                self._zombies.append((link.endpoint, send.request))
            self._end(send, reason)
        link.sends.clear()

    def _end(self, send: _Send, error: str | None) -> None:
        send.error = error
        if send.abandoned:
            self._pool.unquarantine(send.buffer)
        send.done.set()
