"""Composition root of the prefill service: an instance that computes prompts and sends their KV on."""

from __future__ import annotations

from functools import partial

from pdmesh.config import MeshConfig
from pdmesh.model import Role
from pdmesh.service import run_service
from pdmesh.worker.runtime import run_worker


def main(config: MeshConfig) -> int:
    """Run the instance until stopped, and return the exit code. ``worker.role`` may set another role than prefill."""
    role = Role(config.worker.role or Role.PREFILL)
    return run_service(role, config, partial(run_worker, role=role))
