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

from pdmesh.config import SecurityConfig
from pdmesh.core.commands import StopInstance
from pdmesh.errors import InstanceUnavailable, PdmeshError
from pdmesh.model import InstanceId, OperationId, PoolMember, Role
from pdmesh.wire.admin import ask_scheduler
from pdmesh.wire.messages import (
    AdminError,
    AdminRequest,
    AdminResponse,
    CancelOperation,
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


async def ask(mesh: SchedulerBench, question: AdminRequest) -> AdminResponse:
    try:
        return await ask_scheduler(mesh.context.facts["address"], SecurityConfig(), question)
    except InstanceUnavailable:
        raise
    except PdmeshError as error:
        return AdminError(message=str(error))


async def over(mesh: SchedulerBench, name: str = "x") -> OperationStatus:
    """The operation, once it is."""
    num_left = -1
    with anyio.fail_after(30):
        while True:
            status = await ask(mesh, WaitOperation(operation_id=OperationId(name), num_left=num_left, wait_s=2.0))
            assert isinstance(status, OperationStatus), status
            if status.state != "running":
                return status
            num_left = status.num_left


async def rows(mesh: SchedulerBench) -> dict[str, int]:
    """Instances, and the pids of their processes."""
    state = await ask(mesh, GetStatus())
    assert isinstance(state, MeshStatus)
    return {row.instance_id: row.pid for row in state.instances}


_NOW = anyio.Event()
_NOW.set()


@dataclass
class Machine:
    """A supervisor and its instances, as far as the scheduler can tell. It outlives schedulers."""

    beside: dict[str, int]  # pids of the services that are no instances
    instances: dict[str, int]
    num_pids: int = 100
    available_bytes: int = 1 << 40
    held: dict[str, anyio.Event] = field(default_factory=dict[str, anyio.Event])  # they do not come back before
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
                await self.held.get(name, _NOW).wait()
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
            answer = await ask(mesh, question)
            assert isinstance(answer, PoolsDesired), answer
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
        begun = await ask(mesh, ROLLING)
        assert isinstance(begun, OperationStatus)
        assert (begun.state, begun.num_left) == ("running", 4), "who asks need not wait"
        again = await ask(mesh, ROLLING)
        assert isinstance(again, OperationStatus)
        assert again.began_at == begun.began_at, "asked again it is the same one"
        other = await ask(mesh, msgspec.structs.replace(ROLLING, operation_id=OperationId("y")))
        assert isinstance(other, OperationStatus)
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


async def test_two_and_two_need_nobody_beside_them() -> None:
    there = machine(*PAIR, "prefill-1", "decode-1")
    async with running_scheduler() as mesh, there.serving(mesh):
        await ask(mesh, ROLLING)
        assert (await over(mesh)).detail == ""
    assert there.told == ["prefill-0", "prefill-1", "decode-0", "decode-1", "gateway", "scheduler"]


@pytest.mark.parametrize("at", ["+prefill-1", "prefill-0", "-prefill-1", "gateway", "scheduler"])
async def test_the_next_scheduler_goes_on_with_it_and_restarts_nothing_twice(tmp_path: Path, at: str) -> None:
    path = tmp_path / "operations.json"
    config = replace(CONFIG, scheduler=replace(CONFIG.scheduler, operations_file=path))
    there = machine(*PAIR)
    async with running_scheduler(config) as mesh, there.serving(mesh):
        await ask(mesh, ROLLING)
        await there.did(at)
    assert read_desired(path, now=0.0, patience_s=0.0).rolling is not None
    async with running_scheduler(config) as mesh, there.serving(mesh):
        ended = await over(mesh)
        assert (ended.state, ended.detail) == ("done", "")
        assert set(await rows(mesh)) == set(PAIR)
    assert [name for name in there.told if name[0] not in "+-"] == ["prefill-0", "decode-0", "gateway", "scheduler"]
    assert read_desired(path, now=0.0, patience_s=0.0).rolling is None


async def test_a_cancelled_one_begins_nothing_more_and_takes_away_what_it_had_started() -> None:
    there = machine(*PAIR)
    there.held["prefill-0"] = anyio.Event()
    async with running_scheduler() as mesh, there.serving(mesh):
        await ask(mesh, ROLLING)
        await there.did("prefill-0")
        ends = await ask(mesh, CancelOperation(operation_id=OperationId("x")))
        assert isinstance(ends, OperationStatus)
        assert ends.state == "running", "what has begun ends first"
        assert ends.detail.startswith("an operator took it back; prefill-0: ")
        there.held["prefill-0"].set()
        ended = await over(mesh)
        assert (ended.state, ended.detail) == ("cancelled", "an operator took it back")
        assert set(await rows(mesh)) == set(PAIR)
    assert there.told == ["+prefill-1", "prefill-0", "-prefill-1"]


async def test_one_that_is_cancelled_while_it_waits_for_somebody_starts_nobody() -> None:
    there = machine(*PAIR, "prefill-1")
    there.held["prefill-1"] = anyio.Event()
    async with running_scheduler() as mesh, there.serving(mesh):
        await ask(mesh, ROLLING)
        await there.did("prefill-1")
        there.instances["mixed-9"] = 99  # died, and is started again by its supervisor
        with anyio.fail_after(10):
            told: set[str] = set()
            while "mixed-9" not in told:
                state = await ask(mesh, GetStatus())
                assert isinstance(state, MeshStatus)
                told = {each.name for each in state.services}
            there.held["prefill-1"].set()
            detail = ""
            while detail != "waits for mixed-9 to come back":
                status = await ask(mesh, WaitOperation(operation_id=OperationId("x"), num_left=3, wait_s=0.05))
                assert isinstance(status, OperationStatus)
                detail = status.detail
            await ask(mesh, CancelOperation(operation_id=OperationId("x")))
            ended = await over(mesh)
        assert (ended.state, ended.detail) == ("cancelled", "an operator took it back")
        assert there.told == ["prefill-0", "prefill-1"]


async def test_one_of_which_a_part_fails_is_over_once_all_are_there_and_nobody_else() -> None:
    there = machine(*PAIR)
    there.held["prefill-0"] = anyio.Event()
    async with running_scheduler() as mesh, there.serving(mesh):
        await ask(mesh, ROLLING)
        await there.did("prefill-0")
        await ask(mesh, CancelOperation(operation_id=OperationId("x/prefill-0")))
        there.held["prefill-0"].set()
        ended = await over(mesh)
        reason = "the restart of prefill-0 was cancelled: an operator took it back"
        assert (ended.state, ended.detail) == ("failed", reason)
        assert set(await rows(mesh)) == set(PAIR)
    assert there.told == ["+prefill-1", "prefill-0", "-prefill-1"]


async def test_it_is_refused_before_anything_changes() -> None:
    config = replace(CONFIG, scheduler=replace(CONFIG.scheduler, orphan_grace_s=0.05))
    async with (
        running_scheduler(config) as mesh,
        mesh.worker(modelled_profile("p", Role.PREFILL)),
        mesh.worker(modelled_profile("d", Role.DECODE)),
    ):
        refused = await ask(mesh, ROLLING)
        assert isinstance(refused, OperationStatus)
        assert (refused.state, refused.needs_actuator) == ("refused", True)
        assert "no supervisor is connected to start another" in refused.detail
        forced = msgspec.structs.replace(ROLLING, operation_id=OperationId("y"), force=True)
        begun = await ask(mesh, forced)
        assert isinstance(begun, OperationStatus)
        assert (begun.state, begun.num_left) == ("running", 2), "instances alone: nobody is there for the rest"
    there = machine(*PAIR)
    there.available_bytes = 0
    async with running_scheduler() as mesh, there.serving(mesh):
        refused = await ask(mesh, ROLLING)
        assert isinstance(refused, OperationStatus)
        assert refused.state == "refused"
        assert "GiB of memory" in refused.detail
        assert there.told == []
    assert InstanceId("prefill-0") in there.instances
