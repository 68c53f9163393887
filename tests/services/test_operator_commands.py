"""What operators type against a scheduler that runs: what cannot be is one sentence, with the documented exit code."""

from __future__ import annotations

import errno
import os
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import anyio
import anyio.from_thread
import anyio.to_thread
import msgspec
import pytest
from typer.testing import CliRunner

from pdmesh.cli.app import app
from pdmesh.config import MeshConfig, SecurityConfig
from pdmesh.core.operator_events import OperationRequested
from pdmesh.errors import InstanceUnavailable, PdmeshError
from pdmesh.model import InstanceId, Role
from pdmesh.operations import OperationId, OperationKind, OperationState, PoolCounts
from pdmesh.wire.messages import (
    MAX_WAIT_S,
    AdminError,
    AdminResponse,
    FollowPools,
    GetStatus,
    ListOperations,
    MeshStatus,
    OperationList,
    OperationStatus,
    SetPolicy,
    StartOperation,
    StartResize,
    WaitOperation,
)
from pdmesh_scheduler.desired_file import read_desired
from pdmesh_testing.core import a_report
from pdmesh_testing.modelled import modelled_profile
from pdmesh_testing.running_scheduler import CONFIG, SchedulerBench, running_scheduler

pytestmark = pytest.mark.anyio

NAMES = ("p0", "p1", "d0")


class Typed(NamedTuple):
    """What came of a command."""

    code: int
    said: str


async def typed(mesh: SchedulerBench, *arguments: str, **environ: str) -> Typed:
    def run() -> Typed:
        dial = ("--scheduler", mesh.context.facts["address"])
        result = CliRunner(env=environ).invoke(app, [*arguments, *dial])
        if isinstance(result.exception, PdmeshError):  # `pdmesh.cli.main` prints it
            return Typed(1, f"{result.stderr}{result.exception}")
        return Typed(result.exit_code, result.stderr.strip())  # the scheduler's log goes to the same stdout

    return await anyio.to_thread.run_sync(run)


async def printed(mesh: SchedulerBench, *arguments: str) -> str:
    """Standard output of a command, and what the scheduler logs meanwhile."""
    dial = ("--scheduler", mesh.context.facts["address"])
    return (await anyio.to_thread.run_sync(lambda: CliRunner().invoke(app, [*arguments, *dial]))).stdout


@asynccontextmanager
async def three_instances(config: MeshConfig = CONFIG) -> AsyncGenerator[SchedulerBench]:
    p0, p1, d0 = (modelled_profile(name, Role.DECODE if name == "d0" else Role.PREFILL) for name in NAMES)
    async with (
        running_scheduler(config) as mesh,
        mesh.worker(p0),
        mesh.worker(p1),
        mesh.worker(d0),
    ):
        yield mesh


async def test_what_cannot_be_is_one_sentence_and_its_exit_code() -> None:
    async with three_instances() as mesh:
        first = await typed(mesh, "restart", "p1", "--no-wait")
        assert first.code == 0
        for arguments, code, sentence in (
            (("drain", "nobody"), 4, "no instance is called 'nobody': the mesh has d0, p0, p1"),
            (("drain", "d0"), 4, "it is the last that can decode"),
            (("role", "d0", "prefill"), 4, "it is the last that can decode"),
            (("drain", "p1"), 4, "(restart) runs on p1: wait for it, or `pdmesh ops cancel"),
            (("move", "nobody", "d0"), 4, "request 'nobody' is not running"),
            (("ops", "show", "none"), 1, "no operation 'none' is known: `pdmesh ops` lists them"),
            (("ops", "cancel", "none"), 1, "no operation 'none' is known: `pdmesh ops` lists them"),
        ):
            refused = await typed(mesh, *arguments)
            assert (refused.code, sentence in refused.said) == (code, True), refused
            assert "\n" not in refused.said
        nobody = await typed(mesh, "pool", "resize", "--prefill", "3")
        assert nobody.code == 3
        assert nobody.said.endswith("start and stop the instances yourself: scheduler.resize_command is not set")


async def test_advice_asks_for_the_decisions_that_the_scheduler_keeps_in_memory() -> None:
    async with three_instances() as mesh:
        few = await typed(mesh, "pool", "advise", "--slo-ttft", "500ms", "--last", "5m")
    told = "0 requests ended in the last 300 s of the scheduler's memory: at least 20 are needed for advice"
    assert few == (1, told)


async def test_a_resize_that_nobody_does_says_what_does_by_the_command_of_its_engine() -> None:
    command = 'scale "a b"_prefill={prefill} decode={decode} mixed={mixed} {{other}}'
    settings = replace(CONFIG.scheduler, resize_command=command)
    async with three_instances(replace(CONFIG, scheduler=settings)) as mesh:
        nobody = await typed(mesh, "pool", "resize", "--prefill", "3")
        assert nobody.code == 3
        assert nobody.said.endswith('yourself with\n  scale "a b"_prefill=3 decode=1 mixed=0 {{other}}')
        machine = await typed(mesh, "pool", "resize", "--prefill", "3", "--output", "json")
        assert machine == (3, "")
        last = await typed(mesh, "pool", "resize", "--prefill", "0")
        assert (last.code, "scale" in last.said) == (4, False), "nobody is missing there"


async def test_a_wrong_token_changes_nothing_and_is_one_sentence() -> None:
    security = SecurityConfig(operator_token="sesame")
    async with three_instances(replace(CONFIG, security=security)) as mesh:
        for arguments in (("drain", "p1"), ("pool", "resize", "--prefill", "1"), ("policy", "set", "fcfs")):
            refused = await typed(mesh, *arguments, PDMESH_SECURITY_OPERATOR_TOKEN="open")
            assert refused == (
                1,
                "changing the mesh needs an operator token: set security.operator_token to one it accepts",
            )
        assert (await typed(mesh, "drain", "p1", PDMESH_SECURITY_OPERATOR_TOKEN="sesame")).code == 0


async def test_a_restart_of_everything_is_one_operation_that_nobody_has_to_wait_for() -> None:
    async with three_instances() as mesh:
        refused = await typed(mesh, "restart", "--rolling")
        assert refused.code == 3
        assert "no supervisor is connected to start another" in refused.said
        begun = await typed(mesh, "restart", "--rolling", "--force", "--no-wait")
        assert begun.code == 0
        answer = await mesh.ask(ListOperations(), OperationList)
        (rolling,) = (each for each in answer.operations if each.kind == "rolling" and each.state == "running")
        assert rolling.num_left == 3
        assert (await typed(mesh, "ops", "show", rolling.operation_id)).code == 0
        taken_back = await typed(mesh, "ops", "cancel", rolling.operation_id)
        assert taken_back.code == 0, "though what has begun ends first"
        assert (
            await typed(mesh, "restart", "d0", "--rolling")
        ).said == "give the name of one process, or --rolling for all"


async def test_a_policy_says_what_else_it_changes_and_an_empty_list_why_it_is_empty() -> None:
    async with three_instances() as mesh:
        assert "no requests since the scheduler started\n" in await printed(mesh, "requests", "list")
        batched = await printed(mesh, "policy", "set", "mb")
        assert "pdmesh: policy pdmesh, batching mb" in batched
        assert "brings its own" not in batched
        changed = await printed(mesh, "policy", "set", "pdmesh")
        assert "pdmesh: policy pdmesh, batching ebplus (was mb)" in changed
        assert "pdmesh: a policy brings its own batching mode" in changed


# --- a scheduler that is away ---


async def test_a_scheduler_that_is_replaced_by_the_operation_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    running = OperationStatus(
        operation_id=OperationId("x"),
        kind=OperationKind.ROLLING,
        instance_id=InstanceId(""),
        role=None,
        state=OperationState.RUNNING,
        detail="",
        num_left=1,
        began_at=0.0,
        ended_at=None,
        timeout_s=1.0,
    )
    answers: list[AdminResponse | InstanceUnavailable] = [
        running,
        InstanceUnavailable("away"),
        msgspec.structs.replace(running, state=OperationState.DONE),
    ]

    async def answer(*_: object) -> AdminResponse:
        found = answers.pop(0)
        if isinstance(found, InstanceUnavailable):
            raise found
        return found

    monkeypatch.setattr("pdmesh.wire.admin.ask_scheduler", answer)
    monkeypatch.setattr("pdmesh.cli.operation_requests.AWAY_PAUSE_S", 0.0)
    run = partial(CliRunner().invoke, app, ["restart", "--rolling", "--scheduler", "127.0.0.1:1"])
    result = await anyio.to_thread.run_sync(run)
    assert result.exit_code == 0
    assert "pdmesh: waiting for the new scheduler (up to 60 s)" in result.stderr


async def test_what_is_asked_of_a_scheduler_that_is_being_started_again_is_done_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its first try meets nobody, its second one a scheduler that has not heard of the instances yet."""
    path = tmp_path / "operations.json"
    async with three_instances() as mesh:
        address = mesh.context.facts["address"]
    port = int(address.rpartition(":")[2])
    away = anyio.Event()

    async def sleep(_seconds: float) -> None:
        anyio.from_thread.run_sync(away.set)

    monkeypatch.setattr("pdmesh.cli.operation_requests.anyio.sleep", sleep)
    monkeypatch.setattr("pdmesh.cli.operation_requests.AWAY_PAUSE_S", 0.0)
    results: list[Typed] = []
    config = replace(CONFIG, scheduler=replace(CONFIG.scheduler, port=port, operations_file=path, orphan_grace_s=4.0))

    async def type_it() -> None:
        results.append(await typed(mesh, "drain", "p1"))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(type_it)
        await away.wait()
        async with running_scheduler(config) as again:
            p0, p1, d0 = (modelled_profile(name, Role.DECODE if name == "d0" else Role.PREFILL) for name in NAMES)
            async with again.worker(p0), again.worker(p1), again.worker(d0):
                with anyio.fail_after(20):
                    while not results:
                        await anyio.lowlevel.checkpoint()
                answer = await again.ask(ListOperations(), OperationList)
                assert [(each.instance_id, each.state) for each in answer.operations] == [("p1", "done")]
    (result,) = results
    assert result.code == 0
    assert result.said.splitlines()[0] == "pdmesh: the scheduler does not answer; trying for 10 s"


async def test_a_restart_whose_answer_was_lost_is_not_done_again() -> None:
    """The next scheduler does not know of it; the process that was to go has gone."""
    profile = modelled_profile("p1", Role.PREFILL)
    requested = OperationRequested(
        operation_id=OperationId("x"),
        kind=OperationKind.RESTART,
        instance_id=InstanceId("p1"),
        timeout_s=5.0,
        pid=7,
    )
    async with (
        running_scheduler() as mesh,
        mesh.worker(modelled_profile("p0", Role.PREFILL)),
        mesh.worker(modelled_profile("d0", Role.DECODE)),
        mesh.worker(replace(profile, pid=8)),
    ):
        done = await mesh.ask(StartOperation(requested=requested), OperationStatus)
        assert (done.state, done.detail) == ("done", "another process registered as this instance first")
        again = replace(requested, operation_id=OperationId("y"), pid=8)
        begun = await mesh.ask(StartOperation(requested=again), OperationStatus)
        assert begun.state == "running"
        for forged in (
            replace(requested, again=True),
            replace(requested, stopped_pid=8),
            replace(requested, role_before=Role.MIXED),
        ):
            refused = await mesh.ask(StartOperation(requested=forged), AdminError)
            assert "only a scheduler may send an operation again" in refused.message


async def test_nobody_is_asked_again_who_has_said_no(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pdmesh.cli.operation_requests.FIRST_LIMIT_S", 60.0)
    async with running_scheduler(replace(CONFIG, security=SecurityConfig(mesh_token="ours"))) as mesh:
        with anyio.fail_after(20):
            refused = await typed(mesh, "drain", "p1", PDMESH_SECURITY_MESH_TOKEN="theirs")
    assert refused.code == 1
    assert "wrong mesh token" in refused.said


# --- a supervisor that stands still ---


FOLLOWING = FollowPools(report=a_report(*NAMES), revision=-1, wait_s=0.0)


async def resized(mesh: SchedulerBench, pools: PoolCounts, start_timeout_s: float) -> OperationStatus:
    """What becomes of a resize while the supervisor says and does nothing."""
    await mesh.ask(FOLLOWING)
    await mesh.ask(
        StartResize(operation_id=OperationId("r"), pools=pools, timeout_s=5.0, start_timeout_s=start_timeout_s),
    )
    status = await mesh.ask(
        WaitOperation(operation_id=OperationId("r"), num_left=1, wait_s=MAX_WAIT_S), OperationStatus
    )
    return status


async def test_a_supervisor_that_stands_still_fails_a_resize_and_nothing_is_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("pdmesh.core.operators.pools.GONE_S", 0.2)
    async with three_instances() as mesh:
        grown = await resized(mesh, PoolCounts(prefill=2, decode=2), start_timeout_s=0.2)
        assert (grown.state, grown.detail) == ("failed", "decode-0 did not register within 0.2 s")
    async with three_instances() as mesh:
        shrunk = await resized(mesh, PoolCounts(prefill=1, decode=1), start_timeout_s=60.0)
        assert (shrunk.state, shrunk.detail) == ("failed", "the process of p1 did not end within 0.2 s")
        state = await mesh.ask(GetStatus(), MeshStatus)
        assert [row.draining for row in state.instances] == [False] * 3, "it is used again"


# --- a full disk ---


def no_room(_descriptor: int) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


async def test_what_a_full_disk_did_not_take_is_written_once_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, replace_file = tmp_path / "operations.json", Path.replace
    written: list[anyio.Event] = [anyio.Event()]

    def replaced(part: Path, target: Path) -> Path:
        replace_file(part, target)
        anyio.from_thread.run_sync(written[-1].set)
        return target

    monkeypatch.setattr(Path, "replace", replaced)
    monkeypatch.setattr("pdmesh_scheduler.desired_file.WRITE_AGAIN_S", 0.02)
    async with three_instances(replace(CONFIG, scheduler=replace(CONFIG.scheduler, operations_file=path))) as mesh:
        await mesh.ask(SetPolicy(bundle="fcfs"))
        await written[-1].wait()
        with monkeypatch.context() as full:
            full.setattr(os, "fsync", no_room)
            assert (await typed(mesh, "drain", "p1")).code == 0, "an operation does not wait for the disk"
            there = read_desired(path, now=0.0, patience_s=0.0)
            assert (there.bundle, there.operations) == ("fcfs", ()), "what was there is whole"
            written.append(anyio.Event())
        await written[-1].wait()
        kept = read_desired(path, now=0.0, patience_s=0.0)
        assert (kept.bundle, [each.instance_id for each in kept.operations]) == ("fcfs", ["p1"])
