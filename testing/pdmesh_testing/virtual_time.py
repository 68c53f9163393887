"""An event loop on virtual time: services run on a simulator's clock, as fast as they can, always in the same order."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable
from typing import Any

from pdmesh_lab.sim.agenda import Agenda


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """An event loop that never waits.

    When no task can run, ``settle`` may do something now. If it does nothing, the clock of ``agenda`` moves to the
    earlier of its next appointment and the loop's next timer.
    """

    _scheduled: list[asyncio.TimerHandle]

    def __init__(self, agenda: Agenda, settle: Callable[[], bool]) -> None:
        self.agenda = agenda
        self._settle = settle
        self._instant_ends: list[asyncio.Future[None]] = []
        super().__init__(_NeverWaiting(self._idle))

    def time(self) -> float:
        return self.agenda.now_s

    async def end_of_instant(self) -> None:
        """Return when all has happened that happens now, before the clock moves."""
        end = self.create_future()
        self._instant_ends.append(end)
        await end

    def _idle(self) -> None:
        if self._settle():
            return
        if self._instant_ends:
            for end in self._instant_ends:
                end.set_result(None)
            self._instant_ends.clear()
            return
        # asyncio has removed cancelled timers.
        timer_s = self._scheduled[0].when() if self._scheduled else None
        appointment_s = self.agenda.next_s
        if appointment_s is not None and (timer_s is None or appointment_s <= timer_s):
            self.agenda.advance()
        elif timer_s is not None:
            self.agenda.now_s = max(self.agenda.now_s, timer_s)
        else:
            raise RuntimeError("every task waits, and nothing is due")


class _NeverWaiting(selectors.DefaultSelector):
    """Looks at its files and comes back; where it would wait, it calls ``idle``."""

    def __init__(self, idle: Callable[[], None]) -> None:
        super().__init__()
        self._idle = idle

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready: list[Any] = super().select(0)
        if not ready and (timeout is None or timeout > 0):
            self._idle()
        return ready
