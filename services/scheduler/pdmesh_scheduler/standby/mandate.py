"""By what right a scheduler commands."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from pdmesh_scheduler.desired_file import Keep
from pdmesh_scheduler.standby.keeper import LeaseRequest

#: Silence of the only scheduler after which workers and gateways go on by themselves, and try to reach it anew. What a
#: decode may draw without it lasts for less.
ALONE_SILENCE_S = 3.0

#: Judges another scheduler's request for the lead: why this one keeps it, or nothing.
Judge = Callable[[LeaseRequest], Awaitable[str]]

#: Heartbeats in the silence of a leader that is given up, at least.
MIN_BEATS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Mandate:
    """What a leader among several schedulers has, and a scheduler that is alone has not."""

    term: int = 0  # said to all; higher than those of all leaders before
    silence_s: float = ALONE_SILENCE_S  # after which workers and gateways look for another scheduler
    is_valid: Callable[[], bool] = lambda: True  # whether it may command now
    desired: bytes | None = None  # what operators asked of the leader before, as JSON; None: see the file
    keep: Keep | None = None  # keeps what they ask for; None: in the file
    #: Answers other schedulers that ask for the lead; None if there is no other.
    answer: Callable[[Judge], Coroutine[Any, Any, None]] | None = None

    def beat_s(self, most_s: float) -> float:
        """Return how often workers and gateways are to speak: at least every ``most_s``."""
        return min(most_s, self.silence_s / MIN_BEATS)

    def silent_beats(self, beat_s: float) -> int:
        """Return after how many unanswered heartbeats this scheduler is to be given up."""
        return max(MIN_BEATS, int(self.silence_s / beat_s))


ALONE = Mandate()
