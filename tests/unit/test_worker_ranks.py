"""How the leader of an instance looks after the other ranks."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import anyio
import pytest

from pdmesh.worker import ranks
from pdmesh.worker.ranks import FollowerProcesses
from pdmesh.worker.starvation import Thread

pytestmark = pytest.mark.anyio

NUM_MISSED = 9  # beats, after which a rank that could run has stood still


class SilentGroup:
    """Two ranks, of which the second one never beats. Counts how often it was asked."""

    def __init__(self) -> None:
        self.num_looks = 0

    def beats(self) -> list[int]:
        self.num_looks += 1
        return [self.num_looks, 0]


@pytest.fixture
def rank() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        yield process
        process.kill()


@pytest.mark.parametrize(
    ("states", "num_looks"),
    [
        pytest.param(["S", "S"], range(NUM_MISSED, 8 * NUM_MISSED), id="it sleeps"),
        pytest.param(["T", "T"], range(NUM_MISSED, 8 * NUM_MISSED), id="it was stopped"),
        pytest.param(["R", "R"], range(9 * NUM_MISSED, sys.maxsize), id="it gets no processor"),
    ],
)
async def test_a_rank_that_misses_heartbeats_is_killed_later_if_the_machine_is_to_blame(
    monkeypatch: pytest.MonkeyPatch, rank: subprocess.Popen[bytes], states: list[str], num_looks: range
) -> None:
    monkeypatch.setattr(ranks, "BEAT_S", 0.001)

    def threads_of(pid: int) -> dict[int, Thread]:
        assert pid == rank.pid
        return {number: Thread(state, run_ns=7) for number, state in enumerate(states)}

    monkeypatch.setattr(ranks, "threads_of", threads_of)
    group: Any = SilentGroup()
    watching = FollowerProcesses([group], [], [rank], cache_fd=-1)
    with anyio.fail_after(20):
        why = await watching.watch()
    assert f"rank 1 of the instance (pid {rank.pid}) did not respond" in why
    assert rank.poll() is not None, "it goes on"
    assert group.num_looks - 1 in num_looks, "each time that the leader itself stands still it begins anew"
