"""Simulated processes on one event loop: each has its own clock, and can be stopped, continued and killed.

A context variable names the process of a callback, so tasks and timers inherit the process. The callbacks of a stopped
process run when it continues, including timers that have expired meanwhile, as after SIGSTOP and SIGCONT.
"""

from __future__ import annotations

import asyncio
import heapq
import math
from collections import deque
from collections.abc import Callable
from contextvars import Context, ContextVar, copy_context
from dataclasses import dataclass, field
from typing import Any

from pdmesh_lab.sim.agenda import Agenda
from pdmesh_testing.virtual_time import VirtualTimeLoop


@dataclass(eq=False)
class Process:
    """A simulated process. ``parts`` are the objects that its composition root built, for laws and operators."""

    name: str
    #: Seconds by which the process's monotonic clock is ahead of the mesh's.
    clock_offset_s: float = 0.0
    #: Factor of the time of the process's steps.
    slowness: float = 1.0
    #: Killed: no message of the process arrives any more.
    is_dead: bool = False
    is_stopped: bool = False
    #: Seconds of steps that were computed at one instant of virtual time.
    busy_s: float = 0.0
    parts: dict[str, Any] = field(default_factory=dict[str, Any])
    _frozen: list[asyncio.Handle] = field(default_factory=list[asyncio.Handle])

    def context(self) -> Context:
        """Return a context whose tasks belong to this process."""
        context = copy_context()
        context.run(_CURRENT.set, self)
        return context

    def stop(self) -> None:
        self.is_stopped = True

    def go_on(self, loop: ProcessLoop) -> None:
        self.is_stopped = False
        frozen, self._frozen = self._frozen, []
        loop.run_again(frozen)

    def freeze(self, handle: asyncio.Handle) -> None:
        self._frozen.append(handle)


_CURRENT: ContextVar[Process | None] = ContextVar("process", default=None)


def current_process() -> Process | None:
    """Return the process whose code runs; None for the simulation itself."""
    return _CURRENT.get()


def running_process() -> Process:
    """Return the process whose code runs, which must be one."""
    process = _CURRENT.get()
    assert process is not None, "this is no process's code"
    return process


class TooManyTurns(BaseException):
    """The simulation does not come to an end."""


class ProcessLoop(VirtualTimeLoop):
    """Virtual time for several processes: nothing from outside is waited for, so a turn makes no system call.

    Raises TooManyTurns after ``max_turns``.
    """

    _ready: deque[asyncio.Handle]
    _timer_cancelled_count: int
    _stopping: bool

    def __init__(self, agenda: Agenda, max_turns: float = math.inf) -> None:
        super().__init__(agenda, lambda: False)
        self._max_turns = max_turns
        self._num_turns = 0

    def time(self) -> float:
        process = _CURRENT.get()
        return self.agenda.now_s if process is None else self.agenda.now_s + process.clock_offset_s

    def call_at(  # type: ignore[override]
        self, when: float, callback: Callable[..., Any], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        process = _CURRENT.get()
        if process is not None:
            when -= process.clock_offset_s
        timer = asyncio.TimerHandle(when, callback, args, self, context)
        heapq.heappush(self._scheduled, timer)
        timer._scheduled = True  # type: ignore[attr-defined]
        return timer

    def call_soon(  # type: ignore[override]
        self, callback: Callable[..., Any], *args: Any, context: Context | None = None
    ) -> asyncio.Handle:
        handle = asyncio.Handle(callback, args, self, context)
        self._ready.append(handle)
        return handle

    def call_soon_threadsafe(  # type: ignore[override]
        self, callback: Callable[..., Any], *args: Any, context: Context | None = None
    ) -> asyncio.Handle:
        """Call soon: there is one thread."""
        return self.call_soon(callback, *args, context=context)

    def run_again(self, handles: list[asyncio.Handle]) -> None:
        self._ready.extend(handles)

    def _run_once(self) -> None:
        """Run one turn, like asyncio's own without files and debugging."""
        self._num_turns += 1
        if self._num_turns > self._max_turns:
            # Ending the simulation takes turns, too.
            self._max_turns = math.inf
            raise TooManyTurns
        ready = self._ready
        self._move_due_timers()
        if not ready and not self._stopping:
            self._idle()
            self._move_due_timers()
        for _ in range(len(ready)):
            handle = ready.popleft()
            process: Process | None = handle._context.get(_CURRENT)  # type: ignore[attr-defined]
            if process is not None and process.is_stopped:
                process.freeze(handle)
            elif not handle.cancelled():
                handle._run()

    def _move_due_timers(self) -> None:
        timers, now_s = self._scheduled, self.agenda.now_s
        while timers and (timers[0].cancelled() or timers[0].when() <= now_s):
            timer = heapq.heappop(timers)
            timer._scheduled = False  # type: ignore[attr-defined]
            if timer.cancelled():
                self._timer_cancelled_count -= 1
            else:
                self._ready.append(timer)
