"""How the task that tells a client what is new of its request waits for that.

It waits once a token, so a wait takes no cancel scope, and sets a timer only if none goes off soon enough.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from typing import Generic, Protocol, TypeVar


class Posted(Protocol):
    """What has news: it is in its mailbox once, however many these are."""

    is_posted: bool


T = TypeVar("T", bound=Posted)


class Mailbox(Generic[T]):
    """Wakes one consumer when any of its transcripts has something to say.

    ``has_begun``: one of them has said something, so that the consumer may have a part of its answer.
    """

    def __init__(self) -> None:
        self.has_begun = False
        self._ready: deque[T] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._timer_s = math.inf  # when it goes off

    def put(self, transcript: T) -> None:
        if not transcript.is_posted:
            transcript.is_posted = True
            self._ready.append(transcript)
            self._wake()

    def take(self) -> T | None:
        if not self._ready:
            return None
        transcript = self._ready.popleft()
        transcript.is_posted = False
        return transcript

    async def wait(self, until_s: float) -> bool:
        """Wait until there is something to take, or until then; False if there is nothing, which may be before then."""
        if not self._ready:
            if until_s < self._timer_s:
                self._set_timer(until_s)
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        return bool(self._ready)

    def close(self) -> None:
        """Stop the timer: nobody waits any more."""
        if self._timer is not None:
            self._timer.cancel()

    def _set_timer(self, until_s: float) -> None:
        self.close()
        delay_s = max(0.0, until_s - time.monotonic())
        self._timer, self._timer_s = asyncio.get_running_loop().call_later(delay_s, self._ring), until_s

    def _ring(self) -> None:
        self._timer, self._timer_s = None, math.inf
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
