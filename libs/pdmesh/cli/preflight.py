"""Checks of a mesh's settings, model and machine, before its first service is started and without torch."""

from __future__ import annotations

import os
import socket
from collections.abc import Collection
from pathlib import Path

from pdmesh.apikeys import parse_api_keys, parse_operators
from pdmesh.config import InstanceDegrees, MeshConfig
from pdmesh.engine.architectures.undescribed import check_installed
from pdmesh.engine.devices import check_device
from pdmesh.engine.files import load_model_config, load_model_info, weight_files
from pdmesh.engine.json_files import read_json_object
from pdmesh.engine.levels import check_cpu_level
from pdmesh.errors import ConfigError
from pdmesh.host import free_host_bytes, is_loopback, num_startable_threads
from pdmesh.policy.bundles import check_bundle_name
from pdmesh.service import raise_descriptor_limit
from pdmesh.wire.endpoint import check_bind
from pdmesh.worker.engines import (
    block_size_of,
    cache_size_of,
    check_memory,
    check_ranges,
    check_ranks_can_compute,
    check_states,
    device_name,
    engine_entry,
)

#: Threads of one of our processes, with some to spare (10 to 13 in a mesh of four that answers, 2026-11).
THREADS_PER_PROCESS = 15

#: Seconds for a connection within this machine.
_CONNECT_LIMIT_S = 3.0


def check_settings(config: MeshConfig) -> None:
    """Raise ConfigError for settings that no service could start with, whatever the model."""
    check_bundle_name(config.scheduler.bundle)
    worker = config.worker
    if worker.engine == "torch":
        check_device(worker.device)
        check_cpu_level(worker.cpu_level)
    else:
        engine_entry(worker.engine)
    check_ranges(config)
    if worker.lora is not None and not (worker.lora / "adapter_config.json").exists():
        raise ConfigError(f"{worker.lora} holds no adapter_config.json: give the directory of a LoRA adapter (PEFT's)")


def check_access(config: MeshConfig) -> None:
    """Raise ConfigError for unreadable keys, tokens or certificates, and for a gateway open to any client."""
    security = config.security
    parsers = {"api_keys_file": parse_api_keys, "operators_file": parse_operators}
    for name in ("api_keys_file", "operators_file", "tls_cert", "tls_key", "tls_ca"):
        path: Path | None = getattr(security, name)
        if path is None:
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeError) as error:
            why = error.strerror if isinstance(error, OSError) else "it is not text"
            raise ConfigError(f"cannot read security.{name} {path}: {why}") from error
        if name in parsers and path.suffix == ".toml":
            parsers[name](text, f"security.{name} {path}")
    has_key = security.api_key is not None or security.api_keys_file is not None
    check_bind(config.gateway.host, security, what="the gateway", has_key=has_key)


def check_machine(config: MeshConfig, *, num_processes: int) -> None:
    """Lift the limit of open files. Raise ConfigError if a mesh of ``num_processes`` could start here, but not run."""
    raise_descriptor_limit()
    check_thread_limit(num_processes, num_startable_threads())
    hosts = {config.scheduler.host, config.telemetry.metrics_host, config.gateway.token_host, config.gateway.host}
    for host in sorted(filter(is_loopback, hosts)):
        check_loopback(host)


def check_checkpoint(config: MeshConfig, directory: Path, *, num_instances: int) -> None:
    """Raise ConfigError if ``num_instances`` cannot serve ``directory``.

    The checkpoint must be complete, have the wanted context length and dtype, and fit into memory.
    """
    worker = config.worker
    if worker.engine != "torch":
        return
    model = load_model_config(directory)
    check_installed(model)
    check_states(config, model)
    max_model_len = model.context(worker.max_model_len)
    layout = model.kv_layout(dtype=worker.dtype, block_size=block_size_of(worker, model))
    if not (directory / "tokenizer.json").exists():
        raise ConfigError(f"{directory} has no tokenizer.json: save the checkpoint with its fast tokenizer")
    read_json_object(directory / "tokenizer.json")
    load_model_info(directory)
    if worker.load_format != "dummy":
        weight_files(directory)
    kv_bytes = worker.kv_offload_host_bytes + (worker.kv_cache_bytes or 0)
    if worker.kv_cache_bytes is not None:
        cache_size_of(worker, layout, free_bytes=None, max_model_len=max_model_len)
    if device_name(config) == "cpu":
        free_bytes = free_host_bytes()
        check_memory(model, layout, num_instances=num_instances, free_bytes=free_bytes, kv_bytes=kv_bytes)


def check_ranks(config: MeshConfig, divisions: Collection[InstanceDegrees]) -> None:
    """Raise ConfigError if instances cannot be divided in these ways."""
    for degrees in sorted(divisions):
        check_ranks_can_compute(config, degrees)


def check_thread_limit(num_processes: int, num_startable: int | None) -> None:
    """Raise ConfigError if a mesh would need more threads than allowed, and so would crash at random places.

    ``num_startable`` is None if the system has no limit.
    """
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
