"""Leases: who is given up, and when; on virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import anyio

from pdmesh_lab.sim.agenda import Agenda
from pdmesh_scheduler.peer_streams import BROKEN_STREAM_GRACE_S, Leases
from pdmesh_testing.virtual_time import VirtualTimeLoop

LEASE_S = 5.0
SHORT_S = 0.6

Lost = list[tuple[str, float]]


def played(play: Callable[[Leases[str], Agenda], Awaitable[None]], lease_s: float = LEASE_S) -> Lost:
    """Who was given up, and when, while ``play`` ran."""
    agenda = Agenda()
    lost: Lost = []

    async def main() -> None:
        leases: Leases[str] = Leases(lease_s)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(leases.run, lambda peer: lost.append((peer, agenda.now_s)))
            await play(leases, agenda)
            tasks.cancel_scope.cancel()

    with asyncio.Runner(loop_factory=lambda: VirtualTimeLoop(agenda, lambda: False)) as runner:
        runner.run(main())
    return lost


def test_who_is_silent_for_a_lease_is_given_up_once() -> None:
    async def play(leases: Leases[str], _agenda: Agenda) -> None:
        leases.renew("a")
        leases.renew("b")
        await anyio.sleep(4)
        leases.renew("b")
        await anyio.sleep(20)

    assert played(play) == [("a", LEASE_S), ("b", 4 + LEASE_S)]


def test_who_loses_its_stream_is_given_up_soon_unless_it_comes_back() -> None:
    async def play(leases: Leases[str], _agenda: Agenda) -> None:
        for peer in ("dead", "alive"):
            leases.renew(peer)
        await anyio.sleep(1)
        for peer in ("dead", "alive", "never heard of"):
            leases.stream_broke(peer)
        await anyio.sleep(BROKEN_STREAM_GRACE_S / 2)
        leases.renew("alive")
        await anyio.sleep(3)

    assert played(play) == [("dead", 1 + BROKEN_STREAM_GRACE_S)]


def test_nobody_is_given_up_because_we_stood_still() -> None:
    """What waited in sockets is read first; who has really gone has no more than another lease."""

    async def play(leases: Leases[str], agenda: Agenda) -> None:
        for peer in ("dead", "alive"):
            leases.renew(peer)
        await anyio.sleep(1)
        agenda.now_s += 8.0
        await anyio.sleep(0.2)
        leases.renew("alive")
        await anyio.sleep(LEASE_S - 0.1)

    assert played(play) == [("dead", 9.0 + LEASE_S)]


def test_streams_that_broke_while_we_stood_still_have_a_lease_to_come_back() -> None:
    async def play(leases: Leases[str], agenda: Agenda) -> None:
        for peer in ("a", "b"):
            leases.renew(peer)
        await anyio.sleep(1)
        agenda.now_s += 30.0
        for peer in ("a", "b"):
            leases.stream_broke(peer)
        await anyio.sleep(2)
        leases.renew("a")
        await anyio.sleep(4)

    assert played(play) == [("b", 31.0 + LEASE_S)]


def test_short_leases_are_not_judged_after_standing_still_for_a_part_of_them() -> None:
    """As for who is suspected: what was said meanwhile is read first."""

    async def play(leases: Leases[str], agenda: Agenda) -> None:
        leases.renew("a")
        await anyio.sleep(SHORT_S / 2)
        agenda.now_s += SHORT_S
        await anyio.sleep(SHORT_S / 2)
        leases.renew("a")
        await anyio.sleep(SHORT_S / 2)

    assert played(play, SHORT_S) == []
