"""Stream a generation over gRPC: ``python examples/grpc_client.py HOST:PORT "Once upon a time"``.

The gateway prints its gRPC address when it starts. Other languages generate a client from
``services/gateway/pdmesh_gateway/proto/pdmesh.proto``, or ask the server's reflection service.
"""

from __future__ import annotations

import os
import sys

import grpc

from pdmesh_gateway.proto import pdmesh_pb2 as pb
from pdmesh_gateway.proto import pdmesh_pb2_grpc as pb_grpc


def main() -> None:
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    address, prompt = sys.argv[1], " ".join(sys.argv[2:])
    key = os.environ.get("PDMESH_API_KEY")
    metadata = (("authorization", f"Bearer {key}"),) if key else ()
    with grpc.insecure_channel(address) as channel:
        stub = pb_grpc.InferenceStub(channel)  # type: ignore[no-untyped-call]
        request = pb.GenerateRequest(text=prompt, sampling=pb.SamplingOptions(max_tokens=64))
        for response in stub.Generate(request, metadata=metadata):
            print(response.text, end="", flush=True)
            if response.finish_reason:
                usage = response.usage
                print(f"\n[{usage.prompt_tokens} prompt and {usage.completion_tokens} output tokens]")


if __name__ == "__main__":
    main()
