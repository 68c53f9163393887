"""``python -m pdmesh_prefill``: one instance, configured by the environment."""

import sys

from pdmesh.service import run_from_environment

sys.exit(run_from_environment("prefill", "pdmesh_prefill.main"))
