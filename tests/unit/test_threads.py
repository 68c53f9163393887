"""Threads beside the event loop end with their work, or are left behind."""

from __future__ import annotations

import threading
from functools import partial

import pytest

from pdmesh.threads import CallThread

pytestmark = pytest.mark.anyio


async def test_what_is_in_line_is_called_before_a_thread_ends() -> None:
    called: list[int] = []
    async with CallThread("test") as thread:
        for number in range(3):
            thread.put(partial(called.append, number))
    assert (called, thread.has_ended) == ([0, 1, 2], True)


async def test_a_thread_that_does_not_come_back_is_left_behind() -> None:
    may_end = threading.Event()
    async with CallThread("test", end_s=0.01) as thread:
        thread.put(lambda: may_end.wait(20))
    assert not thread.has_ended
    may_end.set()
