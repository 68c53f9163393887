"""Regenerate the protobuf code: ``python -m pdmesh_gateway.proto.regenerate`` (needs grpcio-tools)."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path


def main() -> int:
    """Write the modules beside this one; returns protoc's exit code."""
    source_root = Path(__file__).parents[2]
    protoc = import_module("grpc_tools.protoc")
    arguments = [
        "protoc",
        f"--proto_path={source_root}",
        f"--python_out={source_root}",
        f"--pyi_out={source_root}",
        f"--grpc_python_out={source_root}",
        "pdmesh_gateway/proto/pdmesh.proto",
    ]
    return int(protoc.main(arguments))


if __name__ == "__main__":
    sys.exit(main())
