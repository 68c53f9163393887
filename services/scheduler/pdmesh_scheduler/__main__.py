"""``python -m pdmesh_scheduler``: run the scheduler, configured by the environment."""

from pdmesh.service import run_from_environment

raise SystemExit(run_from_environment("scheduler", "pdmesh_scheduler.main"))
