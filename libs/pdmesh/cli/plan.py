"""The child processes of a mesh, made from a configuration and the numbers of instances."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pdmesh.cli.processes import ChildSpec, is_gateway
from pdmesh.cli.state_folder import StateFolder
from pdmesh.config import InstanceDegrees, MeshConfig, WorkerConfig
from pdmesh.config_sources import PREFIX, environment_of
from pdmesh.engine.devices import may_have_device
from pdmesh.errors import ConfigError
from pdmesh.host import num_usable_cores
from pdmesh.model import Role
from pdmesh.operations import PoolCounts, PoolMember


def make_pools(prefill: int | None, decode: int | None, mixed: int) -> PoolCounts:
    """Return the pools. None counts as one instance, but as zero if only ``mixed`` instances are named.

    Raise ConfigError if no instance could prefill, or none could decode.
    """
    default = 0 if mixed and prefill is None and decode is None else 1
    pools = PoolCounts(
        prefill=default if prefill is None else prefill, decode=default if decode is None else decode, mixed=mixed
    )
    if (why_not := pools.why_not) is not None:
        raise ConfigError(why_not)
    return pools


def threads_per_worker(config: MeshConfig, num_workers: int, cores: int, num_ranks: int = 1) -> int:
    """Return the threads of each rank: `worker.num_threads`, else an even share of the cores.

    The cores are shared among the workers, and a worker's among its ranks.
    """
    return config.worker.num_threads or max(1, cores // num_workers // num_ranks)


#: About 0.1 ms of spinning for OpenMP's idle threads: longer than the gaps between the kernels of a layer. By default
#: they spin for 3 ms, and would keep a core from the worker that lent it.
_SPIN_COUNT = "5000"


def with_brief_spinning(environ: Mapping[str, str]) -> Mapping[str, str]:
    """Return the environment of a mesh whose workers lend each other cores. The user's own settings are kept."""
    if {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"} & environ.keys():
        return environ
    return {**environ, "GOMP_SPINCOUNT": _SPIN_COUNT}


def scheduler_spec(config: MeshConfig, state: StateFolder, environ: Mapping[str, str]) -> ChildSpec:
    settings = config.scheduler
    if settings.operations_file is None:
        settings = replace(settings, operations_file=state.operations_file)
    return _spec("scheduler", "pdmesh_scheduler", replace(config, scheduler=settings), state, environ)


#: Settings of a worker's degrees, in the order of `InstanceDegrees`.
_DEGREES = ("PDMESH_WORKER_TENSOR_PARALLEL_SIZE", "PDMESH_WORKER_PIPELINE_PARALLEL_SIZE")


@dataclass(slots=True)
class WorkerSpecs:
    """Maker of the workers' specs, given the facts that the ``scheduler`` announced."""

    config: MeshConfig
    state: StateFolder
    environ: Mapping[str, str]
    cores_file: Path | None = None
    scheduler: Mapping[str, Any] = field(default_factory=dict[str, Any])
    _positions: dict[str, int] = field(default_factory=dict[str, int])  # never reused: ports depend on them

    def of_pools(self, pools: PoolCounts) -> Sequence[ChildSpec]:
        roles = [role for role in Role for _ in range(pools.of(role))]
        return [
            self.worker(f"{role}-{roles[:position].count(role)}", role, pools.total)
            for position, role in enumerate(roles)
        ]

    def worker(self, name: str, role: Role, num_workers: int) -> ChildSpec:
        """Return the spec of one of ``num_workers`` workers, which share the machine."""
        self._positions.setdefault(name, len(self._positions))
        worker = replace(
            self._shared(num_workers, self.config.degrees_of(role)),
            instance_id=f"{self.name_prefix}{name}",
            role=str(role),
            metrics_port=self.config.worker.metrics_port and self.config.worker.metrics_port + self._positions[name],
            cores_file=self.cores_file,
        )
        package = "pdmesh_prefill" if role is Role.PREFILL else "pdmesh_decode"
        return _spec(
            name, package, replace(_dialing(self.config, self.scheduler), worker=worker), self.state, self.environ
        )

    def member(self, member: PoolMember, num_workers: int) -> ChildSpec:
        """Return the spec of an instance that the scheduler wants."""
        return self.worker(member.instance_id.removeprefix(self.name_prefix), member.role, num_workers)

    def resized(self, spec: ChildSpec, num_workers: int) -> ChildSpec:
        """Return a worker's spec for its next start among ``num_workers``. The running process keeps its share."""
        degrees = InstanceDegrees(*(int(spec.environment.get(name, "1")) for name in _DEGREES))
        shared = environment_of(replace(self.config, worker=self._shared(num_workers, degrees)))
        names = ("PDMESH_WORKER_NUM_THREADS", "PDMESH_WORKER_KV_CACHE_HOST_SHARE")
        kept = {name: value for name, value in spec.environment.items() if name not in names}
        return replace(spec, environment={**kept, **{name: shared[name] for name in names if name in shared}})

    @property
    def name_prefix(self) -> str:
        return "" if self.config.worker.instance_id is None else f"{self.config.worker.instance_id}-"

    def _shared(self, num_workers: int, degrees: InstanceDegrees) -> WorkerConfig:
        worker = self.config.worker
        return replace(
            worker,
            tensor_parallel_size=degrees.tensor,
            pipeline_parallel_size=degrees.stages,
            num_threads=threads_per_worker(self.config, num_workers, num_usable_cores(), degrees.num_ranks),
            kv_cache_host_share=2 * worker.kv_cache_host_share / max(2, num_workers),
        )


def gateway_specs(
    config: MeshConfig,
    num_gateways: int,
    listen_fd: int,
    state: StateFolder,
    environ: Mapping[str, str],
    scheduler: Mapping[str, Any],
) -> Sequence[ChildSpec]:
    """Return the specs of gateways that share the socket ``listen_fd``, given the scheduler's announced facts."""
    shared = replace(config, gateway=replace(config.gateway, listen_fd=listen_fd))
    names = ["gateway"] if num_gateways == 1 else [f"gateway-{number}" for number in range(num_gateways)]
    specs = [_spec(name, "pdmesh_gateway", _dialing(shared, scheduler), state, environ) for name in names]
    return [replace(spec, pass_fds=(listen_fd,)) for spec in specs]


def fork_server_spec(
    config: MeshConfig, pools: PoolCounts, state: StateFolder, environ: Mapping[str, str]
) -> ChildSpec | None:
    """Return the spec of the process that forks workers; None if workers cannot be forked.

    On a host with an NVIDIA device each worker is started by its command: CUDA does not survive a fork.
    """
    worker = config.worker
    if worker.device != "cpu" and (worker.device != "auto" or may_have_device()):
        return None
    roles = [role for role in Role if pools.of(role)]
    degrees = min(config.degrees_of(role) for role in roles)
    shared = replace(worker, tensor_parallel_size=degrees.tensor, pipeline_parallel_size=degrees.stages)
    return _spec("fork-server", "pdmesh.cli.fork_server", replace(_not_operated(config), worker=shared), state, environ)


def _dialing(config: MeshConfig, scheduler: Mapping[str, Any]) -> MeshConfig:
    return replace(_not_operated(config), scheduler_address=str(scheduler["address"]))


def _not_operated(config: MeshConfig) -> MeshConfig:
    """Return the configuration without operators' tokens, which only the scheduler gets."""
    return replace(config, security=replace(config.security, operator_token="", operators_file=None))


def pinned_settings(service: str, facts: Mapping[str, Any]) -> dict[str, str]:
    """Return settings for ports that a service got from the system and must have again, because others dial them."""
    if service == "scheduler":
        return {"PDMESH_SCHEDULER_PORT": _port(facts["address"])}
    if is_gateway(service):
        return {"PDMESH_GATEWAY_GRPC_PORT": _port(facts["grpc_address"])} if "grpc_address" in facts else {}
    return {}


def _port(address: str) -> str:
    return address.rpartition(":")[2]


def _spec(name: str, package: str, config: MeshConfig, state: StateFolder, environ: Mapping[str, str]) -> ChildSpec:
    foreign = {key: value for key, value in environ.items() if not key.startswith(PREFIX)}
    return ChildSpec(
        name=name,
        command=(sys.executable, "-m", package),
        # The supervisor ends its children: their own limits could cut a longer drain short.
        environment={**foreign, **environment_of(replace(config, ready_fd=None, drain_s=None))},
        log_file=state.fresh_log(name, config.supervisor.log_keep),
        forked_service=package.removeprefix("pdmesh_") if package in ("pdmesh_prefill", "pdmesh_decode") else "",
    )
