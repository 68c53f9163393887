"""The processes of an instance's ranks, as their leader starts them, looks after them, and ends them.

The leader is rank 0, and the process that the mesh knows. The others are its children: they inherit sockets and memory,
listen nowhere, and end when it does, in whatever way. If one of them ends, or stands still, so does the instance.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from itertools import combinations
from time import monotonic, sleep
from typing import TYPE_CHECKING

import anyio
import msgspec
import structlog

from pdmesh.config import MeshConfig
from pdmesh.config_sources import PREFIX, environment_of
from pdmesh.engine.ranks.commands import Command, Failed, OpenCache, frame, read_answer
from pdmesh.engine.ranks.share import RankShare
from pdmesh.errors import ConfigError, InstanceUnavailable
from pdmesh.failures import describe_exit

if TYPE_CHECKING:  # torch takes seconds to import, and an instance of one rank may need none
    from torch import Tensor

    from pdmesh.engine.ranks.group import SharedMemoryGroup

log = structlog.get_logger()

#: Interval of a rank's heartbeats, and how many may be missing: a rank that stands still ends its instance in a second.
BEAT_S = 0.1
_MAX_MISSED_BEATS = 9
#: A leader that was itself not run for so long knows nothing of the others.
_OWN_PAUSE_S = 0.3
_END_S = 1.0
_NOTICE_S = 0.2


class RankStart(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank's process is started with; its settings are in its environment."""

    leader_pid: int
    rank: int
    num_ranks: int
    num_threads: int
    socket_fds: tuple[int, ...]  # to the other ranks; -1 at its own place
    exchange_fd: int
    cache_fd: int


class RankProcesses:
    """Implements `pdmesh.engine.ranks.leading.Followers` for child processes. Made by `start_ranks`."""

    def __init__(
        self,
        group: SharedMemoryGroup,
        leader_sockets: Sequence[socket.socket],
        processes: Sequence[subprocess.Popen[bytes]],
        cache_fd: int,
    ) -> None:
        self.group = group
        self._sockets = leader_sockets
        self._processes = processes
        self._cache_fd = cache_fd
        self._why = ""  # the instance must end

    @property
    def pids(self) -> tuple[int, ...]:
        """The processes of all ranks, the leader's first."""
        return (os.getpid(), *(process.pid for process in self._processes))

    def tell(self, command: Command) -> None:
        data = frame(command)
        try:
            for connection in self._sockets:
                connection.sendall(data)
        except OSError as error:
            raise InstanceUnavailable(self.why_lost() or "another rank of the instance is gone") from error

    def open_cache(self, num_bytes: int, num_blocks: int) -> Tensor:
        try:
            os.ftruncate(self._cache_fd, num_bytes)
        except OSError as error:
            raise ConfigError(f"ranks cannot share {num_bytes} bytes of KV cache: {error.strerror}") from error
        from pdmesh.engine.ranks.memory import map_memory

        self.tell(OpenCache(num_blocks))
        return map_memory(self._cache_fd, num_bytes)

    def check_ready(self, arithmetic: str) -> None:
        for rank, connection in enumerate(self._sockets, start=1):
            try:
                answer = read_answer(connection)
            except InstanceUnavailable as error:
                raise InstanceUnavailable(f"{self.why_lost() or 'a rank ended'}, before it could compute") from error
            if isinstance(answer, Failed):
                kind = ConfigError if answer.is_configuration else InstanceUnavailable
                raise kind("; ".join(answer.reasons))
            if answer.arithmetic != arithmetic:
                raise ConfigError(
                    f"rank {rank} computes with {answer.arithmetic}, its leader with {arithmetic}: their parts of this "
                    "model suit unlike kernels; use another tensor_parallel_size"
                )

    def why_lost(self) -> str:
        """Return which rank has ended or stood still; empty if none has."""
        deadline_s = monotonic() + _NOTICE_S  # its sockets are closed a moment before it has ended
        while not self._why and monotonic() < deadline_s:
            ended = next((number for number in range(len(self._processes)) if self._has_ended(number)), None)
            self._why = "" if ended is None else self._how_ended(ended)
            sleep(0.001)
        return self._why

    async def watch(self) -> str:
        """Return once a rank has ended, or was silent and is killed with the others: why the instance must end."""
        last, missed = self.group.beats(), [0] * len(self._processes)
        while True:
            began_s = monotonic()
            await anyio.sleep(BEAT_S)
            if ended := [number for number in range(len(missed)) if self._has_ended(number)]:
                self._why = self._why or self._how_ended(ended[0])
                self.kill()
                return self._why
            now = self.group.beats()
            for number in range(len(missed)):
                stands_still = now[number + 1] == last[number + 1] and monotonic() - began_s < _OWN_PAUSE_S
                missed[number] = missed[number] + 1 if stands_still else 0
                if missed[number] >= _MAX_MISSED_BEATS:
                    self._why = f"{self._name(number)} stood still for {missed[number] * BEAT_S:.1f} s"
                    self.kill()
                    return self._why
            last = now

    def kill(self) -> None:
        """End all ranks but this one, now; whoever waits for one of them is told."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.wait()

    def close(self) -> None:
        """Let the ranks end, and wait until they have."""
        self.group.close()
        deadline_s = monotonic() + _END_S
        for process in self._processes:
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline_s - monotonic()))
        self.kill()
        os.close(self._cache_fd)

    def _has_ended(self, number: int) -> bool:
        return self._processes[number].poll() is not None

    def _how_ended(self, number: int) -> str:
        return f"{self._name(number)} {describe_exit(self._processes[number].returncode)}"

    def _name(self, number: int) -> str:
        return f"rank {number + 1} of the instance (pid {self._processes[number].pid})"


@contextmanager
def start_ranks(config: MeshConfig, num_ranks: int, num_threads: int) -> Iterator[RankProcesses | None]:
    """Start the other ranks of this process's instance, which load their parts of the model; None for one rank.

    They end with the block, or with the thread that enters it, however that ends. Raises ConfigError.
    """
    if num_ranks == 1:
        yield None
        return
    from pdmesh.engine.ranks.group import EXCHANGE_BYTES, SharedMemoryGroup
    from pdmesh.engine.ranks.memory import create_memory, map_memory

    exchange_fd, cache_fd = create_memory("pdmesh-exchange", EXCHANGE_BYTES), create_memory("pdmesh-kv")
    pairs = {pair: socket.socketpair() for pair in combinations(range(num_ranks), 2)}

    def end_of(rank: int, other: int) -> socket.socket:
        return pairs[min(rank, other), max(rank, other)][0 if rank < other else 1]

    processes: list[subprocess.Popen[bytes]] = []
    for rank in range(1, num_ranks):
        socket_fds = tuple(-1 if other == rank else end_of(rank, other).fileno() for other in range(num_ranks))
        start = RankStart(
            leader_pid=os.getpid(),
            rank=rank,
            num_ranks=num_ranks,
            num_threads=num_threads,
            socket_fds=socket_fds,
            exchange_fd=exchange_fd,
            cache_fd=cache_fd,
        )
        processes.append(_start(config, start))
    for (first, _), (ours, theirs) in pairs.items():
        theirs.close()
        if first != 0:
            ours.close()
    leader_sockets = [end_of(0, other) for other in range(1, num_ranks)]
    group = SharedMemoryGroup(RankShare(0, num_ranks), [None, *leader_sockets], map_memory(exchange_fd, EXCHANGE_BYTES))
    os.close(exchange_fd)
    ranks = RankProcesses(group, leader_sockets, processes, cache_fd)
    try:
        yield ranks
    finally:
        ranks.close()


def _start(config: MeshConfig, start: RankStart) -> subprocess.Popen[bytes]:
    foreign = {name: value for name, value in os.environ.items() if not name.startswith(PREFIX)}
    inherited = [fd for fd in (*start.socket_fds, start.exchange_fd, start.cache_fd) if fd >= 0]
    return subprocess.Popen(
        [sys.executable, "-m", "pdmesh.worker.rank", msgspec.json.encode(start).decode()],
        stdin=subprocess.DEVNULL,
        env={**foreign, **environment_of(replace(config, ready_fd=None))},
        pass_fds=inherited,
    )
