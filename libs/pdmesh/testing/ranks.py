"""An instance's ranks as threads of one process: the same exchange and commands, without processes."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pdmesh.engine.loading import ComputeOptions, load_model
from pdmesh.engine.ranks.commands import Command, OpenCache, Ready, frame, read_answer, read_command
from pdmesh.engine.ranks.following import Follower
from pdmesh.engine.ranks.group import EXCHANGE_BYTES, RankGroup, SharedMemoryGroup
from pdmesh.engine.ranks.share import RankShare
from pdmesh.engine.runner import TorchEngine
from pdmesh.errors import ConfigError, InstanceUnavailable


@contextmanager
def thread_groups(num_ranks: int) -> Iterator[list[SharedMemoryGroup]]:
    """The group as each rank sees it."""
    pairs = {pair: socket.socketpair() for pair in combinations(range(num_ranks), 2)}
    memory = torch.zeros(EXCHANGE_BYTES, dtype=torch.uint8)

    def end_of(rank: int, other: int) -> socket.socket | None:
        return None if rank == other else pairs[min(rank, other), max(rank, other)][0 if rank < other else 1]

    groups = [
        SharedMemoryGroup(RankShare(rank, num_ranks), [end_of(rank, other) for other in range(num_ranks)], memory)
        for rank in range(num_ranks)
    ]
    try:
        yield groups
    finally:
        for group in groups:
            group.close()


class ThreadRanks:
    """Implements `pdmesh.engine.ranks.leading.Followers`."""

    def __init__(self, leader: SharedMemoryGroup) -> None:
        self.group: RankGroup = leader
        self.commands: list[tuple[Command, int]] = []  # what was told, and the size of its frame
        self.memory: Tensor | None = None
        self._connections = leader.peers

    def tell(self, command: Command) -> None:
        data = frame(command)
        self.commands.append((command, len(data)))
        try:
            for connection in self._connections:
                connection.sendall(data)
        except OSError as error:
            raise InstanceUnavailable("another rank of the instance is gone") from error

    def open_cache(self, num_bytes: int, num_blocks: int) -> Tensor:
        self.memory = torch.zeros(num_bytes, dtype=torch.uint8)
        self.tell(OpenCache(num_blocks))
        return self.memory

    def check_ready(self, arithmetic: str) -> None:
        for connection in self._connections:
            assert read_answer(connection) == Ready(arithmetic)


@contextmanager
def ranked_engine(checkpoint: Path, num_ranks: int, *, num_blocks: int, **options: Any) -> Iterator[TorchEngine]:
    """An engine of so many ranks; for one, an engine as ever. ``options`` are `ComputeOptions`."""
    options = {"device": "cpu", **options}
    if num_ranks == 1:
        yield TorchEngine(checkpoint, num_blocks=num_blocks, **options)
        return
    with thread_groups(num_ranks) as (leader, *others):
        ranks = ThreadRanks(leader)
        threads = [
            threading.Thread(target=_follow, args=(checkpoint, group, lambda: ranks.memory, options), daemon=True)
            for group in others
        ]
        for thread in threads:
            thread.start()
        try:
            yield TorchEngine(checkpoint, num_blocks=num_blocks, followers=ranks, **options)
        finally:
            leader.close()
            for thread in threads:
                thread.join(10)
            assert not any(thread.is_alive() for thread in threads), "a rank did not end"


def _follow(
    checkpoint: Path, group: SharedMemoryGroup, memory: Callable[[], Tensor | None], options: dict[str, Any]
) -> None:
    leader = group.peers[0]
    try:
        model = load_model(checkpoint, ComputeOptions(**{**options, "device": torch.device("cpu")}), group)
        command = read_command(leader)
        if isinstance(command, OpenCache):
            compute = model.compute(command.num_blocks, memory())
            leader.sendall(frame(Ready(compute.arithmetic)))
            Follower(compute.forward, group, partial(read_command, leader)).run()
    except ConfigError:
        pass  # the leader says the same
    finally:
        group.close()
