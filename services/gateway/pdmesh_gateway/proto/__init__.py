"""The protobuf service for typed clients. To generate the code of ``pdmesh.proto`` again, in ``services/gateway``:

python -m grpc_tools.protoc -I. --python_out=. --pyi_out=. --grpc_python_out=. pdmesh_gateway/proto/pdmesh.proto
"""
