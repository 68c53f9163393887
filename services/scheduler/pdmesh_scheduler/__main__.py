"""``python -m pdmesh_scheduler``: run the scheduler, configured by the environment."""

from pdmesh.service import run_from_environment
from pdmesh_scheduler.main import main

raise SystemExit(run_from_environment("scheduler", main))
