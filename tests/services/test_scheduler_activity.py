"""Frames of the scheduler's activity: what they hold, and who gets them."""

from __future__ import annotations

import random
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any, cast

import anyio
import pytest

from pdmesh.core.commands import Restart, RunStep
from pdmesh.core.config import CoreConfig
from pdmesh.core.events import DecodeStepsDone, InstanceJoined, InstanceLost, RequestArrived, RequestFinished, StepDone
from pdmesh.core.scheduler import SchedulerCore
from pdmesh.model import Epoch, FinishReason, GatewayId, InstanceId, OwnDecodeSteps, Request, RequestId, Role
from pdmesh.policy.bundles import make_bundle
from pdmesh.policy.config import PolicyConfig
from pdmesh.wire.messages import Activity, ActivityMark, GatewayDown, StepBar
from pdmesh_scheduler.activity import MAX_REQUESTS, MAX_STEPS, ActivityFeed
from pdmesh_scheduler.observing import Handled
from pdmesh_scheduler.peer_streams import Peers
from pdmesh_testing.core import step_done
from pdmesh_testing.modelled import modelled_profile
from pdmesh_testing.scripted_mesh import READY

pytestmark = pytest.mark.anyio

GATEWAY = GatewayId("g")
ZERO = Epoch(0)


class Mailboxes:
    """In the place of the gateways' streams."""

    def __init__(self) -> None:
        self.frames: list[tuple[GatewayId, Activity]] = []
        self.changed = anyio.Event()

    def post(self, gateway_id: GatewayId, frame: Activity) -> None:
        self.frames.append((gateway_id, frame))
        self.changed.set()


def request(number: int) -> Request:
    return Request(
        request_id=RequestId(f"r{number}"),
        epoch=ZERO,
        gateway_id=GATEWAY,
        num_prompt_tokens=8,
        max_tokens=4,
        arrival_s=float(number),
    )


@asynccontextmanager
async def running() -> AsyncGenerator[tuple[ActivityFeed, SchedulerCore, Mailboxes]]:
    core = SchedulerCore(CoreConfig(), make_bundle("fcfs", PolicyConfig()), random.Random(0))
    mailboxes = Mailboxes()
    peers = cast("Peers[GatewayId, GatewayDown]", mailboxes)
    feed = ActivityFeed(core, peers, clock=lambda: 100.0, label=lambda request_id: f"label of {request_id}")
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(feed.run, lambda: READY)
        yield feed, core, mailboxes
        tasks.cancel_scope.cancel()


async def next_frame(feed: ActivityFeed, mailboxes: Mailboxes) -> Activity:
    mailboxes.changed = anyio.Event()
    feed.asked(GATEWAY)
    with anyio.fail_after(10):
        await mailboxes.changed.wait()
    gateway_id, frame = mailboxes.frames[-1]
    assert gateway_id == GATEWAY
    return frame


def drive(feed: ActivityFeed, core: SchedulerCore, event: Any, now_s: float) -> list[Any]:
    commands = core.handle(event, now_s)
    feed.observe(Handled(event=event, now_s=now_s, commands=commands, milestones=()))
    return commands


async def test_nobody_gets_what_nobody_asked_for() -> None:
    async with running() as (feed, core, mailboxes):
        drive(feed, core, InstanceJoined(modelled_profile("m", Role.MIXED), ()), 0.0)
        await anyio.wait_all_tasks_blocked()
        assert mailboxes.frames == []
        first = await next_frame(feed, mailboxes)
        assert first.marks == ()  # of before anyone watched
        await anyio.wait_all_tasks_blocked()
        assert len(mailboxes.frames) == 1  # each is asked for by itself


async def test_steps_marks_and_requests_are_told_once() -> None:
    async with running() as (feed, core, mailboxes):
        await next_frame(feed, mailboxes)
        drive(feed, core, InstanceJoined(modelled_profile("m", Role.MIXED), ()), 1.0)
        commands = drive(feed, core, RequestArrived(request(1)), 2.0)
        (plan,) = [command.plan for command in commands if isinstance(command, RunStep)]
        drive(feed, core, step_done("m", plan, 0.25, num_decodes=2), 3.0)
        frame = await next_frame(feed, mailboxes)
        assert frame.marks == (ActivityMark(InstanceId("m"), 1.0, "joined", ""),)
        assert frame.steps == (StepBar(InstanceId("m"), 2.75, 3.0, 8, 2, False),)
        (told,) = frame.requests
        assert (told.id, told.label, told.phase, told.where) == ("r1", "label of r1", "decoding", ("m",))
        assert (told.num_planned_tokens, told.age_s) == (8, 99.0)
        again = await next_frame(feed, mailboxes)
        assert not again.steps
        assert not again.marks


def own_steps(began_s: float, wall_s: float) -> OwnDecodeSteps:
    """Eight steps of three residents."""
    return OwnDecodeSteps(
        num_steps=8, num_tokens=24, num_context_tokens=2400, duration_s=wall_s, wall_s=wall_s, began_s=began_s
    )


async def test_decode_steps_that_an_instance_makes_by_itself_are_seen() -> None:
    """Else an instance that decodes all the time, and is planned nothing, looks idle."""
    decode = InstanceId("d")
    finished = RequestFinished(decode, RequestId("r"), ZERO, FinishReason.STOP, 9, own_steps(70.0, 0.25))
    # On the instance's clock the planned step began half a second after the own ones ended.
    planned = StepDone(decode, 1, 0.5, (), 2, own_steps=own_steps(80.0, 1.0), began_s=81.5, ended_s=82.0)
    async with running() as (feed, _, mailboxes):
        await next_frame(feed, mailboxes)
        for event, now_s in (
            (DecodeStepsDone(decode, own_steps(50.0, 0.75)), 10.0),
            (finished, 20.0),
            (planned, 30.0),
        ):
            feed.observe(Handled(event=event, now_s=now_s, commands=(), milestones=()))
        frame = await next_frame(feed, mailboxes)
    assert frame.steps == (
        StepBar(decode, 9.25, 10.0, 0, 3, False),
        StepBar(decode, 19.75, 20.0, 0, 3, False),
        StepBar(decode, 28.0, 29.0, 0, 3, False),
        StepBar(decode, 29.5, 30.0, 0, 2, False),
    )


async def test_a_lost_instance_and_the_restarts_that_it_causes_are_marked() -> None:
    async with running() as (feed, core, mailboxes):
        await next_frame(feed, mailboxes)
        drive(feed, core, InstanceJoined(modelled_profile("m", Role.MIXED), ()), 1.0)
        drive(feed, core, RequestArrived(request(1)), 2.0)
        commands = drive(feed, core, InstanceLost(InstanceId("m")), 3.0)
        assert any(isinstance(command, Restart) for command in commands)
        frame = await next_frame(feed, mailboxes)
        assert [(mark.what, mark.request_id) for mark in frame.marks] == [
            ("joined", ""),
            ("lost", ""),
            ("restarted", "r1"),
        ]


async def test_a_frame_is_bounded_whatever_happens() -> None:
    async with running() as (feed, core, mailboxes):
        await next_frame(feed, mailboxes)
        for number in range(2 * MAX_REQUESTS):
            core.handle(RequestArrived(request(number)), float(number))
        for number in range(2 * MAX_STEPS):
            done = StepDone(InstanceId("m"), number, 0.01, (), 1)
            feed.observe(Handled(event=done, now_s=float(number), commands=(), milestones=()))
        frame = await next_frame(feed, mailboxes)
        assert len(frame.steps) == MAX_STEPS
        assert [told.id for told in frame.requests] == [f"r{number}" for number in range(MAX_REQUESTS)]
