"""A mailbox wakes its consumer for mail and for the time, and sets a timer only where none goes off before."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

import anyio
import pytest

from pdmesh_gateway.mailbox import Mailbox

pytestmark = pytest.mark.anyio


@dataclass(eq=False)
class Letter:
    is_posted: bool = False


async def test_mail_wakes_the_one_that_waits_and_comes_once() -> None:
    mailbox: Mailbox[Letter] = Mailbox()
    letter = Letter()
    woken: list[bool] = []

    async def consume() -> None:
        woken.append(await mailbox.wait(math.inf))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(consume)
        await anyio.wait_all_tasks_blocked()
        assert not woken
        mailbox.put(letter)
        mailbox.put(letter)
    assert woken == [True]
    assert await mailbox.wait(math.inf), "what is there is not waited for"
    assert (mailbox.take(), mailbox.take()) == (letter, None)
    mailbox.put(letter)
    assert mailbox.take() is letter


async def test_time_wakes_it_too_and_later_deadlines_set_no_timer() -> None:
    mailbox: Mailbox[Letter] = Mailbox()
    assert not await mailbox.wait(time.monotonic() - 1)
    far_s = time.monotonic() + 1000
    timers: list[object] = []

    async def consume() -> None:
        for until_s in (far_s, far_s + 1, far_s + 2, far_s - 1):
            await mailbox.wait(until_s)
            timers.append(mailbox._timer)
            mailbox.take()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(consume)
        for _ in range(4):
            await anyio.wait_all_tasks_blocked()
            mailbox.put(Letter())
    first, second, third, sooner = timers
    assert first is second is third is not sooner
    mailbox.close()
    assert mailbox._timer is not None
    assert mailbox._timer.cancelled()
