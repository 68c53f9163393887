"""``python -m pdmesh_decode``: one instance, configured by the environment."""

import sys

from pdmesh.service import run_from_environment

sys.exit(run_from_environment("decode", "pdmesh_decode.main"))
