"""Wake-up of the task that sends a client the news of its request.

The task waits once a token. Therefore a wait uses no cancel scope, and sets a timer only if none fires soon enough.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from typing import Generic, Protocol, TypeVar


class Posted(Protocol):
    """An object that may be in a mailbox, once, however often it is put."""

    is_posted: bool


T = TypeVar("T", bound=Posted)


class Mailbox(Generic[T]):
    """Queue that wakes one consumer when any of its transcripts has news.

    ``has_begun``: a transcript has had news, so that the consumer may have sent a part of the answer.
    """

    def __init__(self) -> None:
        self.has_begun = False
        self._ready: deque[T] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        #: Time at which the timer fires.
        self._timer_s = math.inf

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
        """Wait for a transcript to take, at most until ``until_s``; return whether there is one.

        The wait may end early without one.
        """
        if not self._ready:
            if until_s < self._timer_s:
                self._set_timer(until_s)
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        return bool(self._ready)

    def close(self) -> None:
        """Stop the timer. Call this when the consumer has stopped waiting."""
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
