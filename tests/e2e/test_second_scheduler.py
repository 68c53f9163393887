"""Two schedulers as processes, under streams: the leader is killed, stopped, or cut off from the store alone."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

import pytest

from pdmesh_testing.checkpoints import write_checkpoint
from pdmesh_testing.load import requests_of, running_load
from pdmesh_testing.standby import STAND_IN, running_standby_mesh, why_no_etcd

WHY_NOT = why_no_etcd()

pytestmark = [pytest.mark.anyio, pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(300)]

NUM_STREAMS = 8
LIMIT_S = 60.0


@pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT))
async def test_streams_outlive_every_leader(tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path / "model", seed=3)
    requests = requests_of(5, [24 + 7 * index for index in range(NUM_STREAMS)], 150)
    async with (
        running_standby_mesh(tmp_path, model, "etcd", settings=STAND_IN) as mesh,
        running_load(mesh.base_url, "model", requests, at_once=NUM_STREAMS) as load,
    ):
        looking_after = asyncio.create_task(mesh.look_after())
        for fault in ("kill", "stop", "cut"):
            await load.all_draw(NUM_STREAMS)
            leader = await mesh.some_leader(LIMIT_S)
            process = leader.process
            match fault:
                case "kill":
                    leader.kill()
                case "stop":
                    leader.send_signal(signal.SIGSTOP)
                case _:
                    assert leader.wire is not None
                    leader.wire.cut()
            (other,) = (each for each in mesh.schedulers if each is not leader)
            await mesh.until_leads(other, LIMIT_S)
            if fault == "stop":
                leader.send_signal(signal.SIGCONT)
            if leader.wire is not None:
                leader.wire.heal()
            async with asyncio.timeout(LIMIT_S):
                while leader.process is process or leader.has_ended:  # noqa: ASYNC110  # it ends, and is started again
                    await asyncio.sleep(0.02)
            await load.ended(1)
        looking_after.cancel()
    assert (load.failed, load.differ) == ([], [])
    assert "gateway lost" not in mesh.logs()
