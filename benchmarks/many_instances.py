"""What a scheduler and a gateway cost by the number of instances: heartbeats, joins, token links, and scheduling.

    python benchmarks/many_instances.py [heartbeats] [joins] [links] [simulated] [--scale N ...]

The first three are of real processes, on one machine with the stand-ins for the instances: these speak the protocol
with a connection each, and compute nothing. CPU is that of the scheduler's process, or of the gateway's, alone. Bytes
are all that went over the loopback device, in both directions, with headers and acknowledgements; that takes root.

The last one is of a simulated mesh, half of it for prefill, in which each decode instance has about 100 streams all the
time: which share of a core the scheduling core takes. `docs/cells.md` says what follows for 10,000 instances.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import logging
import os
import random
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path

import anyio
import anyio.abc
import structlog
from report import heading
from simulated import layout, table

import pdmesh.wire.endpoint
from pdmesh.cli.processes import ending_with_us
from pdmesh.config import SecurityConfig
from pdmesh.core.commands import Command
from pdmesh.core.events import Event, LoadReported
from pdmesh.core.scheduler import SchedulerCore
from pdmesh.demo.demo_checkpoint import demo_checkpoint
from pdmesh.garbage import rare_collections
from pdmesh.model import Epoch, GatewayId, InstanceId, RequestId, Resident, Role
from pdmesh.policy.config import PolicyConfig
from pdmesh.policy.latency import LLAMA_3_8B
from pdmesh.wire.link import GRPC_OPTIONS
from pdmesh.wire.messages import RegisterWorker
from pdmesh.wire.scheduler_channel import open_scheduler_channel
from pdmesh.worker.scheduler_link import WorkerSession
from pdmesh.worker.token_links import open_token_links
from pdmesh_lab.sim.mesh import MeshShape, study_core
from pdmesh_lab.sim.simulator import Simulator
from pdmesh_lab.sim.workload import Arrival
from pdmesh_testing.modelled import modelled_profile
from pdmesh_testing.standby import free_port

GATEWAY = GatewayId("gateway-of-nobody")
SECURITY = SecurityConfig()

#: That the processor's use is measured for.
MEASURED_S = 15.0
SETTLE_S = 3.0

#: Of an instance that registers with a scheduler which has just begun.
NUM_RESIDENTS = 100

#: Of the simulated mesh: with these, a decode instance draws about 100 streams at once.
OUTPUT_TOKENS, PROMPT_TOKENS, REQUESTS_A_S = 400, 256, 5.0
WARM_S, SIMULATED_S = 20.0, 10.0

_CLONE_NEWNET = 0x40000000


class Process:
    """A service of the mesh, and what it takes."""

    def __init__(self, module: str, settings: Mapping[str, str]) -> None:
        read_fd, write_fd = os.pipe()
        environ = {**{f"PDMESH_{name}": value for name, value in settings.items()}, "PDMESH_READY_FD": str(write_fd)}
        command = ending_with_us([sys.executable, "-m", module])
        self._process = subprocess.Popen(
            command, env=os.environ | environ, pass_fds=[write_fd], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        os.close(write_fd)
        self._ready = open(read_fd)  # noqa: SIM115  # closed by `kill`

    def announced(self) -> None:
        """Wait until it serves."""
        assert "pid" in json.loads(self._ready.readline())

    @property
    def cpu_s(self) -> float:
        fields = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    @property
    def rss_mib(self) -> float:
        return int(Path(f"/proc/{self._process.pid}/statm").read_text().split()[1]) * resource.getpagesize() / 2**20

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        self._ready.close()


@contextmanager
def running(module: str, settings: Mapping[str, str]) -> Generator[Process]:
    process = Process(module, settings)
    try:
        process.announced()
        yield process
    finally:
        process.kill()


def loopback_bytes() -> int:
    lines = Path("/proc/thread-self/net/dev").read_text().splitlines()
    (received,) = [int(line.split(":")[1].split()[0]) for line in lines if line.strip().startswith("lo:")]
    return received


class StandIn:
    """An instance that registers, says that it is there, and computes nothing."""

    def __init__(self, number: int, *, num_residents: int = 0, changes: bool = False) -> None:
        self.instance_id = InstanceId(f"decode-{number:05}")
        self.num_beats = 0
        self.joined = anyio.Event()
        self._changes = changes
        self._profile = modelled_profile(self.instance_id, Role.DECODE, num_blocks=4096, max_num_seqs=256)
        self._residents = tuple(
            Resident(
                request_id=RequestId(f"request-{number:05}-{index:03}"),
                epoch=Epoch(0),
                gateway_id=GATEWAY,
                num_blocks=30,
                num_context_tokens=100,
                decoding=True,
            )
            for index in range(num_residents)
        )

    async def run(self, address: str) -> None:
        async with open_scheduler_channel(address, SECURITY) as channel:
            session = WorkerSession(
                channel,
                prepare=self._prepare,
                registration=lambda: RegisterWorker(profile=self._profile, residents=self._residents),
                registered=lambda: None,
                load=self._load,
                handle=lambda message, prompt: None,
                check=lambda _: None,
                lost=lambda: None,
            )
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(session.run)
                await session.registered.wait()
                self.joined.set()

    async def _prepare(self) -> None:
        pass

    def _load(self) -> LoadReported:
        self.num_beats += 1
        held = 30 * len(self._residents) + (self.num_beats % 2 if self._changes else 0)
        return LoadReported(self.instance_id, 4096 - held, held, 0, len(self._residents))


def scheduler_settings(port: int) -> dict[str, str]:
    return {"SCHEDULER_PORT": str(port), "SCHEDULER_METRICS_PORT": "0"}


async def used(process: Process, count: Callable[[], int]) -> tuple[float, float, float]:
    """The share of a core that a process takes, and microseconds of it and bytes for each of what is counted."""
    await anyio.sleep(SETTLE_S)
    cpu_s, num_bytes, number, began_s = process.cpu_s, loopback_bytes(), count(), time.monotonic()
    await anyio.sleep(MEASURED_S)
    cpu_s, num_bytes, number = process.cpu_s - cpu_s, loopback_bytes() - num_bytes, count() - number
    return cpu_s / (time.monotonic() - began_s), cpu_s / number * 1e6, num_bytes / number


async def join(stand_ins: Sequence[StandIn], address: str, tasks: anyio.abc.TaskGroup) -> float:
    """Have all of them register; the seconds that it took."""
    began_s = time.monotonic()
    for each in stand_ins:
        tasks.start_soon(each.run, address)
    for each in stand_ins:
        await each.joined.wait()
    return time.monotonic() - began_s


async def heartbeats(number: int) -> list[list[str]]:
    """Of instances that do nothing, and of those whose counts change with each heartbeat."""
    return [await beating(number, changes=changes) for changes in (False, True)]


async def beating(number: int, *, changes: bool) -> list[str]:
    port = free_port()
    stand_ins = [StandIn(index, changes=changes) for index in range(number)]
    with running("pdmesh_scheduler", scheduler_settings(port)) as scheduler:
        async with anyio.create_task_group() as tasks:
            cpu_s = scheduler.cpu_s
            took_s = await join(stand_ins, f"127.0.0.1:{port}", tasks)
            join_ms = (scheduler.cpu_s - cpu_s) / number * 1e3
            share, cost_us, num_bytes = await used(scheduler, lambda: sum(each.num_beats for each in stand_ins))
            tasks.cancel_scope.cancel()
        what = "counts change" if changes else "idle"
        figures = [f"{took_s:.1f}", f"{join_ms:.2f}", f"{share:.1%}", f"{cost_us:.0f}", f"{num_bytes:.0f}"]
        return [f"{number:,}", what, *figures, f"{scheduler.rss_mib:.0f}"]


async def joins(number: int) -> list[list[str]]:
    """A scheduler is started again: all instances register at once, each with `NUM_RESIDENTS`."""
    port = free_port()
    stand_ins = [StandIn(index, num_residents=NUM_RESIDENTS) for index in range(number)]
    with running("pdmesh_scheduler", scheduler_settings(port)) as scheduler:
        async with anyio.create_task_group() as tasks:
            cpu_s, num_bytes = scheduler.cpu_s, loopback_bytes()
            took_s = await join(stand_ins, f"127.0.0.1:{port}", tasks)
            cpu_s, num_bytes = scheduler.cpu_s - cpu_s, loopback_bytes() - num_bytes
            tasks.cancel_scope.cancel()
        figures = [f"{took_s:.1f}", f"{cpu_s:.2f}", f"{cpu_s / number / NUM_RESIDENTS * 1e6:.0f}"]
        return [[f"{number:,}", *figures, f"{num_bytes / number / 1024:.1f}", f"{scheduler.rss_mib:.0f}"]]


async def links(number: int) -> list[list[str]]:
    """Token streams of so many instances to one gateway, with nothing to say but that they are there."""
    port, token_port = free_port(), free_port()
    gateway_settings = {
        "MODEL": str(demo_checkpoint()),
        "SCHEDULER_ADDRESS": f"127.0.0.1:{port}",
        "GATEWAY_PORT": "0",
        "GATEWAY_GRPC_PORT": "0",
        "GATEWAY_TOKEN_PORT": str(token_port),
    }
    with (
        running("pdmesh_scheduler", scheduler_settings(port)),
        running("pdmesh_gateway", gateway_settings) as gateway,
    ):
        async with AsyncExitStack() as stack:
            rss_mib = gateway.rss_mib
            for index in range(number):
                opened = await stack.enter_async_context(open_token_links(InstanceId(f"decode-{index:05}"), SECURITY))
                opened.open(f"127.0.0.1:{token_port}", GATEWAY)
            began_s = time.monotonic()
            share, cost_us, num_bytes = await used(gateway, lambda: round((time.monotonic() - began_s) * number / 0.3))
            return [
                [
                    f"{number:,}",
                    f"{share:.1%}",
                    f"{cost_us:.0f}",
                    f"{num_bytes:.0f}",
                    f"{(gateway.rss_mib - rss_mib) / number * 1024:.0f}",
                ]
            ]


class TimedCore:
    """A core that takes down what it cost once a mesh is warm."""

    def __init__(self, core: SchedulerCore) -> None:
        self._core = core
        self.cost_s, self.num_events = 0.0, 0

    def handle(self, event: Event, now_s: float) -> list[Command]:
        began_ns = time.process_time_ns()
        commands = self._core.handle(event, now_s)
        if WARM_S <= now_s < WARM_S + SIMULATED_S:
            self.cost_s += (time.process_time_ns() - began_ns) / 1e9
            self.num_events += 1
        return commands

    def check_integrity(self) -> None:
        self._core.check_integrity()


def simulated(number: int) -> list[str]:
    policy, rng = PolicyConfig(), random.Random(0)
    mesh = MeshShape(
        num_prefill=number // 2,
        num_decode=number // 2,
        num_mixed=0,
        kv_layout=layout(LLAMA_3_8B),
        num_kv_tokens=1 << 19,
    )
    arrivals: list[Arrival] = []
    now_s = 0.0
    while now_s < WARM_S + SIMULATED_S:
        now_s += rng.expovariate(REQUESTS_A_S * number / 2)
        arrivals.append(
            Arrival(
                arrival_s=now_s,
                num_prompt_tokens=PROMPT_TOKENS,
                num_output_tokens=round(rng.uniform(0.5, 1.5) * OUTPUT_TOKENS),
            )
        )
    core = TimedCore(study_core("pdmesh", policy, seed=0))
    with rare_collections():
        result = Simulator(core, mesh.instances(policy.latency), arrivals).run()
    middle_s = WARM_S + SIMULATED_S / 2
    streams = sum(
        bool(each.token_times_s) and each.token_times_s[0] <= middle_s < each.token_times_s[-1]
        for each in result.requests
    )
    return [
        f"{number:,}",
        f"{streams / (number / 2):.0f}",
        f"{core.num_events / SIMULATED_S:,.0f}",
        f"{core.cost_s / core.num_events * 1e6:.0f}",
        f"{core.cost_s / SIMULATED_S:.0%}",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="*", metavar="WHAT", help="heartbeats, joins, links, simulated; default: all")
    parser.add_argument("--scale", action="append", type=int, help="instances; default: 64, 256 and 1,000")
    options = parser.parse_args()
    wanted = options.what or ["heartbeats", "joins", "links", "simulated"]
    scales = options.scale or [64, 256, 1000]
    print(heading("a scheduler and a gateway by the number of instances"))
    if ctypes.CDLL(None).unshare(_CLONE_NEWNET) == 0:  # so that nothing else is on the loopback device
        subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    # In one process, channels of equal options share a connection; instances have one each.
    vars(pdmesh.wire.endpoint)["GRPC_OPTIONS"] = (*GRPC_OPTIONS, ("grpc.use_local_subchannel_pool", 1))
    live = {
        "heartbeats": (
            heartbeats,
            ["instances", "", "joined in, s", "CPU a join, ms", "of a core", "CPU a heartbeat, us", "bytes", "MiB"],
        ),
        "joins": (joins, ["instances", "joined in, s", "CPU, s", "CPU a request, us", "KiB an instance", "MiB"]),
        "links": (links, ["links", "of a core", "CPU a heartbeat, us", "bytes", "KiB a link"]),
    }
    for name in wanted:
        if name in live:
            measure, head = live[name]
            rows = [row for scale in scales for row in anyio.run(measure, scale, backend_options={"use_uvloop": True})]
        else:
            head = ["instances", "streams of a decode instance", "events/s", "event, us", "of a core"]
            rows = [simulated(scale) for scale in scales]
        print(f"\n{name}\n\n{table(head, rows)}", flush=True)


if __name__ == "__main__":
    main()
