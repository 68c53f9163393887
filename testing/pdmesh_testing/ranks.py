"""An instance's ranks as threads of one process: the same exchange and commands, without processes."""

from __future__ import annotations

import selectors
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pdmesh.engine.compute import ComputeOptions
from pdmesh.engine.forward import DirectForward
from pdmesh.engine.identity import weights_identity
from pdmesh.engine.model_loading import load_model
from pdmesh.engine.ranks.channel import StageChannel
from pdmesh.engine.ranks.following import Follower
from pdmesh.engine.ranks.group import EXCHANGE_BYTES, RankGroup, SharedMemoryGroup
from pdmesh.engine.ranks.places import exchange_bytes, inlet_memory, outlet_memory
from pdmesh.engine.ranks.rank_commands import (
    Command,
    OpenCache,
    Ready,
    Report,
    frame,
    read_answer,
    read_command,
    read_report,
)
from pdmesh.engine.ranks.rank_elsewhere import AskedRows
from pdmesh.engine.ranks.share import RankShare
from pdmesh.engine.ranks.staged_ranks import StageFollower
from pdmesh.engine.runner import TorchEngine
from pdmesh.errors import ConfigError, InstanceUnavailable


@contextmanager
def thread_groups(num_ranks: int, stage: int = 0, num_stages: int = 1) -> Iterator[list[SharedMemoryGroup]]:
    """The group of a stage as each rank sees it."""
    pairs = {pair: socket.socketpair() for pair in combinations(range(num_ranks), 2)}
    memory = torch.zeros(EXCHANGE_BYTES, dtype=torch.uint8)

    def end_of(rank: int, other: int) -> socket.socket | None:
        return None if rank == other else pairs[min(rank, other), max(rank, other)][0 if rank < other else 1]

    groups = [
        SharedMemoryGroup(
            RankShare(rank, num_ranks, stage, num_stages), [end_of(rank, other) for other in range(num_ranks)], memory
        )
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
        # Sent commands, with the sizes of their frames.
        self.commands: list[tuple[Command, int]] = []
        self.memory: Tensor | None = None
        self._connections = leader.peers

    def tell(self, command: Command) -> None:
        data = frame(command)
        self.commands.append((command, len(data)))
        try:
            for connection in self._connections:
                connection.sendall(data)
        except OSError as error:
            raise InstanceUnavailable("another rank of the instance ended") from error

    def open_cache(self, num_bytes: int, num_blocks: int, num_frames: int | None) -> Tensor:
        self.memory = torch.zeros(num_bytes, dtype=torch.uint8)
        self.tell(OpenCache(num_blocks, num_frames))
        return self.memory

    def check_ready(self, leader: Ready) -> None:
        for connection in self._connections:
            assert read_answer(connection) == Ready(leader.arithmetic)


class ThreadStages:
    """Implements `pdmesh.engine.ranks.pipeline.Stages`; ``connections`` are to all ranks, stage by stage."""

    def __init__(self, num_stages: int, connections: Sequence[socket.socket], matrices: StageChannel) -> None:
        self.num_stages = num_stages
        self.matrices = matrices
        self.memory: Tensor | None = None
        self._connections = connections
        self._num_ranks = len(connections) // num_stages
        self._telling = threading.Lock()

    def tell(self, command: Command, stage: int | None = None) -> None:
        first, end = (0, len(self._connections)) if stage is None else self._places(stage)
        try:
            with self._telling:
                for connection in self._connections[first:end]:
                    connection.sendall(frame(command))
        except OSError as error:
            raise InstanceUnavailable("another rank of the instance ended") from error

    def reports(self) -> Iterator[tuple[int, Report]]:
        with selectors.DefaultSelector() as selector:
            for stage in range(self.num_stages):
                selector.register(self._connections[stage * self._num_ranks], selectors.EVENT_READ, stage)
            while True:
                for key, _ in selector.select():
                    yield key.data, read_report(self._connections[key.data * self._num_ranks])

    def open_cache(self, num_bytes: int, num_blocks: int, num_frames: int | None) -> Tensor:
        self.memory = torch.zeros(num_bytes, dtype=torch.uint8)
        self.tell(OpenCache(num_blocks, num_frames))
        return self.memory

    def ready(self) -> Ready:
        first, *others = map(read_answer, self._connections)
        assert isinstance(first, Ready)
        assert all(answer == first for answer in others)
        return first

    def close(self) -> None:
        for connection in self._connections:
            connection.shutdown(socket.SHUT_RDWR)

    def _places(self, stage: int) -> tuple[int, int]:
        return stage * self._num_ranks, (stage + 1) * self._num_ranks


@contextmanager
def ranked_engine(
    checkpoint: Path, num_ranks: int, *, num_stages: int = 1, num_blocks: int, **options: Any
) -> Iterator[TorchEngine]:
    """Yield an engine of ``num_ranks`` ranks in each of ``num_stages`` stages. ``options`` are `ComputeOptions`."""
    options = {"device": "cpu", **options}
    if num_stages > 1:
        with _staged_engine(checkpoint, num_ranks, num_stages, num_blocks, options) as engine:
            yield engine
        return
    if num_ranks == 1:
        yield TorchEngine(checkpoint, num_blocks=num_blocks, **options)
        return
    with thread_groups(num_ranks) as (leader, *others):
        ranks = ThreadRanks(leader)
        threads = [
            threading.Thread(target=_follow, args=(checkpoint, group, lambda: ranks.memory, options), daemon=True)
            for group in others
        ]
        with _running(threads, leader.close):
            yield TorchEngine(checkpoint, num_blocks=num_blocks, followers=ranks, **options)


@contextmanager
def _staged_engine(
    checkpoint: Path, num_ranks: int, num_stages: int, num_blocks: int, options: dict[str, Any]
) -> Iterator[TorchEngine]:
    memory = torch.zeros(exchange_bytes(num_ranks, num_stages), dtype=torch.uint8)
    with ExitStack() as stack:
        groups = [
            group
            for stage in range(num_stages)
            for group in stack.enter_context(thread_groups(num_ranks, stage, num_stages))
        ]
        leader_pairs = [socket.socketpair() for _ in groups]
        outlets = [socket.socketpair() for _ in groups]
        for connection in (each for pair in (*leader_pairs, *outlets) for each in pair):
            stack.callback(connection.close)
        last = RankShare(0, num_ranks, num_stages - 1, num_stages)
        matrices = StageChannel(outlets[-num_ranks][1], outlet_memory(memory, last))
        stages = ThreadStages(num_stages, [own for own, _ in leader_pairs], matrices)

        def follow(number: int) -> None:
            share, leader = groups[number].share, leader_pairs[number][1]
            model = load_model(checkpoint, _cpu(options), share, None if share.is_whole else groups[number])
            command = read_command(leader)
            assert isinstance(command, OpenCache)
            compute = model.compute(command.num_blocks, stages.memory, command.num_frames)
            assert isinstance(compute.forward, DirectForward)
            weights = weights_identity(checkpoint)
            leader.sendall(frame(Ready(compute.arithmetic, compute.name, compute.reason, weights)))
            before = outlets[number - num_ranks][1]
            inlet = None if share.is_first else StageChannel(before, inlet_memory(memory, share))
            outlet = StageChannel(outlets[number][0], outlet_memory(memory, share))
            try:
                StageFollower(
                    compute.forward,
                    groups[number],
                    partial(read_command, leader),
                    lambda report: leader.sendall(frame(report)),
                    inlet,
                    None if share.is_last and share.rank else outlet,
                    AskedRows.of(model.config, model.layout, options.get("range_tokens", 0)),
                    hidden_size=model.config.hidden_size,
                ).run()
            finally:
                groups[number].close()
                for connection in (leader, *outlets[number][:1], *([before] if inlet else ())):
                    connection.shutdown(socket.SHUT_RDWR)

        threads = [threading.Thread(target=follow, args=(number,), daemon=True) for number in range(len(groups))]
        with _running(threads, stages.close):
            yield TorchEngine(checkpoint, num_blocks=num_blocks, stages=stages, **options)


@contextmanager
def _running(threads: Sequence[threading.Thread], end: Callable[[], object]) -> Iterator[None]:
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        end()
        for thread in threads:
            thread.join(10)
        assert not any(thread.is_alive() for thread in threads), "a rank did not end"


def _cpu(options: dict[str, Any]) -> ComputeOptions:
    frees_windows = "max_frames" in options
    options = {name: value for name, value in options.items() if name != "max_frames"}
    return ComputeOptions(**{**options, "device": torch.device("cpu"), "frees_windows": frees_windows})


def _follow(
    checkpoint: Path, group: SharedMemoryGroup, memory: Callable[[], Tensor | None], options: dict[str, Any]
) -> None:
    leader = group.peers[0]
    try:
        model = load_model(checkpoint, _cpu(options), group.share, group)
        command = read_command(leader)
        if isinstance(command, OpenCache):
            compute = model.compute(command.num_blocks, memory(), command.num_frames)
            leader.sendall(frame(Ready(compute.arithmetic)))
            asked = AskedRows.of(model.config, model.layout, options.get("range_tokens", 0))
            Follower(compute.forward, group, partial(read_command, leader), asked).run()
    except ConfigError:
        # The leader raises the same error.
        pass
    finally:
        group.close()
