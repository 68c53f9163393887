"""Links over UCX: a piece is one tagged message, received by a posted receive of the peer.

Endpoints have error handling: a peer that dies breaks its endpoints, and closing an endpoint cancels its requests.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

from pdmesh.errors import KvTransferError
from pdmesh.transport.peers import Peer
from pdmesh.transport.send_links import Links, Send
from pdmesh.transport.ucx_api import RENDEZVOUS_BYTES, UcxApi


class UcxLink:
    """`pdmesh.transport.send_links.Link` over a UCX endpoint. ``requests`` has the pieces' numbers as keys."""

    def __init__(self, peer: Peer, endpoint: Any, links: UcxLinks) -> None:
        self.peer = peer
        self.no_progress_s = links.no_progress_s
        self.endpoint = endpoint
        self.requests: dict[int, Any] = {}
        self._links = links

    @property
    def alive(self) -> bool:
        return bool(self.endpoint.alive)

    def begin(self, send: Send) -> None:
        api = self._links.api
        size = send.num_bytes if send.is_notice else max(send.num_bytes, RENDEZVOUS_BYTES)
        message = send.buffer.memory[:size]
        try:
            self.requests[send.number] = self.endpoint.tag_send(api.array(message), api.tag)
        except api.ucx.UCXError as error:
            raise KvTransferError(f"the peer cannot be reached: {error}") from error
        self._links.wake()

    def shut(self) -> None:
        with contextlib.suppress(self._links.api.ucx.UCXError):
            self.endpoint.close_blocking()
        self._links.forget(self)


class UcxLinks:
    """All links of one UCX worker."""

    def __init__(self, api: UcxApi, links: Links, *, no_progress_s: float, wake: Callable[[], None]) -> None:
        self.api = api
        self.no_progress_s = no_progress_s
        self.wake = wake
        self._all = links
        self._open: list[UcxLink] = []
        self._zombies: list[tuple[Any, Any]] = []  # (endpoint, request) not ended by UCX

    def open(self, peer: Peer) -> UcxLink:
        """Open a link to a peer. Raise KvTransferError if it cannot be reached."""
        ucx = self.api.ucx
        try:
            endpoint = ucx.UCXEndpoint.create_from_worker_address(
                self.api.worker, ucx.UCXAddress.create_from_buffer(peer.facts.worker), endpoint_error_handling=True
            )
        except ucx.UCXError as error:
            raise KvTransferError(f"the peer cannot be reached: {error}") from error
        link = UcxLink(peer, endpoint, self)
        self._open.append(link)
        return link

    def forget(self, link: UcxLink) -> None:
        """Remove a link that was shut, and keep the requests that UCX has not ended yet."""
        self._open.remove(link)
        self._zombies += [(link.endpoint, request) for request in link.requests.values() if not request.completed]
        self.wake()

    def reap(self) -> bool:
        """End the sends that UCX has completed, and close broken links. Return whether any send was completed."""
        reaped = False
        for link in list(self._open):
            if not link.requests:
                continue
            broken = None if link.endpoint.alive else "the peer is gone"
            for number, request in list(link.requests.items()):
                if request.completed:
                    reaped = True
                    del link.requests[number]
                    error = self.api.error_of(request)
                    self._all.ended(link, number, error)
                    broken = broken or error
            if broken is not None:
                self._all.close(link.peer.address, broken)
        self._zombies = [zombie for zombie in self._zombies if not zombie[1].completed]
        return reaped

    def drop_zombies(self) -> None:
        self._zombies.clear()
