"""What every service of a mesh needs of its machine, checked once before the first is started."""

from __future__ import annotations

import os
import socket
from collections.abc import Collection
from pathlib import Path

from pdmesh.config import InstanceDegrees, MeshConfig
from pdmesh.engine.architectures.undescribed import check_installed
from pdmesh.engine.files import load_model_config, weight_files
from pdmesh.errors import ConfigError
from pdmesh.host import free_host_bytes, has_nvidia_driver, is_loopback, num_startable_threads
from pdmesh.service import raise_descriptor_limit
from pdmesh.worker.engines import check_ranks_can_compute, check_weights_fit

#: Of one of our processes (10 to 13 in a mesh of four that answers, 2026-11), and some to spare.
THREADS_PER_PROCESS = 15

#: For a connection within this machine.
_CONNECT_LIMIT_S = 3.0


def check_machine(config: MeshConfig, *, num_processes: int) -> None:
    """Raise ConfigError if a mesh of ``num_processes`` could start here, but not run."""
    raise_descriptor_limit()
    check_thread_limit(num_processes, num_startable_threads())
    hosts = {config.scheduler.host, config.telemetry.metrics_host, config.gateway.token_host, config.gateway.host}
    for host in sorted(filter(is_loopback, hosts)):
        check_loopback(host)


def check_checkpoint(config: MeshConfig, directory: Path, *, num_instances: int) -> None:
    """Raise ConfigError if ``directory`` is no complete checkpoint, or if it is too large for so many instances."""
    if config.worker.engine != "torch":
        return
    model = load_model_config(directory)
    check_installed(model)
    if not (directory / "tokenizer.json").exists():
        raise ConfigError(f"{directory} has no tokenizer.json: save the checkpoint with its fast tokenizer")
    if config.worker.load_format != "dummy":
        weight_files(directory)
    if config.worker.device == "cpu" or (config.worker.device == "auto" and not has_nvidia_driver()):
        layout = model.kv_layout(dtype=config.worker.dtype, block_size=config.worker.block_size)
        check_weights_fit(model, layout, num_instances=num_instances, free_bytes=free_host_bytes())


def check_ranks(config: MeshConfig, divisions: Collection[InstanceDegrees]) -> None:
    """Raise ConfigError if instances cannot be divided like these."""
    for degrees in sorted(divisions):
        check_ranks_can_compute(config, degrees)


def check_thread_limit(num_processes: int, num_startable: int | None) -> None:
    """Raise ConfigError if a mesh would have more threads than are allowed, and so would crash at random places."""
    wanted = num_processes * THREADS_PER_PROCESS
    if num_startable is not None and num_startable < wanted:
        raise ConfigError(
            f"only {num_startable} more processes and threads can be started, but a mesh of {num_processes} "
            f"processes takes about {wanted}: raise the limit (`ulimit -u`, `docker run --pids-limit`)"
        )


def check_loopback(host: str) -> None:
    """Raise ConfigError if this machine cannot connect to itself at ``host``."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.create_server((host, 0), family=family) as server:
            socket.create_connection(server.getsockname()[:2], timeout=_CONNECT_LIMIT_S).close()
    except OSError as error:
        why = os.strerror(error.errno) if error.errno else str(error)
        raise ConfigError(
            f"this machine cannot connect to itself at {host}, where the mesh's services connect: {why}; bring its "
            "loopback interface up (`ip link set lo up`), or set other hosts in the configuration"
        ) from error
