"""The protobuf service for typed clients; ``*_pb2*`` are generated from ``pdmesh.proto`` by ``regenerate``."""
