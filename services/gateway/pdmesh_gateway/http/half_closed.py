"""Watching of a client that has closed its sending half, as RFC 9112 (9.6) allows after a request.

A client that has closed the whole connection looks the same at first. The difference shows once something is sent: the
client's host answers with a reset. So the watcher sometimes sends a probe that clients ignore, and checks for a reset.
"""

from __future__ import annotations

import asyncio
import socket
from typing import Protocol

#: Times of the checks for a reset: the first comes soon after a probe, each further one after twice the time.
FIRST_LOOK_S = 0.05
MAX_LOOK_S = 2.0

#: Times of the probes before an answer begins. The first comes soon: most clients that close are gone, and their
#: requests hold KV. Some clients accept no more than five interim responses.
PROBES_S = (0.05, 1.0, 8.0, 64.0, 256.0)

#: Interval of TCP's own probes. These find a lost client too, but only a minute after it has gone.
KEEP_ALIVE_S = 10

#: An interim response, which clients skip.
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"

#: A chunk with a comment. Streams are server-sent events, and each write ends with a whole event.
_COMMENT = b":\n\n"
COMMENT_CHUNK = b"%x\r\n%b\r\n" % (len(_COMMENT), _COMMENT)


class Cycle(Protocol):
    """uvicorn's state of a request and its response."""

    response_started: bool
    response_complete: bool
    chunked_encoding: bool | None


class HalfClosedClient:
    """Watcher of one half-closed client, which aborts the connection if the client is gone.

    ``is_http10``: the client gets no probes.
    """

    def __init__(
        self, loop: asyncio.AbstractEventLoop, transport: asyncio.Transport, cycle: Cycle, *, is_http10: bool
    ) -> None:
        self._loop = loop
        self._transport = transport
        self._cycle = cycle
        self._socket: socket.socket = transport.get_extra_info("socket")
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEP_ALIVE_S)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, KEEP_ALIVE_S)
        now_s = loop.time()
        self._probes_at_s = [] if is_http10 else [now_s + probe_s for probe_s in PROBES_S]
        self._look_s = FIRST_LOOK_S
        self._probe()
        self._timer = loop.call_later(self._look_s, self._look)

    def close(self) -> None:
        """Stop watching."""
        self._timer.cancel()

    def _look(self) -> None:
        if self._transport.is_closing():
            return
        if self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            self._transport.abort()
            return
        self._look_s = FIRST_LOOK_S if self._probe() else min(2 * self._look_s, MAX_LOOK_S)
        wait_s = self._look_s
        if self._probes_at_s:
            wait_s = min(wait_s, max(FIRST_LOOK_S, self._probes_at_s[0] - self._loop.time()))
        self._timer = self._loop.call_later(wait_s, self._look)

    def _probe(self) -> bool:
        """Send a probe if it is time for one. Return whether an interim response was sent."""
        cycle = self._cycle
        if cycle.response_complete or self._transport.get_write_buffer_size():
            return False
        if cycle.response_started:
            self._probes_at_s.clear()
            if cycle.chunked_encoding:
                self._transport.write(COMMENT_CHUNK)
            return False
        if not self._probes_at_s or self._loop.time() < self._probes_at_s[0]:
            return False
        del self._probes_at_s[0]
        self._transport.write(CONTINUE)
        return True
