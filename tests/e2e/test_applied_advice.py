"""`pdmesh pool advise --apply` on a running mesh changes a role where that helps."""

from __future__ import annotations

import shutil
import subprocess
from collections import Counter
from collections.abc import Generator, Sequence
from pathlib import Path

import anyio
import pytest

from pdmesh_testing.mesh import RunningMesh
from pdmesh_testing.timed import TimedRequest, poisson, send, timed_mesh

pytestmark = [pytest.mark.anyio, pytest.mark.e2e, pytest.mark.ucx, pytest.mark.slow, pytest.mark.timeout(600)]

#: A prompt token takes a millisecond, a step of decodes a fiftieth of a second.
COSTS = "a_s=0.01,b_s=0.001,decode_a_s=0.02"

#: More than one instance can prefill, and hardly anything to decode.
PROMPTS = poisson(1, per_s=4.0, seconds=18.0, prompt=range(300, 400), num_output_tokens=4)


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Generator[RunningMesh]:
    with timed_mesh(tmp_path_factory.mktemp("advice"), COSTS, prefill=1, decode=2, max_num_seqs=4) as mesh:
        yield mesh


def pools(mesh: RunningMesh) -> dict[str, int]:
    return dict(Counter(row.role for row in mesh.status().instances))


def typed(mesh: RunningMesh, *arguments: str) -> tuple[int, str]:
    """A command's exit code and what it says."""
    try:
        return 0, mesh.pdmesh(*arguments)
    except subprocess.CalledProcessError as error:
        return error.returncode, error.stdout + error.stderr


async def under_load(
    mesh: RunningMesh, load: Sequence[TimedRequest], after_s: float, *arguments: str
) -> tuple[int, str]:
    """The same, while a load goes on."""
    said = (0, "")
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(send, mesh, load)
        await anyio.sleep(after_s)
        said = await anyio.to_thread.run_sync(typed, mesh, *arguments)
        tasks.cancel_scope.cancel()
    return said


async def test_advice_changes_a_role_where_that_helps_and_within_bounds(mesh: RunningMesh, tmp_path: Path) -> None:
    await send(mesh, PROMPTS)
    log = tmp_path / "events.log"
    shutil.copy(Path(mesh.environ["PDMESH_SCHEDULER_EVENT_LOG"]), log)
    apply = ("pool", "advise", "--apply", "--slo-ttft", "1", "--last", "60", "--log", str(log))
    code, said = await under_load(mesh, PROMPTS, 0.0, *apply)
    assert (code, "becomes" in said, "done after" in said) == (0, True, True), said
    changed = await anyio.to_thread.run_sync(pools, mesh)
    # Which of the two it is depends on what the steps were measured to take.
    assert changed in ({"prefill": 1, "mixed": 1, "decode": 1}, {"prefill": 2, "decode": 1}), said
    await under_load(mesh, PROMPTS, 0.0, *apply)
    within = await anyio.to_thread.run_sync(pools, mesh)
    assert within.keys() >= {"prefill", "decode"}, within
