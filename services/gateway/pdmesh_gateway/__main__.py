import sys

from pdmesh.service import run_from_environment

if __name__ == "__main__":
    sys.exit(run_from_environment("gateway", "pdmesh_gateway.main"))
