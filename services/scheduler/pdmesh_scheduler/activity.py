"""The mesh's present activity, in frames for the gateways' web pages.

A gateway asks for each frame and gets one a few times a second, so a gateway that stops reading costs nothing. While no
gateway asks, nothing is collected. A frame omits entries beyond its limits: it is for display, not for counting.
"""

from __future__ import annotations

from collections.abc import Callable

import anyio

from pdmesh.core.commands import Restart, RunStep
from pdmesh.core.events import (
    DecodeStepsDone,
    InstanceJoined,
    InstanceLost,
    InstanceSuspected,
    RequestFinished,
    StepDone,
    TransferFailed,
    TransferSent,
)
from pdmesh.core.scheduler import SchedulerCore
from pdmesh.model import GatewayId, InstanceId, OwnDecodeSteps, RequestId
from pdmesh.wire.messages import Activity, ActivityMark, GatewayDown, KvMove, MeshStatus, RequestActivity, StepBar
from pdmesh_scheduler.observing import Handled
from pdmesh_scheduler.peer_streams import Peers

#: Seconds between two frames: smooth enough to look at.
FRAME_S = 0.2

#: Seconds without a question after which collecting stops.
IDLE_S = 3.0

#: Limits of one frame. A mesh of 64 instances ends some 1,300 steps a second at most.
MAX_STEPS = 1024
MAX_MOVES = 512
MAX_MARKS = 256
MAX_REQUESTS = 60


class ActivityFeed:
    """Collector of what happens while gateways ask for frames, and their sender."""

    def __init__(
        self,
        core: SchedulerCore,
        gateways: Peers[GatewayId, GatewayDown],
        *,
        clock: Callable[[], float],
        label: Callable[[RequestId], str],
    ) -> None:
        """``label`` returns the client's name for a request."""
        self._core = core
        self._gateways = gateways
        self._clock = clock
        self._label = label
        self._asked: dict[GatewayId, None] = {}
        self._asking = anyio.Event()
        self._collects = False
        self._urgent: set[tuple[InstanceId, int]] = set()
        self._steps: list[StepBar] = []
        self._moves: list[KvMove] = []
        self._marks: list[ActivityMark] = []

    def asked(self, gateway_id: GatewayId) -> None:
        """Note that a gateway wants the next frame."""
        self._asked[gateway_id] = None
        self._collects = True
        self._asking.set()

    def observe(self, handled: Handled) -> None:
        """Add an event's and its commands' steps, KV moves and marks to the next frame, if a gateway asks for any."""
        if not self._collects:
            return
        event, now_s = handled.event, handled.now_s
        match event:
            case StepDone():
                self._planned_step(event, now_s)
            case DecodeStepsDone() | RequestFinished():
                self._own_steps(event.instance_id, event.own_steps, now_s)
            case TransferSent():
                self._moved(event, now_s)
            case TransferFailed(committed=None):
                self._mark(event.instance_id, now_s, "transfer failed", event.request_id)
            case InstanceLost():
                self._mark(event.instance_id, now_s, "lost", "")
                self._urgent = {key for key in self._urgent if key[0] != event.instance_id}
            case InstanceJoined():
                self._mark(event.profile.instance_id, now_s, "joined", "")
            case InstanceSuspected():
                self._mark(event.instance_id, now_s, "silent" if event.suspected else "reports again", "")
            case _:
                pass
        for command in handled.commands:
            match command:
                case RunStep() if command.plan.urgent:
                    self._urgent.add((command.instance_id, command.plan.plan_id))
                    self._mark(command.instance_id, now_s, "preempted", command.plan.chunks[0].request_id)
                case Restart():
                    where: InstanceId | None = getattr(event, "instance_id", None)
                    if where is not None:
                        self._mark(where, now_s, "retracted" if command.retracted else "restarted", command.request_id)
                case _:
                    pass

    def _planned_step(self, event: StepDone, now_s: float) -> None:
        urgent = (event.instance_id, event.plan_id) in self._urgent
        self._urgent.discard((event.instance_id, event.plan_id))
        begin_s = now_s - event.duration_s - event.waited_s
        if (own_steps := event.own_steps) is not None:
            pause_s = max(event.began_s - own_steps.ended_s, 0.0)  # times of the instance's clock
            self._own_steps(event.instance_id, own_steps, begin_s - pause_s)
        num_tokens = sum(chunk.num_tokens for chunk in event.chunks)
        self._step(StepBar(event.instance_id, begin_s, now_s, num_tokens, event.num_decodes, urgent))

    def _own_steps(self, instance_id: InstanceId, own_steps: OwnDecodeSteps | None, end_s: float) -> None:
        """Add one bar for the decode steps that an instance made by itself, one after the other."""
        if own_steps is not None:
            num_decodes = round(own_steps.num_tokens / max(own_steps.num_steps, 1))
            self._step(StepBar(instance_id, end_s - own_steps.wall_s, end_s, 0, num_decodes, False))

    def _step(self, bar: StepBar) -> None:
        if len(self._steps) < MAX_STEPS:
            self._steps.append(bar)

    def _moved(self, event: TransferSent, now_s: float) -> None:
        view = self._core.request(event.request_id)
        if view is not None and view.instance_ids and len(self._moves) < MAX_MOVES:
            begin_s, destination = now_s - event.duration_s, view.instance_ids[-1]
            self._moves.append(
                KvMove(event.instance_id, destination, begin_s, now_s, event.num_bytes, event.request_id)
            )

    def _mark(self, instance_id: InstanceId, at_s: float, what: str, request_id: str) -> None:
        if len(self._marks) < MAX_MARKS:
            self._marks.append(ActivityMark(instance_id, at_s, what, request_id))

    async def run(self, state: Callable[[], MeshStatus]) -> None:
        """Answer gateways' questions, at most one frame each `FRAME_S`, until cancelled."""
        while True:
            with anyio.move_on_after(IDLE_S if self._collects else None):
                await self._asking.wait()
            if self._asked:
                frame = self.frame(state())
                for gateway_id in self._asked:
                    self._gateways.post(gateway_id, frame)
                self._asked.clear()
            else:
                self._collects = False
                self._urgent.clear()
            self._asking = anyio.Event()
            await anyio.sleep(FRAME_S)

    def frame(self, state: MeshStatus) -> Activity:
        """Return the frame of everything noted since the last frame, and begin a new one."""
        now_s = self._clock()
        requests = [
            RequestActivity(
                id=view.request_id,
                label=self._label(view.request_id),
                phase=view.phase,
                where=view.instance_ids,
                helpers=view.helper_ids,
                num_prompt_tokens=view.num_prompt_tokens,
                num_planned_tokens=view.num_planned_tokens,
                age_s=now_s - view.arrival_s,
            )
            for view in self._core.requests(MAX_REQUESTS)
        ]
        frame = Activity(
            now_s=now_s,
            state=state,
            requests=tuple(requests),
            steps=tuple(self._steps),
            moves=tuple(self._moves),
            marks=tuple(self._marks),
        )
        self._steps, self._moves, self._marks = [], [], []
        return frame
