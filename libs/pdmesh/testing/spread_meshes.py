"""What end-to-end tests ask of meshes whose contexts are spread, and of instances that have several processes."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping

import anyio

from pdmesh.cli.processes import process_id, wait_for_end
from pdmesh.testing.mesh import RunningMesh


def answers(mesh: RunningMesh) -> dict[str, float]:
    """How often each instance has said what it makes of its part of a context."""
    found = {
        name: re.search(r"^pdmesh:kv_part_answers_total (\S+)$", text, re.M) for name, text in mesh.metrics().items()
    }
    return {name: float(each[1]) for name, each in found.items() if each}


def since(before: Mapping[str, float], now: Mapping[str, float]) -> list[str]:
    """Those that have answered meanwhile."""
    return [name for name, number in now.items() if number > before.get(name, 0)]


async def until(condition: Callable[[], bool], limit_s: float = 60.0) -> None:
    """Wait until something is so in other processes."""
    with anyio.fail_after(limit_s):
        while not await anyio.to_thread.run_sync(condition):  # noqa: ASYNC110
            await anyio.sleep(0.005)


async def until_ended(pids: Iterable[int], limit_s: float = 10.0) -> None:
    """Wait until none of these processes is there."""
    for pid in pids:
        if (process := process_id(pid)) is not None:
            assert await anyio.to_thread.run_sync(wait_for_end, process, limit_s), f"{pid} goes on"
