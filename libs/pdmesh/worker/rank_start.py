"""Start of an instance's ranks: processes that inherit their sockets and shared memory.

The ranks of a stage have a socket between each two of them, and shared memory for exchanges. Each rank has a socket to
the leader. Channels connect ranks of the same number in consecutive stages. The first rank of the last stage has a
channel to the leader.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import combinations
from typing import TYPE_CHECKING

import msgspec

from pdmesh.config import InstanceDegrees, MeshConfig
from pdmesh.config_sources import PREFIX, environment_of
from pdmesh.engine.ranks.share import RankShare
from pdmesh.worker.ranks import FollowerProcesses, StageProcesses

# Importing torch takes seconds, and an instance of one rank may not need torch.
if TYPE_CHECKING:
    from pdmesh.engine.ranks.group import SharedMemoryGroup


class RankStart(msgspec.Struct, frozen=True, kw_only=True):
    """Start arguments of a rank's process. The settings are in the environment.

    ``socket_fds`` lead to the other ranks of the stage, with -1 at the rank's own place.
    """

    leader_pid: int
    rank: int
    num_ranks: int
    stage: int = 0
    num_stages: int = 1
    num_threads: int
    leader_fd: int
    socket_fds: tuple[int, ...]
    inlet_fd: int = -1
    outlet_fd: int = -1
    exchange_fd: int
    cache_fd: int

    @property
    def share(self) -> RankShare:
        """The part of the model that the rank computes."""
        return RankShare(self.rank, self.num_ranks, self.stage, self.num_stages)

    @property
    def fds(self) -> list[int]:
        """File descriptors that the process inherits."""
        given = (self.leader_fd, *self.socket_fds, self.inlet_fd, self.outlet_fd, self.exchange_fd, self.cache_fd)
        return [fd for fd in given if fd >= 0]


@contextmanager
def start_ranks(
    config: MeshConfig, degrees: InstanceDegrees, num_threads: int
) -> Iterator[FollowerProcesses | StageProcesses | None]:
    """Start the other ranks of this process's instance, which load their parts of the model.

    Yields None for an instance without other ranks. The ranks end with the block, or with the thread that enters the
    block, however it ends. Raises ConfigError if the system gives no shared memory.
    """
    if degrees.num_ranks == 1 or config.worker.engine != "torch":
        yield None
        return
    starting = _Starting(config, degrees, num_threads)
    ranks = starting.followers() if degrees.stages == 1 else starting.stages()
    try:
        yield ranks
    finally:
        ranks.close()


class _Starting:
    """Starter of an instance's ranks, which owns their sockets and shared memory until the start."""

    def __init__(self, config: MeshConfig, degrees: InstanceDegrees, num_threads: int) -> None:
        from pdmesh.engine.ranks.places import exchange_bytes
        from pdmesh.engine.ranks.rank_memory import create_memory, map_memory

        self._config = config
        self._degrees = degrees
        self._num_threads = num_threads
        num_bytes = exchange_bytes(*degrees)
        self._exchange_fd = create_memory("pdmesh-exchange", num_bytes)
        self._memory = map_memory(self._exchange_fd, num_bytes)
        self._cache_fd = create_memory("pdmesh-kv")
        self._sockets: list[socket.socket] = []

    def followers(self) -> FollowerProcesses:
        """Start all ranks of the only stage except the first one, which is this process."""
        num_ranks = self._degrees.tensor
        ends = self._mesh(num_ranks)
        processes: list[subprocess.Popen[bytes]] = []
        for rank in range(1, num_ranks):
            leader = ends[rank][0]
            assert leader is not None
            processes.append(self._start(RankShare(rank, num_ranks), ends[rank], leader=leader))
        own = [end for end in ends[0] if end is not None]
        self._give_away_all_but(own)
        return FollowerProcesses([self._group(0, ends[0])], own, processes, self._cache_fd)

    def stages(self) -> StageProcesses:
        """Start all ranks of all stages."""
        from pdmesh.engine.ranks.channel import StageChannel
        from pdmesh.engine.ranks.places import outlet_memory

        tensor, num_stages = self._degrees
        leader_sockets: list[socket.socket] = []
        processes: list[subprocess.Popen[bytes]] = []
        inlets: list[socket.socket | None] = [None] * tensor
        for stage in range(num_stages):
            ends = self._mesh(tensor)
            outlets = [self._pair() if stage < num_stages - 1 or rank == 0 else (None, None) for rank in range(tensor)]
            for rank in range(tensor):
                own, theirs = self._pair()
                leader_sockets.append(own)
                share = RankShare(rank, tensor, stage, num_stages)
                processes.append(
                    self._start(share, ends[rank], leader=theirs, inlet=inlets[rank], outlet=outlets[rank][0])
                )
            inlets = [end for _, end in outlets]
        last = inlets[0]
        assert last is not None
        self._give_away_all_but([*leader_sockets, last])
        groups = [self._group(stage, [None] * tensor) for stage in range(num_stages)]
        matrices = StageChannel(last, outlet_memory(self._memory, RankShare(0, tensor, num_stages - 1, num_stages)))
        return StageProcesses(groups, leader_sockets, processes, self._cache_fd, matrices)

    def _pair(self) -> tuple[socket.socket, socket.socket]:
        pair = socket.socketpair()
        self._sockets += pair
        return pair

    def _mesh(self, num_ranks: int) -> list[list[socket.socket | None]]:
        """Return the sockets between each two ranks, by rank; None at a rank's own place."""
        ends: list[list[socket.socket | None]] = [[None] * num_ranks for _ in range(num_ranks)]
        for first, second in combinations(range(num_ranks), 2):
            ends[first][second], ends[second][first] = self._pair()
        return ends

    def _give_away_all_but(self, own: Sequence[socket.socket]) -> None:
        """Close inherited sockets and memory here, so that each socket closes when the process holding it ends."""
        for each in self._sockets:
            if each not in own:
                each.close()
        os.close(self._exchange_fd)

    def _group(self, stage: int, peers: Sequence[socket.socket | None]) -> SharedMemoryGroup:
        from pdmesh.engine.ranks.group import SharedMemoryGroup
        from pdmesh.engine.ranks.places import group_memory

        tensor, num_stages = self._degrees
        return SharedMemoryGroup(RankShare(0, tensor, stage, num_stages), peers, group_memory(self._memory, stage))

    def _start(
        self,
        share: RankShare,
        peers: Sequence[socket.socket | None],
        *,
        leader: socket.socket,
        inlet: socket.socket | None = None,
        outlet: socket.socket | None = None,
    ) -> subprocess.Popen[bytes]:
        start = RankStart(
            leader_pid=os.getpid(),
            rank=share.rank,
            num_ranks=share.num_ranks,
            stage=share.stage,
            num_stages=share.num_stages,
            num_threads=self._num_threads,
            leader_fd=leader.fileno(),
            socket_fds=tuple(map(_fd, peers)),
            inlet_fd=_fd(inlet),
            outlet_fd=_fd(outlet),
            exchange_fd=self._exchange_fd,
            cache_fd=self._cache_fd,
        )
        foreign = {name: value for name, value in os.environ.items() if not name.startswith(PREFIX)}
        return subprocess.Popen(
            [sys.executable, "-m", "pdmesh.worker.rank", msgspec.json.encode(start).decode()],
            stdin=subprocess.DEVNULL,
            env={**foreign, **environment_of(replace(self._config, ready_fd=None))},
            pass_fds=start.fds,
        )


def _fd(end: socket.socket | None) -> int:
    return -1 if end is None else end.fileno()
