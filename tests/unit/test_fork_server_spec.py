"""What a fork server is started with, and where there is none."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from pdmesh.cli import plan
from pdmesh.cli.plan import WorkerSpecs, fork_server_spec
from pdmesh.cli.state_folder import StateFolder
from pdmesh.config import MeshConfig, PoolConfig, SecurityConfig, WorkerConfig
from pdmesh.operations import PoolCounts

POOLS = PoolCounts(prefill=1, decode=1, mixed=0)
ENVIRON = {"OMP_WAIT_POLICY": "passive", "PDMESH_LOG": "x"}


def test_a_fork_server_has_a_workers_environment_and_no_operators_token(tmp_path: Path) -> None:
    state = StateFolder("test", tmp_path)
    config = MeshConfig(model="m", security=SecurityConfig(operator_token="secret", mesh_token="t"))
    spec = fork_server_spec(config, POOLS, state, ENVIRON)
    assert spec is not None
    assert not spec.forked_service
    assert "secret" not in spec.environment.values()
    workers = WorkerSpecs(config, state, ENVIRON, scheduler={"address": "127.0.0.1:1"}).of_pools(POOLS)
    assert [worker.forked_service for worker in workers] == ["prefill", "decode"]
    for worker in workers:
        assert worker.environment["OMP_WAIT_POLICY"] == spec.environment["OMP_WAIT_POLICY"] == "passive"
        assert worker.environment["PDMESH_MODEL"] == spec.environment["PDMESH_MODEL"]


def test_a_pool_of_whole_instances_decides_what_is_loaded(tmp_path: Path) -> None:
    config = MeshConfig(model="m", prefill=PoolConfig(tensor_parallel_size=2))
    spec = fork_server_spec(config, POOLS, StateFolder("test", tmp_path), {})
    assert spec is not None
    assert spec.environment.get("PDMESH_WORKER_TENSOR_PARALLEL_SIZE", "1") == "1"
    none_whole = replace(config, worker=WorkerConfig(tensor_parallel_size=2))
    spec = fork_server_spec(none_whole, POOLS, StateFolder("test", tmp_path), {})
    assert spec is not None
    assert spec.environment["PDMESH_WORKER_TENSOR_PARALLEL_SIZE"] == "2"


@pytest.mark.parametrize(
    ("device", "has_driver", "forks"),
    [("cpu", True, True), ("auto", False, True), ("auto", True, False), ("cuda", False, False)],
)
def test_no_worker_that_may_compute_on_a_device_is_forked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str, has_driver: bool, forks: bool
) -> None:
    monkeypatch.setattr(plan, "may_have_device", lambda: has_driver)
    config = MeshConfig(worker=WorkerConfig(device=device))
    assert (fork_server_spec(config, POOLS, StateFolder("test", tmp_path), {}) is not None) == forks
