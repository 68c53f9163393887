"""A file of the product is found by its name: in these folders no name occurs twice."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

from pdmesh_gateway.dialects import DIALECTS, NO_DIALECT, dialect_of
from pdmesh_gateway.proto import pdmesh_pb2

ROOT = Path(__file__).parents[2]

FOLDERS = (
    "libs/pdmesh/cli",
    "libs/pdmesh/engine",
    "libs/pdmesh/telemetry",
    "libs/pdmesh/transport",
    "libs/pdmesh/wire",
    "services/gateway",
    "services/scheduler",
)

#: Names that Python or every service has.
BY_CONVENTION = ("__init__.py", "__main__.py", "main.py")


def test_no_other_file_of_the_product_has_the_name_of_a_file_in_these_folders() -> None:
    paths = defaultdict[str, list[str]](list)
    for path in sorted((*(ROOT / "libs").rglob("*.py"), *(ROOT / "services").rglob("*.py"))):
        relative = path.relative_to(ROOT)
        if path.name not in BY_CONVENTION:
            paths[path.name].append(str(relative))
    assert len(paths) > 300
    twice = [same for same in paths.values() if len(same) > 1 and any(each.startswith(FOLDERS) for each in same)]
    assert twice == [], "give each a name of its own, such as peer_streams.py for streams of peers"


def test_every_path_has_one_dialect() -> None:
    assert len({dialect.name for dialect in DIALECTS}) == len(DIALECTS)
    for dialect in DIALECTS:
        for path in dialect.paths:
            assert dialect_of(path) is dialect
    assert dialect_of("/v1/messages/count_tokens").name == "messages"
    assert dialect_of("/v1/messages_of_another_kind") is NO_DIALECT
    assert dialect_of("/metrics") is NO_DIALECT


def test_the_paths_of_grpc_are_methods_of_the_service() -> None:
    service = pdmesh_pb2.DESCRIPTOR.services_by_name["Inference"]
    methods = {f"/{service.full_name}/{method.name}" for method in service.methods}
    assert methods == {path for dialect in DIALECTS if dialect.name.startswith("grpc") for path in dialect.paths}
