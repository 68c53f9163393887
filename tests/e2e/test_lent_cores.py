"""Two workers of one core each: whichever computes alone borrows the other's core, and a killed one's core is free."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from pdmesh_testing.checkpoints import write_checkpoint
from pdmesh_testing.mesh import RunningMesh, running_mesh

pytestmark = [pytest.mark.anyio, pytest.mark.e2e, pytest.mark.ucx, pytest.mark.slow]

#: Bytes, so about as many tokens.
PROMPT = "Borrowed cores change no bit. " * 30


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    shape: dict[str, Any] = {"num_layers": 4, "hidden_size": 128, "head_dim": 32, "max_position_embeddings": 4096}
    return write_checkpoint(tmp_path_factory.mktemp("model"), dtype="bfloat16", **shape)


async def answer(mesh: RunningMesh) -> str:
    body = {"model": mesh.model, "prompt": PROMPT, "max_tokens": 40, "temperature": 0, "ignore_eos": True}
    async with mesh.client() as client:
        response = await client.post("/v1/completions", json=body)
    response.raise_for_status()
    return str(response.json()["choices"][0]["text"])


async def test_a_lone_worker_borrows_and_answers_stay_the_same(checkpoint: Path, tmp_path: Path) -> None:
    if (os.cpu_count() or 1) < 2:
        pytest.skip("one core: there is nothing to lend")
    settings = {"WORKER_NUM_THREADS": "1"}
    with running_mesh(tmp_path / "own", model=checkpoint, settings={**settings, "WORKER_LEND_CORES": "false"}) as mesh:
        expected = await answer(mesh)
        assert mesh.total("lent_core_seconds") == 0
    with running_mesh(tmp_path / "lent", model=checkpoint, settings=settings) as mesh:
        if "results would depend on the number of threads" in mesh.logs():
            pytest.skip("no kernels were compiled for this processor")
        assert await answer(mesh) == expected
        assert lent_s(mesh, "prefill-0") > 0, "nothing was decoded yet"
        assert lent_s(mesh, "decode-0") > 0, "the prompt was computed"
        mesh.wait_until_idle()
        assert share_of_a_core_while_idle(mesh) < 0.5, "threads of idle workers sleep"
        killed = mesh.pids()["decode-0"]
        os.kill(killed, signal.SIGKILL)
        mesh.wait_until_replaced("decode-0", killed)
        assert await answer(mesh) == expected


def lent_s(mesh: RunningMesh, worker: str) -> float:
    found = re.search(r"^pdmesh:lent_core_seconds_total (\S+)$", mesh.metrics()[worker], re.M)
    assert found is not None
    return float(found[1])


def share_of_a_core_while_idle(mesh: RunningMesh) -> float:
    """CPU time of both workers in relation to the time that passes."""
    began_s, before = time.monotonic(), mesh.cpu_s()
    for _ in range(3):
        mesh.status()
    spent_s = {name: spent - before[name] for name, spent in mesh.cpu_s().items()}
    return (spent_s["prefill-0"] + spent_s["decode-0"]) / (time.monotonic() - began_s)
