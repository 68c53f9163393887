"""Pools of other sizes, under load: nobody's stream breaks, and each says what it would have said."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
from collections import Counter
from collections.abc import Generator

import pytest

from pdmesh_testing.load import requests_of, running_load
from pdmesh_testing.mesh import STAND_IN, RunningMesh, running_mesh

pytestmark = [pytest.mark.anyio, pytest.mark.e2e, pytest.mark.ucx, pytest.mark.timeout(600)]

#: Steps as slow as those of a large model: the load costs little, and an operation has streams to disturb.
SETTINGS = {**STAND_IN, "WORKER_FAKE_LATENCY": "a_s=0.005,b_s=2e-5,decode_a_s=0.01"}

REQUESTS = requests_of(5, [20, 45, 70, 130], max_tokens=120)


@pytest.fixture(scope="module")
def wide_mesh(tmp_path_factory: pytest.TempPathFactory) -> Generator[RunningMesh]:
    folder = tmp_path_factory.mktemp("wide")
    with running_mesh(folder, model=None, prefill=2, decode=2, gateways=2, settings=SETTINGS) as mesh:
        yield mesh


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Generator[RunningMesh]:
    with running_mesh(tmp_path_factory.mktemp("pools"), model=None, settings=SETTINGS) as mesh:
        yield mesh


def pools(mesh: RunningMesh) -> dict[str, int]:
    return dict(Counter(row.role for row in mesh.status().instances))


def failing(mesh: RunningMesh, *arguments: str) -> tuple[int, str]:
    """Exit code and standard error."""
    with pytest.raises(subprocess.CalledProcessError) as failure:
        mesh.pdmesh(*arguments)
    return failure.value.returncode, failure.value.stderr


async def test_one_and_one_become_two_and_three_and_back_under_load(mesh: RunningMesh) -> None:
    async with running_load(mesh.base_url, mesh.model, REQUESTS, at_once=6) as load:
        await load.ended(3)
        done = json.loads(
            await asyncio.to_thread(mesh.pdmesh, "pool", "resize", "--prefill", "2", "--decode", "3", "-o", "json")
        )
        assert done["state"] == "done", done
        assert await asyncio.to_thread(pools, mesh) == {"prefill": 2, "decode": 3}
        await load.ended(12)
        await asyncio.to_thread(mesh.pdmesh, "pool", "resize", "--prefill", "1", "--decode", "1", "--timeout", "1")
        assert len(mesh.pids()) == 4, "done is when the memory is free"
        assert await asyncio.to_thread(pools, mesh) == {"prefill": 1, "decode": 1}
        await load.ended(3)
    assert not load.failed
    assert not load.differ
    assert len(load.streams) > 18
    await asyncio.to_thread(mesh.wait_until_idle, 30.0)


@pytest.mark.slow
async def test_one_and_one_are_restarted_under_load_by_a_third_beside_them(mesh: RunningMesh) -> None:
    """Nobody waits for it: the command has left, and the scheduler that began it is among what is restarted."""
    before = mesh.pids()
    async with running_load(mesh.base_url, mesh.model, REQUESTS, at_once=4) as load:
        await load.all_draw(4)
        begun = json.loads(
            await asyncio.to_thread(mesh.pdmesh, "restart", "--rolling", "--timeout", "1", "--no-wait", "-o", "json")
        )
        assert begun["state"] == "running"
        begun_as = begun["operation_id"]
        while begun["state"] == "running":
            await load.ended(1)
            begun = json.loads(await asyncio.to_thread(mesh.pdmesh, "ops", "show", begun_as, "-o", "json"))
        assert begun["state"] == "done", begun
        await load.ended(3)
    assert not load.failed
    assert not load.differ
    assert len(load.streams) > 8
    after = mesh.pids()
    assert set(after) == set(before), "the pools are as before"
    assert not set(after.values()) & set(before.values()), "every process is another one"
    await asyncio.to_thread(mesh.wait_until_idle, 30.0)


async def test_what_cannot_be_changes_nothing_and_says_why(mesh: RunningMesh) -> None:
    before = mesh.pids()
    code, said = failing(mesh, "pool", "resize", "--decode", "0")
    assert (code, "no instance could decode" in said) == (4, True)
    code, said = failing(mesh, "pool", "resize", "--decode", "1024")
    assert (code, "GiB of memory" in said) == (4, True)
    code, said = failing(mesh, "pool", "resize")
    assert (code, "no pool size is given" in said) == (2, True)
    assert mesh.pids() == before


@pytest.mark.slow
async def test_what_is_asked_while_the_scheduler_is_killed_is_done_once(wide_mesh: RunningMesh) -> None:
    mesh, before = wide_mesh, wide_mesh.pids()
    async with running_load(mesh.base_url, mesh.model, REQUESTS, at_once=4) as load:
        await load.all_draw(4)
        os.kill(before["scheduler"], signal.SIGKILL)
        await asyncio.to_thread(mesh.pdmesh, "restart", "prefill-0", "--timeout", "1")
        await load.ended(3)
    after = mesh.pids()
    assert {name for name, pid in after.items() if pid != before[name]} == {"scheduler", "prefill-0"}
    listed = json.loads(await asyncio.to_thread(mesh.pdmesh, "ops", "-o", "json"))["operations"]
    assert [(each["kind"], each["state"]) for each in listed] == [("restart", "done")]
    assert not load.failed
    assert not load.differ


@pytest.mark.slow
async def test_everything_is_restarted_and_the_mesh_stopped_and_no_stream_breaks(wide_mesh: RunningMesh) -> None:
    mesh, before = wide_mesh, wide_mesh.pids()
    assert {"gateway-0", "gateway-1"} < set(before)
    async with running_load(mesh.base_url, mesh.model, REQUESTS, at_once=6) as load:
        await asyncio.to_thread(mesh.pdmesh, "drain", "decode-1", "--timeout", "1")
        await asyncio.to_thread(mesh.pdmesh, "undrain", "decode-1")
        await asyncio.to_thread(mesh.pdmesh, "policy", "set", "fcfs")
        await asyncio.to_thread(mesh.pdmesh, "restart", "--rolling", "--timeout", "1")
        after = mesh.pids()
        assert set(after) == set(before)
        assert not set(after.values()) & set(before.values()), "every process is another one"
        assert (await asyncio.to_thread(mesh.status)).bundle == "fcfs"
    assert not load.failed
    assert not load.differ
    assert len(load.streams) > 6
    async with running_load(mesh.base_url, mesh.model, REQUESTS, at_once=6) as load:
        await load.all_draw(6)
        load.over.set()
        await asyncio.to_thread(mesh.pdmesh, "down")
    assert not load.failed
    assert not load.differ
    assert load.streams
