"""A scheduler's right to command."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from pdmesh_scheduler.desired_file import Keep
from pdmesh_scheduler.standby.keeper import LeaseRequest

#: Seconds of the only scheduler's silence after which workers and gateways continue alone and try to reconnect. The
#: tokens that a decode may draw without the scheduler last for less.
ALONE_SILENCE_S = 3.0

#: Judges another scheduler's request for the lead: returns why this one keeps it, or an empty string.
Judge = Callable[[LeaseRequest], Awaitable[str]]

#: Fewest heartbeats without an answer after which workers and gateways leave a leader.
MIN_BEATS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaderTerm:
    """Right of a leader among several schedulers; the defaults are for a scheduler that is alone.

    `term` is sent to all peers and is higher than the terms of all leaders before. After `silence_s` of silence,
    workers and gateways look for another scheduler. `is_valid` returns whether commands are allowed now. `desired` is
    the previous leader's desired state as JSON; None: read the file. `keep` stores new states; None: in the file.
    `answer` answers other schedulers' requests for the lead; None if there are no others.
    """

    term: int = 0
    silence_s: float = ALONE_SILENCE_S
    is_valid: Callable[[], bool] = lambda: True
    desired: bytes | None = None
    keep: Keep | None = None
    answer: Callable[[Judge], Coroutine[Any, Any, None]] | None = None

    def beat_s(self, most_s: float) -> float:
        """Return the interval in seconds at which workers and gateways send heartbeats, at most ``most_s``."""
        return min(most_s, self.silence_s / MIN_BEATS)

    def silent_beats(self, beat_s: float) -> int:
        """Return the number of unanswered heartbeats after which peers leave this scheduler."""
        return max(MIN_BEATS, int(self.silence_s / beat_s))


ALONE = LeaderTerm()
