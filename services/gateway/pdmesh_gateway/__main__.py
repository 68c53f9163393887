import sys

from pdmesh.service import run_from_environment
from pdmesh_gateway.main import main

if __name__ == "__main__":
    sys.exit(run_from_environment("gateway", main))
