"""The process of one rank of an instance, started by the instance's leader (`pdmesh.worker.ranks`)."""

from __future__ import annotations

import ctypes
import faulthandler
import os
import signal
import sys
import threading
import time
from functools import partial

import msgspec
import structlog

from pdmesh.config_sources import load_config
from pdmesh.engine.ranks.commands import Failed, OpenCache, Ready, frame, read_command
from pdmesh.engine.ranks.following import Follower
from pdmesh.engine.ranks.group import SharedMemoryGroup
from pdmesh.engine.ranks.memory import map_memory
from pdmesh.engine.ranks.share import RankShare
from pdmesh.errors import ConfigError, leaves
from pdmesh.failures import sentences
from pdmesh.telemetry.logs import configure_logging
from pdmesh.worker.engines import load_rank
from pdmesh.worker.ranks import BEAT_S, RankStart

log = structlog.get_logger()

_PR_SET_PDEATHSIG = 1


def main() -> int:
    """Compute with the others until the leader ends; return the exit code."""
    start = msgspec.json.decode(sys.argv[1], type=RankStart)
    _end_with(start.leader_pid)
    faulthandler.enable()
    for number in (signal.SIGTERM, signal.SIGINT):  # those are for the leader, which drains first
        signal.signal(number, signal.SIG_IGN)
    share = RankShare(start.rank, start.num_ranks)
    group = SharedMemoryGroup.inherited(share, start.socket_fds, start.exchange_fd)
    leader = group.peers[0]
    try:
        config = load_config(None, os.environ, {})
        configure_logging(f"rank-{start.rank}", config.telemetry)
        threading.Thread(target=_beat, args=(group,), name="beat", daemon=True).start()
        model = load_rank(config, start.num_threads, group)
        command = read_command(leader)
        if not isinstance(command, OpenCache):
            return 0  # the leader could not start, and has said why
        num_bytes = command.num_blocks * model.layout.num_layers * model.layout.block_bytes
        compute = model.compute(command.num_blocks, map_memory(start.cache_fd, num_bytes))
        leader.sendall(frame(Ready(compute.arithmetic)))
    except Exception as error:
        log.exception("the rank cannot start", rank=start.rank)
        is_configuration = any(isinstance(leaf, ConfigError) for leaf in leaves(error))
        leader.sendall(frame(Failed(sentences(error), is_configuration)))
        return 1
    Follower(compute.forward, group, partial(read_command, leader)).run()
    return 0


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
