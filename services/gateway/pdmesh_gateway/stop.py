"""Stop strings in streamed text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(slots=True)
class StopFinder:
    """Finder of the stop string that completes first, however the text is cut into pieces.

    If two complete at the same character, the longer one counts. Text that may become a stop string is held back.
    """

    stops: Sequence[str]
    include_stop: bool = False
    _held: str = ""

    def push(self, text: str, *, check: bool = True) -> tuple[str, str | None]:
        """Add a piece; return the text to show now and the stop string that is complete, or None.

        Text that may begin a stop string is held back. The shown text ends before a found stop string, or with it if
        ``include_stop``. ``check=False``, for the first ``min_tokens`` tokens, searches and holds back nothing.
        """
        if not self.stops:
            return text, None
        text = self._held + text
        if not check:
            self._held = ""
            return text, None
        matches = [(at + len(stop), at, stop) for stop in self.stops if (at := text.find(stop)) >= 0]
        if matches:
            end, start, stop = min(matches)
            self._held = ""
            return text[: end if self.include_stop else start], stop
        num_held = max(overlap(text, stop) for stop in self.stops)
        shown = len(text) - num_held
        self._held = text[shown:]
        return text[:shown], None

    def flush(self, *, is_cut: bool = False, check: bool = True) -> tuple[str, str | None]:
        """Return the text that was held back, and the stop string that is found in it; None if none is.

        ``is_cut``: a limit or a stop token ended the generation.
        """
        held, self._held = self._held, ""
        return held, None


def overlap(text: str, stop: str) -> int:
    """Return the length of the longest end of ``text`` that begins ``stop`` but is not all of it."""
    for length in range(min(len(stop) - 1, len(text)), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
