"""A restart of every process as an operation of the scheduler's: nobody waits for it, and it outlives everybody."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import anyio
import anyio.abc
import msgspec
import pytest

from pdmesh.core.commands import StopInstance
from pdmesh.model import InstanceId, Role
from pdmesh.operations import OperationId, PoolMember
from pdmesh.wire.messages import (
    FollowPools,
    GetStatus,
    Goodbye,
    MeshStatus,
    OperationStatus,
    PoolsDesired,
    StartRolling,
    WaitOperation,
)
from pdmesh_scheduler.desired_file import read_desired
from pdmesh_testing.core import a_report
from pdmesh_testing.modelled import modelled_profile
from pdmesh_testing.running_scheduler import CONFIG, SchedulerBench, running_scheduler

pytestmark = pytest.mark.anyio

ROLLING = StartRolling(operation_id=OperationId("x"), timeout_s=5.0, start_timeout_s=20.0)


async def over(mesh: SchedulerBench, name: str = "x") -> OperationStatus:
    """The operation, once it is."""
    num_left = -1
    with anyio.fail_after(30):
        while True:
            status = await mesh.ask(
                WaitOperation(operation_id=OperationId(name), num_left=num_left, wait_s=2.0), OperationStatus
            )
            if status.state != "running":
                return status
            num_left = status.num_left


async def rows(mesh: SchedulerBench) -> dict[str, int]:
    """Instances, and the pids of their processes."""
    state = await mesh.ask(GetStatus(), MeshStatus)
    return {row.instance_id: row.pid for row in state.instances}


@dataclass
class Machine:
    """A supervisor and its instances, as far as the scheduler can tell. It outlives schedulers."""

    beside: dict[str, int]  # pids of the services that are no instances
    instances: dict[str, int]
    num_pids: int = 100
    available_bytes: int = 1 << 40
    told: list[str] = field(default_factory=list[str])
    _news: anyio.Event = field(default_factory=anyio.Event)

    def does(self, what: str) -> None:
        self.told.append(what)
        self._news.set()
        self._news = anyio.Event()

    async def did(self, what: str) -> None:
        """Wait until it has."""
        with anyio.fail_after(30):
            while what not in self.told:
                await self._news.wait()

    def next_pid(self) -> int:
        self.num_pids += 1
        return self.num_pids

    @asynccontextmanager
    async def serving(self, mesh: SchedulerBench) -> AsyncGenerator[None]:
        """Its instances are there, and it does what the scheduler wants."""
        async with anyio.create_task_group() as tasks:
            scopes: dict[str, anyio.CancelScope] = {}
            for name in self.instances:
                await tasks.start(self._instance, mesh, name, scopes)
            tasks.start_soon(self._follow, mesh, tasks, scopes)
            yield
            tasks.cancel_scope.cancel()

    async def _instance(
        self,
        mesh: SchedulerBench,
        name: str,
        scopes: dict[str, anyio.CancelScope],
        *,
        task_status: anyio.abc.TaskStatus[None] = anyio.TASK_STATUS_IGNORED,
    ) -> None:
        """Runs under its name, and is started again whenever it is told to end."""
        with anyio.CancelScope() as scopes[name]:
            while True:
                profile = modelled_profile(name, Role(name.partition("-")[0]))
                async with mesh.worker(replace(profile, pid=self.instances[name])) as worker:
                    task_status.started()
                    await worker.expect(StopInstance, None)
                    worker.post(Goodbye())  # its process may be started again before the scheduler sees a broken stream
                    assert await worker.ended() == "OK"
                self.instances[name] = self.next_pid()
                self.does(name)
                task_status = anyio.TASK_STATUS_IGNORED

    async def _follow(
        self, mesh: SchedulerBench, tasks: anyio.abc.TaskGroup, scopes: dict[str, anyio.CancelScope]
    ) -> None:
        revision = -1
        while True:
            report = replace(
                a_report(*self.instances, services=self.beside, pids=self.instances),
                available_bytes=self.available_bytes,
            )
            question = FollowPools(report=report, revision=revision, wait_s=0.05)
            answer = await mesh.ask(question, PoolsDesired)
            revision, wanted = answer.revision, answer.processes
            for member in wanted.start:
                if member.instance_id not in self.instances:
                    self._start(member)
                    await tasks.start(self._instance, mesh, member.instance_id, scopes)
            for instance_id in wanted.stop:
                if self.instances.pop(instance_id, None) is not None:
                    self.does(f"-{instance_id}")
                    scopes[instance_id].cancel()
            for service in wanted.replace:
                if self.beside[service.name] == service.pid:
                    self.does(service.name)
                    self.beside[service.name] = self.next_pid()

    def _start(self, member: PoolMember) -> None:
        self.does(f"+{member.instance_id}")
        self.instances[member.instance_id] = self.next_pid()


def machine(*names: str) -> Machine:
    return Machine({"scheduler": 1, "gateway": 2}, {name: 10 + index for index, name in enumerate(names)})


PAIR = ("prefill-0", "decode-0")


async def test_one_and_one_are_restarted_beside_another_one_and_are_there_as_before() -> None:
    there = machine(*PAIR)
    async with running_scheduler() as mesh, there.serving(mesh):
        begun = await mesh.ask(ROLLING, OperationStatus)
        assert (begun.state, begun.num_left) == ("running", 4), "who asks need not wait"
        again = await mesh.ask(ROLLING, OperationStatus)
        assert again.began_at == begun.began_at, "asked again it is the same one"
        other = await mesh.ask(msgspec.structs.replace(ROLLING, operation_id=OperationId("y")), OperationStatus)
        assert (other.state, other.detail) == ("refused", "operation x (rolling) runs: wait for it")
        assert (await over(mesh)).detail == ""
        assert there.told == [
            *("+prefill-1", "prefill-0", "-prefill-1"),
            *("+decode-1", "decode-0", "-decode-1"),
            *("gateway", "scheduler"),
        ]
        after = await rows(mesh)
        assert set(after) == set(PAIR)
        assert not set(after.values()) & {10, 11}


@pytest.mark.parametrize("at", ["+prefill-1", "prefill-0", "-prefill-1", "gateway", "scheduler"])
async def test_the_next_scheduler_goes_on_with_it_and_restarts_nothing_twice(tmp_path: Path, at: str) -> None:
    path = tmp_path / "operations.json"
    config = replace(CONFIG, scheduler=replace(CONFIG.scheduler, operations_file=path))
    there = machine(*PAIR)
    async with running_scheduler(config) as mesh, there.serving(mesh):
        await mesh.ask(ROLLING)
        await there.did(at)
    assert read_desired(path, now=0.0, patience_s=0.0).rolling is not None
    async with running_scheduler(config) as mesh, there.serving(mesh):
        ended = await over(mesh)
        assert (ended.state, ended.detail) == ("done", "")
        assert set(await rows(mesh)) == set(PAIR)
    assert [name for name in there.told if name[0] not in "+-"] == ["prefill-0", "decode-0", "gateway", "scheduler"]
    assert read_desired(path, now=0.0, patience_s=0.0).rolling is None


async def test_it_is_refused_before_anything_changes() -> None:
    config = replace(CONFIG, scheduler=replace(CONFIG.scheduler, orphan_grace_s=0.05))
    async with (
        running_scheduler(config) as mesh,
        mesh.worker(modelled_profile("p", Role.PREFILL)),
        mesh.worker(modelled_profile("d", Role.DECODE)),
    ):
        refused = await mesh.ask(ROLLING, OperationStatus)
        assert (refused.state, refused.needs_actuator) == ("refused", True)
        assert "no supervisor is connected to start another" in refused.detail
        forced = msgspec.structs.replace(ROLLING, operation_id=OperationId("y"), force=True)
        begun = await mesh.ask(forced, OperationStatus)
        assert (begun.state, begun.num_left) == ("running", 2), "instances alone: nobody is there for the rest"
    there = machine(*PAIR)
    there.available_bytes = 0
    async with running_scheduler() as mesh, there.serving(mesh):
        refused = await mesh.ask(ROLLING, OperationStatus)
        assert refused.state == "refused"
        assert "GiB of memory" in refused.detail
        assert there.told == []
    assert InstanceId("prefill-0") in there.instances
