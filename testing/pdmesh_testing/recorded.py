"""A recorded run: a simulated mesh whose scheduling core writes its event log, as the service's does."""

from __future__ import annotations

import random
from pathlib import Path

from pdmesh.core.commands import Command
from pdmesh.core.config import CoreConfig
from pdmesh.core.events import Event
from pdmesh.eventlog import EventLogWriter, Header, core_of
from pdmesh.model import InstanceId, Role
from pdmesh.policy.config import PolicyConfig
from pdmesh.wire.messages import InstanceStatus
from pdmesh_lab.sim.mesh import MeshShape
from pdmesh_lab.sim.simulator import Simulator
from pdmesh_lab.sim.workload import Synthetic, synthetic
from pdmesh_testing.sim import BINARY_MODEL, TINY_LAYOUT


class RecordedCore:
    """A core with its event log, as the service drives it."""

    def __init__(self, header: Header, log: EventLogWriter) -> None:
        self._core = core_of(header)
        self._log = log

    def handle(self, event: Event, now_s: float) -> list[Command]:
        self._log.record(now_s, event)
        commands = self._core.handle(event, now_s)
        self._log.record_commands(commands)
        return commands

    def check_integrity(self) -> None:
        self._core.check_integrity()


def record_run(path: Path) -> None:
    """Write the log of a run in which a short prompt waits behind a long one."""
    header = Header(
        seed=7,
        bundle="fcfs",
        config=CoreConfig(policy=PolicyConfig(chunk_tokens=16, long_prompt_tokens=100)),
        started_at=0.0,
        started_s=0.0,
    )
    mesh = MeshShape(num_prefill=1, num_decode=1, num_mixed=1, kv_layout=TINY_LAYOUT, num_kv_tokens=4096)
    shape = Synthetic(
        num_requests=20,
        requests_per_s=2.0,
        median_prompt_tokens=20,
        median_output_tokens=4,
        long_share=0.3,
        long_range=(100, 300),
    )
    with EventLogWriter(path, header) as log:
        arrivals = synthetic(shape, random.Random(1))
        Simulator(RecordedCore(header, log), mesh.instances(BINARY_MODEL), arrivals).run()


def row(name: str, *, num_decoding: int = 0, draining: bool = False) -> InstanceStatus:
    """Return the status of an instance whose name begins with its role."""
    role = Role(name.partition("-")[0])
    return InstanceStatus(
        instance_id=InstanceId(name),
        role=role,
        model="m",
        device="cpu",
        pid=1,
        draining=draining,
        num_blocks=1,
        num_free_blocks=1,
        num_held_blocks=0,
        num_quarantined_blocks=0,
        num_prefilling=0,
        num_decoding=num_decoding,
        num_queued_tokens=0,
    )
