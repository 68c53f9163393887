"""Dispatch of events to the functions that handle them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

_EventT = TypeVar("_EventT")


class Handlers:
    """Table with a function for each kind of event, found by the event's class."""

    def __init__(self) -> None:
        self._untimed: dict[type[Any], Callable[[Any], None]] = {}
        self._timed: dict[type[Any], Callable[[Any, float], None]] = {}

    def on(self, kind: type[_EventT], handle: Callable[[_EventT], None]) -> None:
        """Call ``handle`` with each event of ``kind``. Raises TypeError if another function does."""
        self._claim(kind)
        self._untimed[kind] = handle

    def on_timed(self, kind: type[_EventT], handle: Callable[[_EventT, float], None]) -> None:
        """Call ``handle`` with each event of ``kind`` and its time in seconds. Raises TypeError if another does."""
        self._claim(kind)
        self._timed[kind] = handle

    def _claim(self, kind: type[Any]) -> None:
        if kind in self._untimed or kind in self._timed:
            raise TypeError(f"{kind.__name__} is handled twice")

    def check(self, kinds: Iterable[type[Any]]) -> None:
        """Raise TypeError unless exactly the ``kinds`` have handlers; the message names the others."""
        wrong = {kind.__name__ for kind in (self._untimed.keys() | self._timed.keys()) ^ set(kinds)}
        if wrong:
            raise TypeError(f"{', '.join(sorted(wrong))}: every kind of event has one handler, and nothing else has")

    def handle(self, event: object, now_s: float) -> None:
        """Call the handler of the event's kind."""
        kind = type(event)
        untimed = self._untimed.get(kind)
        if untimed is not None:
            untimed(event)
        else:
            self._timed[kind](event, now_s)
