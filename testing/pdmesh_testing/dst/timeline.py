"""What happened in a simulation, line by line, and the first law that broke."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field


class LawBroken(Exception):
    """A law did not hold. ``law`` is its short name, the same for every way to break it."""

    def __init__(self, law: str, details: str) -> None:
        super().__init__(f"{law}: {details}")
        self.law = law


@dataclass(slots=True)
class Timeline:
    """Lines are kept only if they are wanted: most runs break nothing."""

    now_s: Callable[[], float]
    wanted: bool
    lines: list[str] = field(default_factory=list[str])
    broken: LawBroken | None = None

    def note(self, who: str, what: object) -> None:
        if self.wanted:
            self.lines.append(f"{self.now_s():10.4f}  {who:<9}  {what}")

    def broke(self, law: str, details: str) -> None:
        """Note that a law is broken. The first one counts: others may follow from it."""
        self.note("LAW", f"{law}: {details}")
        if self.broken is None:
            self.broken = LawBroken(law, details)
