"""The process of one rank of an instance, started by the instance's leader (`pdmesh.worker.ranks`)."""

from __future__ import annotations

import ctypes
import faulthandler
import os
import signal
import socket
import sys
import threading
import time
from functools import partial

import msgspec
import structlog
from torch import Tensor

from pdmesh.config_sources import load_config
from pdmesh.engine.compute import Compute
from pdmesh.engine.forward import DirectForward
from pdmesh.engine.kv_cache import memory_bytes
from pdmesh.engine.model_loading import LoadedModel
from pdmesh.engine.ranks.channel import StageChannel
from pdmesh.engine.ranks.following import Follower
from pdmesh.engine.ranks.group import SharedMemoryGroup
from pdmesh.engine.ranks.places import exchange_bytes, group_memory, inlet_memory, outlet_memory
from pdmesh.engine.ranks.rank_commands import Failed, OpenCache, Ready, frame, read_command
from pdmesh.engine.ranks.rank_elsewhere import AskedRows
from pdmesh.engine.ranks.rank_memory import map_memory
from pdmesh.engine.ranks.staged_ranks import StageFollower
from pdmesh.errors import ConfigError, leaves
from pdmesh.failures import sentences
from pdmesh.garbage import rare_collections
from pdmesh.telemetry.log_lines import configure_logging
from pdmesh.worker.engines import load_rank
from pdmesh.worker.rank_start import RankStart
from pdmesh.worker.ranks import BEAT_S

log = structlog.get_logger()

_PR_SET_PDEATHSIG = 1


def main() -> int:
    """Compute with the other ranks until the leader ends, and return the exit code.

    SIGTERM and SIGINT are ignored, because the leader drains first. Garbage is collected rarely, as in the leader,
    since the other ranks would wait. If the leader does not open the cache, it has failed and has reported why.
    """
    start = msgspec.json.decode(sys.argv[1], type=RankStart)
    _end_with(start.leader_pid)
    faulthandler.enable()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    memory = map_memory(start.exchange_fd, exchange_bytes(start.num_ranks, start.num_stages))
    group = SharedMemoryGroup(start.share, list(map(_socket, start.socket_fds)), group_memory(memory, start.stage))
    leader = next((peer for peer in group.peers if peer.fileno() == start.leader_fd), None)
    leader = leader or socket.socket(fileno=start.leader_fd)
    try:
        config = load_config(None, os.environ, {})
        configure_logging(f"rank-{start.stage * start.num_ranks + start.rank}", config.telemetry)
        threading.Thread(target=_beat, args=(group,), name="beat", daemon=True).start()
        model, weights = load_rank(config, start.num_threads, group)
        command = read_command(leader)
        if not isinstance(command, OpenCache):
            return 0
        num_bytes = memory_bytes(model.layout, command.num_blocks, command.num_frames)
        compute = model.compute(command.num_blocks, map_memory(start.cache_fd, num_bytes), command.num_frames)
        asked = AskedRows.of(model.config, model.layout, config.worker.max_kv_tokens_per_instance)
        follower = _follower(start, model, compute, group, leader, memory, asked)
        leader.sendall(frame(Ready(compute.arithmetic, compute.name, compute.reason, weights)))
    except Exception as error:
        log.exception("rank cannot start", rank=start.rank)
        is_configuration = any(isinstance(leaf, ConfigError) for leaf in leaves(error))
        leader.sendall(frame(Failed(sentences(error), is_configuration)))
        return 1
    with rare_collections():
        follower.run()
    return 0


def _follower(
    start: RankStart,
    model: LoadedModel,
    compute: Compute,
    group: SharedMemoryGroup,
    leader: socket.socket,
    memory: Tensor,
    asked: AskedRows,
) -> Follower | StageFollower:
    receive, share = partial(read_command, leader), start.share
    if share.num_stages == 1:
        return Follower(compute.forward, group, receive, asked)
    assert isinstance(compute.forward, DirectForward), "stages compute on CPUs"
    inlet, outlet = _socket(start.inlet_fd), _socket(start.outlet_fd)
    return StageFollower(
        compute.forward,
        group,
        receive,
        lambda report: leader.sendall(frame(report)),
        None if inlet is None else StageChannel(inlet, inlet_memory(memory, share)),
        None if outlet is None else StageChannel(outlet, outlet_memory(memory, share)),
        asked,
        hidden_size=model.config.hidden_size,
    )


def _socket(fd: int) -> socket.socket | None:
    return None if fd < 0 else socket.socket(fileno=fd)


def _end_with(leader_pid: int) -> None:
    """Ask the system to kill this process when the leader ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != leader_pid:
        os._exit(1)


def _beat(group: SharedMemoryGroup) -> None:
    while True:
        group.beat()
        time.sleep(BEAT_S)


if __name__ == "__main__":
    sys.exit(main())
