"""``python -m pdmesh_decode``: one instance, configured by the environment."""

import sys

from pdmesh.service import run_from_environment
from pdmesh_decode.main import main

sys.exit(run_from_environment("decode", main))
