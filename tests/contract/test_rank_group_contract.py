"""What ranks of an instance exchange, among threads and among processes."""

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from itertools import combinations

import pytest
import torch
from torch import Tensor

from pdmesh.engine.ranks import group as group_module
from pdmesh.engine.ranks.group import EXCHANGE_BYTES, RankGroup, SharedMemoryGroup
from pdmesh.engine.ranks.rank_memory import create_memory, map_memory
from pdmesh.engine.ranks.share import RankShare
from pdmesh.errors import InstanceUnavailable, PdmeshError, ProtocolError
from pdmesh_testing.ranks import thread_groups


def each(groups: Sequence[RankGroup], act: Callable[[RankGroup], object]) -> list[object]:
    """What each rank's call returns, or its error; all at once."""
    results: list[object] = [None] * len(groups)

    def run(rank: int) -> None:
        try:
            results[rank] = act(groups[rank])
        except PdmeshError as error:
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(groups))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive(), "a rank waits for ever"
    return results


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_rank_gets_the_whole_matrix(num_ranks: int, dtype: torch.dtype) -> None:
    widths = [5, 1, 0, 7][:num_ranks]
    matrices = [torch.randn(rows, sum(widths)).to(dtype) for rows in (1, 9, 3, 1)]

    def run(group: RankGroup) -> list[Tensor]:
        found: list[Tensor] = []
        for matrix in matrices:
            found.append(group.gather(matrix.split(widths, dim=1)[group.share.rank], widths))  # type: ignore[no-untyped-call]
            group.meet()
        return found

    with thread_groups(num_ranks) as groups:
        results = each(groups, run)
    for found in results:
        assert isinstance(found, list)
        assert all(torch.equal(got, matrix) for got, matrix in zip(found, matrices, strict=True))


def test_a_matrix_larger_than_the_memory_goes_in_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_module, "_SLOT_BYTES", 4096)
    matrix = torch.randn(100, 64)
    with thread_groups(2) as groups:
        results = each(groups, lambda group: group.gather(matrix[:, 32 * group.share.rank :][:, :32], [32, 32]))
    assert all(isinstance(found, Tensor) and torch.equal(found, matrix) for found in results)


def test_what_only_the_leader_needs_only_it_gets() -> None:
    matrix = torch.randn(2, 4)
    with thread_groups(2) as groups:
        leader, other = each(
            groups, lambda group: group.gather(matrix[:, 2 * group.share.rank :][:, :2], [2, 2], to_all=False)
        )
    assert isinstance(leader, Tensor)
    assert torch.equal(leader, matrix)
    assert isinstance(other, Tensor)
    assert torch.equal(other, matrix[:, 2:])


def test_nobody_waits_for_a_rank_that_is_gone() -> None:
    with thread_groups(3) as groups:
        groups[1].close()
        for error in each([groups[0], groups[2]], lambda group: group.meet()):
            assert isinstance(error, InstanceUnavailable)
    with thread_groups(2) as (waiting, late):
        closing = threading.Timer(0.05, late.close)
        closing.start()
        with pytest.raises(InstanceUnavailable):
            waiting.meet()
        closing.join()


def test_ranks_that_do_not_do_the_same_are_told_apart() -> None:
    with thread_groups(2) as groups:
        groups[1]._number = 7
        assert any(isinstance(result, ProtocolError) for result in each(groups, lambda group: group.meet()))


#: What a rank's process does: it gathers what it is told the seed of, and says whether it got the whole.
_PROCESS = """
import socket, sys, torch
from pdmesh.engine.ranks.group import EXCHANGE_BYTES, SharedMemoryGroup
from pdmesh.engine.ranks.rank_memory import map_memory
from pdmesh.engine.ranks.share import RankShare
rank, num_ranks, memory_fd, *sockets = map(int, sys.argv[1:])
peers = [None if fd < 0 else socket.socket(fileno=fd) for fd in sockets]
group = SharedMemoryGroup(RankShare(rank, num_ranks), peers, map_memory(memory_fd, EXCHANGE_BYTES))
for number in range(200):
    matrix = torch.randn(1 + number % 5, 3 * num_ranks, generator=torch.Generator().manual_seed(number))
    found = group.gather(matrix[:, 3 * rank : 3 * rank + 3], [3] * num_ranks)
    assert torch.equal(found, matrix), number
"""


@pytest.mark.slow
def test_processes_see_what_the_others_wrote() -> None:
    num_ranks = 3
    memory_fd = create_memory("test", EXCHANGE_BYTES)
    pairs = {pair: socket.socketpair() for pair in combinations(range(num_ranks), 2)}
    started: list[subprocess.Popen[bytes]] = []
    for rank in range(num_ranks):
        ends = [
            None if rank == other else pairs[min(rank, other), max(rank, other)][0 if rank < other else 1]
            for other in range(num_ranks)
        ]
        fds = [-1 if end is None else end.fileno() for end in ends]
        command = [sys.executable, "-c", _PROCESS, *map(str, (rank, num_ranks, memory_fd, *fds))]
        started.append(subprocess.Popen(command, pass_fds=[memory_fd, *(fd for fd in fds if fd >= 0)]))
    for pair in pairs.values():
        for end in pair:
            end.close()
    os.close(memory_fd)
    assert [process.wait(120) for process in started] == [0] * num_ranks


def test_heartbeats_are_seen_through_the_memory() -> None:
    fd = create_memory("test", EXCHANGE_BYTES)
    groups = [SharedMemoryGroup(RankShare(rank, 2), [None, None], map_memory(fd, EXCHANGE_BYTES)) for rank in range(2)]
    os.close(fd)
    groups[1].beat()
    groups[1].beat()
    assert groups[0].beats() == [0, 2]
