"""What operators type against a scheduler that runs: what cannot be is one sentence, with the documented exit code."""

from __future__ import annotations

import errno
import os
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
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
from pdmesh.errors import PdmeshError
from pdmesh.model import OperationId, PoolCounts, Role
from pdmesh.testing.modelled import modelled_profile
from pdmesh.wire.admin import ask_scheduler
from pdmesh.wire.messages import (
    MAX_WAIT_S,
    AdminRequest,
    AdminResponse,
    FollowPools,
    GetStatus,
    MeshState,
    OperationStatus,
    ServiceProcess,
    SetPolicy,
    StartResize,
    WaitOperation,
)
from pdmesh_scheduler.operations import read_wishes
from pdmesh_scheduler.testing import CONFIG, SchedulerBench, running_scheduler

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


async def ask(mesh: SchedulerBench, question: AdminRequest) -> AdminResponse:
    return await ask_scheduler(mesh.context.facts["address"], SecurityConfig(), question)


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
            (("drain", "nobody"), 4, "no instance 'nobody' is there: there are d0, p0, p1"),
            (("drain", "d0"), 4, "it is the last that can decode"),
            (("role", "d0", "prefill"), 4, "it is the last that can decode"),
            (("drain", "p1"), 4, "(restart) runs on p1: wait for it, or `pdmesh ops cancel"),
            (("move", "nobody", "d0"), 4, "no request 'nobody' runs"),
            (("ops", "show", "none"), 1, "no operation 'none' is remembered: `pdmesh ops` lists them"),
            (("ops", "cancel", "none"), 1, "no operation 'none' is remembered: `pdmesh ops` lists them"),
        ):
            refused = await typed(mesh, *arguments)
            assert (refused.code, sentence in refused.said) == (code, True), refused
            assert "\n" not in refused.said
        nobody = await typed(mesh, "pool", "resize", "--prefill", "3")
        assert nobody.code == 3
        assert nobody.said.endswith("--scale prefill=3 --scale decode=1")


async def test_a_wrong_token_changes_nothing_and_is_one_sentence() -> None:
    security = SecurityConfig(operator_token="sesame")
    async with three_instances(replace(CONFIG, security=security)) as mesh:
        for arguments in (("drain", "p1"), ("pool", "resize", "--prefill", "1"), ("policy", "set", "fcfs")):
            refused = await typed(mesh, *arguments, PDMESH_SECURITY_OPERATOR_TOKEN="open")
            assert refused == (
                1,
                "changes need an operator's token: set security.operator_token to one that the scheduler takes",
            )
        assert (await typed(mesh, "drain", "p1", PDMESH_SECURITY_OPERATOR_TOKEN="sesame")).code == 0


#: A scheduler that does not answer.
GONE = -1


async def test_the_last_of_a_kind_is_restarted_beside_another_one(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    fails: dict[str, int] = {}

    def started(_asked: object, _kind: object, name: str, **_options: object) -> int:
        done.append(name)
        if fails.get(name) == GONE:
            raise PdmeshError("the scheduler does not answer")
        return fails.get(name, 0)

    def sized(_asked: object, sizes: Mapping[Role, int | None], **_options: object) -> int:
        assert list(sizes) == list(Role), "each is said"
        done.append(" + ".join(f"{size} {role}" for role, size in sizes.items() if size))
        return fails.get(done[-1], 0)

    monkeypatch.setattr("pdmesh.cli.operations.start", started)
    monkeypatch.setattr("pdmesh.cli.operations.resize", sized)
    async with three_instances() as mesh:
        assert (await typed(mesh, "restart", "--rolling")).code == 0
        assert done == ["p0", "p1", "d0"], "nobody is there who could start another one"
        done.clear()
        services = (*FOLLOWING.services, ServiceProcess(name="scheduler", pid=1), ServiceProcess(name="gateway", pid=2))
        await ask(mesh, msgspec.structs.replace(FOLLOWING, services=services))
        assert (await typed(mesh, "restart", "--rolling")).code == 0
        grown, there = "2 prefill + 2 decode", "2 prefill + 1 decode"
        assert done == ["p0", "p1", grown, "d0", there, "gateway", "scheduler"]
        left = "one decode instance more than before may be there: `pdmesh pool resize --decode 1`"
        for failing, code, did, says in (
            ({"d0": 1}, 1, ["p0", "p1", grown, "d0", there], False),
            ({"d0": 1, there: 4}, 1, ["p0", "p1", grown, "d0", there], True),
            ({there: 4}, 4, ["p0", "p1", grown, "d0", there], True),
            ({grown: 4}, 4, ["p0", "p1", grown], False),
            ({"p1": 4}, 4, ["p0", "p1"], False),
        ):
            done.clear()
            fails.clear()
            fails.update(failing)
            failed = await typed(mesh, "restart", "--rolling")
            assert (failed.code, done, left in failed.said) == (code, did, says), failing
        fails.clear()
        fails["d0"] = GONE
        assert left in (await typed(mesh, "restart", "--rolling")).said, "nobody could take it back"


# --- a supervisor that stands still ---


FOLLOWING = FollowPools(
    actuator_id="a",
    services=tuple(ServiceProcess(name=name, pid=3) for name in NAMES),
    available_bytes=1 << 40,
    revision=-1,
    wait_s=0.0,
)


async def resized(mesh: SchedulerBench, pools: PoolCounts, start_timeout_s: float) -> OperationStatus:
    """What becomes of a resize while the supervisor says and does nothing."""
    await ask(mesh, FOLLOWING)
    await ask(
        mesh,
        StartResize(operation_id=OperationId("r"), pools=pools, timeout_s=5.0, start_timeout_s=start_timeout_s),
    )
    status = await ask(mesh, WaitOperation(operation_id=OperationId("r"), num_left=1, wait_s=MAX_WAIT_S))
    assert isinstance(status, OperationStatus)
    return status


async def test_a_supervisor_that_stands_still_fails_a_resize_and_nothing_is_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("pdmesh.core.pools.GONE_S", 0.2)
    async with three_instances() as mesh:
        grown = await resized(mesh, PoolCounts(prefill=2, decode=2), start_timeout_s=0.2)
        assert (grown.state, grown.detail) == ("failed", "decode-0 did not register within 0.2 s")
    async with three_instances() as mesh:
        shrunk = await resized(mesh, PoolCounts(prefill=1, decode=1), start_timeout_s=60.0)
        assert (shrunk.state, shrunk.detail) == ("failed", "the process of p1 did not end within 0.2 s")
        state = await ask(mesh, GetStatus())
        assert isinstance(state, MeshState)
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
    monkeypatch.setattr("pdmesh_scheduler.operations.WRITE_AGAIN_S", 0.02)
    async with three_instances(replace(CONFIG, scheduler=replace(CONFIG.scheduler, operations_file=path))) as mesh:
        await ask(mesh, SetPolicy(bundle="fcfs"))
        await written[-1].wait()
        with monkeypatch.context() as full:
            full.setattr(os, "fsync", no_room)
            assert (await typed(mesh, "drain", "p1")).code == 0, "an operation does not wait for the disk"
            assert (read_wishes(path).bundle, read_wishes(path).operations) == ("fcfs", ()), "what was there is whole"
            written.append(anyio.Event())
        await written[-1].wait()
        kept = read_wishes(path)
        assert (kept.bundle, [wish.instance_id for wish in kept.operations]) == ("fcfs", ["p1"])
