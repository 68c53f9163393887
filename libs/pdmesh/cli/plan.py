"""From a configuration and a wish ("two of these, one of those") to the child processes of a mesh."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pdmesh.cli.processes import ChildSpec
from pdmesh.cli.state import StateFolder
from pdmesh.config import PREFIX, MeshConfig, environment_of
from pdmesh.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Pools:
    """How many instances of each role."""

    prefill: int
    decode: int
    mixed: int

    def __post_init__(self) -> None:
        if not (self.prefill or self.mixed):
            raise ConfigError("no instance could prefill: --prefill or --mixed must be at least 1")
        if not (self.decode or self.mixed):
            raise ConfigError("no instance could decode: --decode or --mixed must be at least 1")

    @property
    def total(self) -> int:
        return self.prefill + self.decode + self.mixed

    def __str__(self) -> str:
        counts = ((self.prefill, "prefill"), (self.decode, "decode"), (self.mixed, "mixed"))
        return " + ".join(f"{count} {role}" for count, role in counts if count)


def make_pools(prefill: int | None, decode: int | None, mixed: int) -> Pools:
    """Without a word on pools: one of each. With mixed ones alone: only those."""
    default = 0 if mixed and prefill is None and decode is None else 1
    return Pools(
        prefill=default if prefill is None else prefill, decode=default if decode is None else decode, mixed=mixed
    )


def num_cores() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0))


def threads_per_worker(config: MeshConfig, pools: Pools, cores: int) -> int:
    """The machine's cores shared evenly among the workers, unless the configuration says a number."""
    return config.worker.num_threads or max(1, cores // pools.total)


def scheduler_spec(config: MeshConfig, state: StateFolder, environ: Mapping[str, str]) -> ChildSpec:
    settings = config.scheduler
    if settings.operations_file is None:
        settings = replace(settings, operations_file=state.operations_file)
    return _spec("scheduler", "pdmesh_scheduler", replace(config, scheduler=settings), state, environ)


def other_specs(
    config: MeshConfig, pools: Pools, state: StateFolder, environ: Mapping[str, str], scheduler: Mapping[str, Any]
) -> tuple[ChildSpec, Sequence[ChildSpec]]:
    """The gateway and the workers of the mesh, given what its scheduler announced."""
    security = replace(config.security, operator_token="")  # the scheduler's alone
    config = replace(config, scheduler_address=str(scheduler["address"]), security=security)
    num_threads = threads_per_worker(config, pools, num_cores())
    roles = ["prefill"] * pools.prefill + ["decode"] * pools.decode + ["mixed"] * pools.mixed
    workers = []
    for position, role in enumerate(roles):
        name = f"{role}-{roles[:position].count(role)}"
        worker = replace(
            config.worker,
            instance_id=name if config.worker.instance_id is None else f"{config.worker.instance_id}-{name}",
            role=role,
            num_threads=num_threads,
            kv_cache_host_share=2 * config.worker.kv_cache_host_share / max(2, pools.total),
            metrics_port=config.worker.metrics_port and config.worker.metrics_port + position,
        )
        package = "pdmesh_prefill" if role == "prefill" else "pdmesh_decode"
        workers.append(_spec(name, package, replace(config, worker=worker), state, environ))
    return _spec("gateway", "pdmesh_gateway", config, state, environ), workers


def pinned_settings(service: str, facts: Mapping[str, Any]) -> dict[str, str]:
    """Ports that a service got from the system and must have again when it is restarted, since others dial them."""
    if service == "scheduler":
        return {"PDMESH_SCHEDULER_PORT": _port(facts["address"])}
    if service == "gateway":
        return {"PDMESH_GATEWAY_PORT": _port(facts["http_address"])}
    return {}


def _port(address: str) -> str:
    return address.rpartition(":")[2]


def _spec(name: str, package: str, config: MeshConfig, state: StateFolder, environ: Mapping[str, str]) -> ChildSpec:
    foreign = {key: value for key, value in environ.items() if not key.startswith(PREFIX)}
    return ChildSpec(
        name=name,
        command=(sys.executable, "-m", package),
        # The supervisor says when to end: a limit of their own would cut a longer one short.
        environment={**foreign, **environment_of(replace(config, ready_fd=None, drain_s=None))},
        log_file=state.fresh_log(name, config.supervisor.log_keep),
    )
