"""Who has no key costs no memory: messages are refused before they are read."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any

import anyio
import grpc
import grpc.aio
import pytest

from pdmesh.wire.endpoint import TOKEN_METADATA
from pdmesh_testing.mesh import RunningMesh, running_mesh

pytestmark = [pytest.mark.anyio, pytest.mark.e2e, pytest.mark.timeout(300)]

#: What either service may grow by, beside allocators' habits a few of gRPC's windows of 64 KiB to 4 MiB for each call.
MAX_GROWTH_BYTES = 96 << 20

#: For a call to be refused.
LIMIT_S = 60.0

Metadata = Sequence[tuple[str, str]]


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Generator[RunningMesh]:
    settings = {"WORKER_ENGINE": "fake", "SECURITY_API_KEY": "secret"}
    with running_mesh(tmp_path_factory.mktemp("strangers"), model=None, settings=settings) as mesh:
        yield mesh


@pytest.mark.parametrize(
    ("service", "address", "method", "num_calls", "num_bytes", "metadata"),
    [
        ("gateway", "grpc_address", "/pdmesh.api.v1.Inference/Generate", 24, 29_000_000, ()),
        ("gateway", "token_address", "/pdmesh.v1.Gateway/Tokens", 4, 63_000_000, ((TOKEN_METADATA, "00"),)),
        ("scheduler", "address", "/pdmesh.v1.Scheduler/Gateway", 2, 63_000_000, ((TOKEN_METADATA, "00"),)),
        ("scheduler", "address", "/pdmesh.v1.Scheduler/Admin", 2, 63_000_000, ((TOKEN_METADATA, "00"),)),
    ],
)
async def test_large_messages_of_strangers_are_not_read(
    mesh: RunningMesh, service: str, address: str, method: str, num_calls: int, num_bytes: int, metadata: Metadata
) -> None:
    (record,) = [each for each in mesh.record.services if each.name == service]
    process = Path("/proc", str(record.process.pid))
    (process / "clear_refs").write_text("5")  # the peak is what it has now
    before_bytes = peak_bytes(process)
    codes = await refused(str(record.facts[address]), method, bytes(num_bytes), num_calls, metadata)
    assert codes == {grpc.StatusCode.UNAUTHENTICATED: num_calls}
    assert peak_bytes(process) - before_bytes < MAX_GROWTH_BYTES


def peak_bytes(process: Path) -> int:
    """The most memory that a process has had resident."""
    lines = (process / "status").read_text().splitlines()
    (line,) = (line for line in lines if line.startswith("VmHWM:"))
    return int(line.split()[1]) << 10


async def refused(
    address: str, method: str, message: bytes, num_calls: int, metadata: Metadata
) -> Counter[grpc.StatusCode]:
    """How calls end that send ``message``, all at once, each on a connection of its own."""
    codes: Counter[grpc.StatusCode] = Counter()
    options = (("grpc.max_send_message_length", -1), ("grpc.use_local_subchannel_pool", 1))

    async def call() -> None:
        async with grpc.aio.insecure_channel(address, options=options) as channel:
            one: Any = channel.unary_stream(method)
            codes[await one(message, metadata=metadata).code()] += 1

    with anyio.fail_after(LIMIT_S):
        await asyncio.gather(*(call() for _ in range(num_calls)))
    return codes
