"""Counts who was refused at a service's port: strangers, and services that are configured wrongly."""

from __future__ import annotations

import threading
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from enum import StrEnum

#: A peer that is let in makes a call at once. One that has made none for so long did not get through the handshake.
HANDSHAKE_S = 10.0

#: The oldest of more are judged, or forgotten.
MAX_REMEMBERED = 1024


class StrangerKind(StrEnum):
    """What a peer lacked that was refused."""

    HANDSHAKE = "handshake"  # had no certificate, one of another authority, an expired one, or no TLS at all
    TOKEN = "token"  # another than the mesh's, or none
    ROLE = "role"  # a certificate of this role


class Strangers:
    """Counts refusals of one service, over all its ports. For any thread.

    gRPC refuses a peer without a word to us if the handshake fails. So a connection counts as refused if no call came
    of it.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._refused: Counter[StrangerKind] = Counter(dict.fromkeys(StrangerKind, 0))
        self._began_s: deque[float] = deque()  # of handshakes that no call has come of
        self._peers: OrderedDict[str, None] = OrderedDict()  # by address: those that have made one

    def connected(self) -> None:
        """Note that a peer begins its handshake."""
        with self._lock:
            self._judge(MAX_REMEMBERED - 1)
            self._began_s.append(self._clock())

    def called(self, peer: str) -> None:
        """Note a call, by gRPC's name for the connection it came on."""
        with self._lock:
            is_new = peer not in self._peers
            self._peers[peer] = None
            self._peers.move_to_end(peer)
            if is_new and self._began_s:
                self._began_s.popleft()
            if len(self._peers) > MAX_REMEMBERED:
                self._peers.popitem(last=False)

    def refuse(self, kind: StrangerKind) -> None:
        """Count a peer that was refused."""
        with self._lock:
            self._refused[kind] += 1

    @property
    def refused(self) -> dict[StrangerKind, int]:
        """How many were refused, by the reason."""
        with self._lock:
            self._judge(MAX_REMEMBERED)
            return dict(self._refused)

    def _judge(self, max_waiting: int) -> None:
        """Count handshakes that no call can be expected of any more."""
        until_s = self._clock() - HANDSHAKE_S
        while self._began_s and (len(self._began_s) > max_waiting or self._began_s[0] <= until_s):
            self._began_s.popleft()
            self._refused[StrangerKind.HANDSHAKE] += 1
