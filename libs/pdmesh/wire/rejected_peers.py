"""Counts of peers that a service's ports refuse: foreign ones, and misconfigured services of the mesh."""

from __future__ import annotations

import threading
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from enum import StrEnum

#: Time without a call after which a handshake counts as failed. An accepted peer makes a call at once.
HANDSHAKE_S = 10.0

#: Maximum number of remembered handshakes and peers. Beyond it the oldest count as failed, or are forgotten.
MAX_REMEMBERED = 1024


class RejectedPeerKind(StrEnum):
    """The reason why a peer was refused.

    * HANDSHAKE: the peer had no TLS, no certificate, an expired one, or one of another authority.
    * TOKEN: the peer had no mesh token, or a wrong one.
    * ROLE: the peer had no certificate of the required role.
    """

    HANDSHAKE = "handshake"
    TOKEN = "token"
    ROLE = "role"


class RejectedPeers:
    """Counts of refused peers of one service, over all its ports. For any thread.

    gRPC refuses a peer silently if the handshake fails. So the class remembers when handshakes without a call began,
    and which peers have made a call: a handshake counts as failed if no call follows it.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._refused: Counter[RejectedPeerKind] = Counter(dict.fromkeys(RejectedPeerKind, 0))
        self._began_s: deque[float] = deque()
        self._peers: OrderedDict[str, None] = OrderedDict()

    def connected(self) -> None:
        """Note that a peer begins its handshake."""
        with self._lock:
            self._judge(MAX_REMEMBERED - 1)
            self._began_s.append(self._clock())

    def called(self, peer: str) -> None:
        """Note a call from ``peer``, gRPC's name for a connection. A new peer completes the oldest handshake."""
        with self._lock:
            is_new = peer not in self._peers
            self._peers[peer] = None
            self._peers.move_to_end(peer)
            if is_new and self._began_s:
                self._began_s.popleft()
            if len(self._peers) > MAX_REMEMBERED:
                self._peers.popitem(last=False)

    def refuse(self, kind: RejectedPeerKind) -> None:
        """Count a peer that was refused."""
        with self._lock:
            self._refused[kind] += 1

    @property
    def refused(self) -> dict[RejectedPeerKind, int]:
        """Number of refused peers, by reason."""
        with self._lock:
            self._judge(MAX_REMEMBERED)
            return dict(self._refused)

    def _judge(self, max_waiting: int) -> None:
        """Count handshakes as failed that are too old, or more than ``max_waiting``."""
        until_s = self._clock() - HANDSHAKE_S
        while self._began_s and (len(self._began_s) > max_waiting or self._began_s[0] <= until_s):
            self._began_s.popleft()
            self._refused[RejectedPeerKind.HANDSHAKE] += 1
