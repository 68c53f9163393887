"""The processes of an instance's ranks, as seen by the leader, which watches and ends them.

The leader is the process that the mesh knows. With one stage, the leader is rank 0. With several stages, it computes
nothing, and all ranks are other processes. The other ranks are children of the leader: they inherit sockets and memory,
listen nowhere, and end when the leader ends, however this happens. If a rank ends or hangs, the instance ends.
"""

from __future__ import annotations

import os
import selectors
import socket
import subprocess
import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from time import monotonic, sleep
from typing import TYPE_CHECKING

import anyio
import structlog

from pdmesh.engine.ranks.rank_commands import (
    Command,
    Failed,
    OpenCache,
    Ready,
    Report,
    frame,
    read_answer,
    read_report,
)
from pdmesh.errors import ConfigError, InstanceUnavailable
from pdmesh.failures import describe_exit
from pdmesh.worker.starvation import Thread, is_starved, threads_of

# Importing torch takes seconds, and an instance of one rank may not need torch.
if TYPE_CHECKING:
    from torch import Tensor

    from pdmesh.engine.ranks.channel import StageChannel
    from pdmesh.engine.ranks.group import SharedMemoryGroup

log = structlog.get_logger()

#: Interval of a rank's heartbeats, and how many may be missing: a hanging rank ends its instance in a second. A rank
#: that gets no processor time may miss ten times as many.
BEAT_S = 0.1
_MAX_MISSED_BEATS = 9
_STARVED_BEATS = 0.1
#: A leader that itself got no processor time for this long ignores missing heartbeats.
_OWN_PAUSE_S = 0.3
_END_S = 1.0
_NOTICE_S = 0.2


class RankProcesses:
    """The processes of other ranks, beginning with ``_first_rank``. Made by `start_ranks`."""

    _first_rank: int

    def __init__(
        self,
        groups: Sequence[SharedMemoryGroup],
        leader_sockets: Sequence[socket.socket],
        processes: Sequence[subprocess.Popen[bytes]],
        cache_fd: int,
    ) -> None:
        """``groups`` count the ranks' heartbeats; there is one for each stage."""
        self._groups = groups
        self._sockets = leader_sockets
        self._processes = processes
        self._cache_fd = cache_fd
        self._telling = threading.Lock()
        #: Why the instance must end.
        self._why = ""

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids of the leader and of all other ranks, the leader first."""
        return (os.getpid(), *(process.pid for process in self._processes))

    def tell(self, command: Command, stage: int | None = None) -> None:
        data, sockets = frame(command), self._sockets
        if stage is not None:
            num_ranks = self._groups[0].share.num_ranks
            sockets = sockets[stage * num_ranks :][:num_ranks]
        try:
            with self._telling:
                for connection in sockets:
                    connection.sendall(data)
        except OSError as error:
            raise InstanceUnavailable(self.why_lost() or "another rank of the instance is gone") from error

    def open_cache(self, num_bytes: int, num_blocks: int, num_frames: int | None) -> Tensor:
        try:
            os.ftruncate(self._cache_fd, num_bytes)
        except OSError as error:
            raise ConfigError(f"ranks cannot share {num_bytes} bytes of KV cache: {error.strerror}") from error
        from pdmesh.engine.ranks.rank_memory import map_memory

        self.tell(OpenCache(num_blocks, num_frames))
        return map_memory(self._cache_fd, num_bytes)

    def answers(self) -> Iterator[tuple[str, Ready]]:
        """Yield each rank's name and how it computes, once it is ready.

        Raises ConfigError or InstanceUnavailable for the first rank that cannot start.
        """
        for number, connection in enumerate(self._sockets):
            try:
                answer = read_answer(connection)
            except InstanceUnavailable as error:
                raise InstanceUnavailable(f"{self.why_lost() or 'a rank ended'}, before it could compute") from error
            if isinstance(answer, Failed):
                kind = ConfigError if answer.is_configuration else InstanceUnavailable
                raise kind("; ".join(answer.reasons))
            yield self._name(number), answer

    def why_lost(self) -> str:
        """Return which rank has ended or hung, and how; empty if none has.

        Waits up to `_NOTICE_S`, because a rank's sockets close a moment before the process ends.
        """
        deadline_s = monotonic() + _NOTICE_S
        while not self._why and monotonic() < deadline_s:
            ended = next((number for number in range(len(self._processes)) if self._has_ended(number)), None)
            self._why = "" if ended is None else self._how_ended(ended)
            sleep(0.001)
        return self._why

    async def watch(self) -> str:
        """Wait until a rank ends or is silent, kill all ranks, and return why the instance must end."""
        last, missed = self._beats(), [0.0] * len(self._processes)
        # The threads of each rank that missed the last heartbeat.
        threads = [dict[int, Thread]() for _ in missed]
        while True:
            began_s = monotonic()
            await anyio.sleep(BEAT_S)
            if ended := [number for number in range(len(missed)) if self._has_ended(number)]:
                self._why = self._why or self._how_ended(ended[0])
                self.kill()
                return self._why
            now = self._beats()
            for number in range(len(missed)):
                if now[number] != last[number] or monotonic() - began_s >= _OWN_PAUSE_S:
                    missed[number], threads[number] = 0.0, {}
                    continue
                before, threads[number] = threads[number], threads_of(self._processes[number].pid)
                missed[number] += _STARVED_BEATS if is_starved(before, threads[number]) else 1.0
                if missed[number] >= _MAX_MISSED_BEATS:
                    self._why = f"{self._name(number)} did not respond for {missed[number] * BEAT_S:.1f} s or more"
                    self.kill()
                    return self._why
            last = now

    def kill(self) -> None:
        """Kill all other ranks, and return once the processes have ended. Calls that wait for a rank then fail."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.wait()

    def close(self) -> None:
        """Let the ranks end, wait for `_END_S`, and kill the remaining ones."""
        for connection in self._sockets:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()
        deadline_s = monotonic() + _END_S
        for process in self._processes:
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline_s - monotonic()))
        self.kill()
        os.close(self._cache_fd)

    def _beats(self) -> list[int]:
        """Return the heartbeat counts of all ranks but the leader."""
        beats = [beat for group in self._groups for beat in group.beats()]
        return beats[-len(self._processes) :]

    def _has_ended(self, number: int) -> bool:
        return self._processes[number].poll() is not None

    def _how_ended(self, number: int) -> str:
        return f"{self._name(number)} {describe_exit(self._processes[number].returncode)}"

    def _name(self, number: int) -> str:
        return f"rank {self._first_rank + number} of the instance (pid {self._processes[number].pid})"


class FollowerProcesses(RankProcesses):
    """Implements `pdmesh.engine.ranks.leading.Followers`: the leader is rank 0."""

    _first_rank = 1

    @property
    def group(self) -> SharedMemoryGroup:
        return self._groups[0]

    def check_ready(self, leader: Ready) -> None:
        for name, answer in self.answers():
            _check_equal(name, answer, "its leader", leader, "tensor_parallel_size")

    def close(self) -> None:
        self.group.close()
        super().close()


class StageProcesses(RankProcesses):
    """Implements `pdmesh.engine.ranks.pipeline.Stages`."""

    _first_rank = 0

    def __init__(
        self,
        groups: Sequence[SharedMemoryGroup],
        leader_sockets: Sequence[socket.socket],
        processes: Sequence[subprocess.Popen[bytes]],
        cache_fd: int,
        matrices: StageChannel,
    ) -> None:
        super().__init__(groups, leader_sockets, processes, cache_fd)
        self.matrices = matrices

    @property
    def num_stages(self) -> int:
        return len(self._groups)

    def ready(self) -> Ready:
        (first_name, first), *others = self.answers()
        for name, answer in others:
            _check_equal(name, answer, first_name, first, "pipeline_parallel_size")
        return first

    def reports(self) -> Iterator[tuple[int, Report]]:
        num_ranks = self._groups[0].share.num_ranks
        with selectors.DefaultSelector() as selector:
            try:
                for stage in range(self.num_stages):
                    selector.register(self._sockets[stage * num_ranks], selectors.EVENT_READ, stage)
                while True:
                    for key, _ in selector.select():
                        yield key.data, read_report(self._sockets[key.data * num_ranks])
            except (OSError, ValueError) as error:
                raise InstanceUnavailable("the instance ends") from error


def _check_equal(name: str, answer: Ready, other_name: str, other: Ready, setting: str) -> None:
    if answer.weights != other.weights:
        raise ConfigError(
            f"{name} loaded other weights than {other_name}: the files changed; start again once they are complete"
        )
    if answer.arithmetic != other.arithmetic:
        raise ConfigError(
            f"{name} computes with {answer.arithmetic}, {other_name} with {other.arithmetic}: their shares of "
            f"this model need different kernels; use another {setting}"
        )
