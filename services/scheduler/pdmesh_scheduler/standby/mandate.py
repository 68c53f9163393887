"""By what right a scheduler commands."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from pdmesh_scheduler.desired_file import Keep

#: Heartbeats in the silence of a leader that is given up, at least.
MIN_BEATS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Mandate:
    """What a leader among several schedulers has, and a scheduler that is alone has not."""

    term: int = 0  # said to all; higher than those of all leaders before
    silence_s: float | None = None  # of a leader, after which workers and gateways look for another one
    is_valid: Callable[[], bool] = lambda: True  # whether it may command now
    desired: bytes | None = None  # what operators asked of the leader before, as JSON; None: see the file
    keep: Keep | None = None  # keeps what they ask for; None: in the file

    def beat_s(self, most_s: float) -> float:
        """Return how often workers and gateways are to speak: at least every ``most_s``."""
        return most_s if self.silence_s is None else min(most_s, self.silence_s / MIN_BEATS)

    def silent_beats(self, beat_s: float) -> int | None:
        """Return after how many unanswered heartbeats this leader is to be given up; None: it is the only one."""
        return None if self.silence_s is None else max(MIN_BEATS, int(self.silence_s / beat_s))


ALONE = Mandate()
