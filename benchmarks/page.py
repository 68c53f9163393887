"""What the page costs, with 64 instances and 1,000 requests: CPU time of its stream, and frames a second in Chromium.

Usage: python benchmarks/page.py [--instances N] [--requests N] [--seconds S]

A simulated mesh under load feeds the scheduler's `ActivityFeed`, a frame for each 0.2 simulated seconds; the frames are
then played at that pace to a real gateway with a real browser before it. CPU time is that of noting events, making and
packing frames, and of unpacking, encoding and handing them on in the gateway. Exits with 1 if a limit is missed: 5 % of
a core for the stream.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import cast

import anyio
import msgspec
from report import heading, unavailable
from simulated import layout

from pdmesh.core.commands import Command
from pdmesh.core.events import Event
from pdmesh.core.scheduler import SchedulerCore
from pdmesh.model import GatewayId
from pdmesh.policy.config import PolicyConfig
from pdmesh.policy.latency import LLAMA_3_8B
from pdmesh.policy.views import InstanceView
from pdmesh.wire.messages import Activity, GatewayDown, InstanceStatus, MeshStatus
from pdmesh_gateway.gateway_metrics import RecentLatencies
from pdmesh_gateway.page_activity import ActivityHub
from pdmesh_lab.sim.mesh import MeshShape, study_core
from pdmesh_lab.sim.simulator import Simulator
from pdmesh_lab.sim.workload import Synthetic, synthetic
from pdmesh_scheduler.activity import FRAME_S, ActivityFeed
from pdmesh_scheduler.observing import Handled
from pdmesh_scheduler.peer_streams import Peers
from pdmesh_testing.browser import find_chromium, open_page
from pdmesh_testing.checkpoints import write_checkpoint
from pdmesh_testing.running_gateway import running_gateway
from pdmesh_testing.scripted_mesh import scripted_mesh

GATEWAY = GatewayId("g")
LIMIT = 0.05


class WatchedCore:
    """A core in a simulation that is watched all the time."""

    def __init__(self, core: SchedulerCore) -> None:
        self._core = core
        self._now_s = 0.0
        self._frame_at_s = 0.0
        self.feed = ActivityFeed(
            core, cast("Peers[GatewayId, GatewayDown]", None), clock=lambda: self._now_s, label=lambda _: ""
        )
        self.feed.asked(GATEWAY)
        self.frames: list[Activity] = []
        self.cost_s = 0.0

    def handle(self, event: Event, now_s: float) -> list[Command]:
        commands = self._core.handle(event, now_s)
        self._now_s = now_s
        state = None
        if now_s >= self._frame_at_s:
            self._frame_at_s = now_s + FRAME_S
            state = self._state()
        began_s = time.process_time()
        self.feed.observe(Handled(event=event, now_s=now_s, commands=commands, milestones=()))
        if state is not None:
            self.frames.append(self.feed.frame(state))
        self.cost_s += time.process_time() - began_s
        return commands

    def check_integrity(self) -> None:
        self._core.check_integrity()

    def _state(self) -> MeshStatus:
        core = self._core
        return MeshStatus(
            ready=True,
            reason="",
            instances=tuple(_status(view) for view in core.instances),
            num_waiting=core.num_waiting,
            num_running=core.num_running,
            bundle=core.bundle,
        )


def _status(view: InstanceView) -> InstanceStatus:
    return InstanceStatus(
        instance_id=view.instance_id,
        role=view.role,
        model="simulated",
        device="simulated",
        draining=view.draining,
        pid=1,
        num_blocks=view.num_blocks,
        num_free_blocks=view.num_free_blocks,
        num_held_blocks=view.num_blocks - view.num_free_blocks,
        num_quarantined_blocks=0,
        num_prefilling=view.num_prefilling,
        num_decoding=view.num_decoding,
        num_queued_tokens=view.num_queued_tokens,
        num_taken_blocks=view.num_blocks - view.num_free_blocks,
    )


def simulated(num_instances: int, num_requests: int) -> WatchedCore:
    """Twice as many requests as are to be under way at once come within two seconds."""
    mesh = MeshShape(
        num_prefill=num_instances // 2,
        num_decode=num_instances - num_instances // 2,
        num_mixed=0,
        kv_layout=layout(LLAMA_3_8B),
        num_kv_tokens=1 << 19,
    )
    arrivals = synthetic(Synthetic(num_requests=2 * num_requests, requests_per_s=num_requests), random.Random(0))
    core = WatchedCore(study_core("pdmesh", PolicyConfig(), seed=0))
    Simulator(core, mesh.instances(PolicyConfig().latency), arrivals).run()
    return core


def of_gateway(frames: Sequence[Activity]) -> tuple[float, float]:
    """CPU seconds and bytes of a frame in a gateway that one page watches."""

    async def hand_on() -> tuple[float, float]:
        hub = ActivityHub("simulated", RecentLatencies(), lambda: None)
        packed = [msgspec.msgpack.encode(frame) for frame in frames]
        num_bytes = 0
        async with hub.frames() as page:
            began_s = time.process_time()
            for data in packed:
                hub.publish(msgspec.msgpack.decode(data, type=Activity))
                num_bytes += len(await page.receive())
            return (time.process_time() - began_s) / len(packed), num_bytes / len(packed)

    return anyio.run(hand_on)


async def in_browser(executable: str, frames: Sequence[Activity], seconds: float) -> float:
    """Frames a second that the page draws while it gets these."""
    with TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        write_checkpoint(model)
        async with (
            scripted_mesh() as mesh,
            running_gateway(model, mesh.address) as gateway,
            open_page(executable) as page,
        ):
            await mesh.until(lambda: len(mesh.registrations) == 1)
            await page.open(f"{gateway.url}/ui")
            await mesh.until(lambda: mesh.num_activity_asked > 0)

            async def play() -> None:
                while True:
                    for frame in frames:
                        mesh.say(frame)
                        await anyio.sleep(FRAME_S)

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(play)
                await page.until("document.querySelectorAll('.instance').length > 0")
                drawn = "pdmesh.timeline.frames"
                before, began_s = await page.run(drawn), time.monotonic()
                await anyio.sleep(seconds)
                rate = (await page.run(drawn) - before) / (time.monotonic() - began_s)
                tasks.cancel_scope.cancel()
    return float(rate)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--instances", type=int, default=64)
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=10.0)
    options = parser.parse_args()
    core = simulated(options.instances, options.requests)
    busy = [frame for frame in core.frames if frame.state.num_running + frame.state.num_waiting >= options.requests]
    scheduler_s = core.cost_s / len(core.frames)
    gateway_s, num_bytes = of_gateway(busy)
    share = (scheduler_s + gateway_s) / FRAME_S
    print(heading(f"The page, {options.instances} instances, {options.requests} requests and more under way"))
    print(
        f"frames of {num_bytes / 1024:.0f} KiB with {fmean(len(frame.steps) for frame in busy):.0f} steps, 5 a second"
    )
    print(f"CPU a frame: {scheduler_s * 1e3:.2f} ms in the scheduler, {gateway_s * 1e3:.2f} ms in the gateway")
    print(f"of a core: {share:.1%} (limit {LIMIT:.0%})")
    chromium = find_chromium()
    if chromium is None:
        unavailable("no Chromium is installed")
    print(f"frames a second in Chromium: {anyio.run(in_browser, chromium, busy, options.seconds):.1f}")
    return int(share > LIMIT)


if __name__ == "__main__":
    sys.exit(main())
