"""Composition root of the decode service: an instance that generates tokens and, as ``mixed``, also
computes prompts.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from pdmesh.config import MeshConfig
from pdmesh.model import Role
from pdmesh.service import run_service
from pdmesh.worker.runtime import run_worker

# Importing torch takes seconds.
if TYPE_CHECKING:
    from pdmesh.engine.preloaded import PreloadedModel


def main(config: MeshConfig, preloaded: PreloadedModel | None = None) -> int:
    """Run the instance until stopped, and return the exit code. ``worker.role`` may set another role than decode."""
    role = Role(config.worker.role or Role.DECODE)
    return run_service(role, config, partial(run_worker, role=role, preloaded=preloaded))
