"""Unknown peer of services: ``python -m pdmesh_testing.stranger`` tries to open streams.

Reads a JSON list of `Knock`, and prints a list of sentences: how each stream ended, in the order of the knocks.
"""

from __future__ import annotations

import ssl
import sys
from dataclasses import replace
from pathlib import Path

import anyio
import msgspec

from pdmesh.config import SecurityConfig
from pdmesh.core.events import LoadReported
from pdmesh.errors import InstanceUnavailable, leaves
from pdmesh.model import InstanceId
from pdmesh.wire.endpoint import open_channel
from pdmesh.wire.link import open_link
from pdmesh.wire.messages import EventMessage, WorkerDown

LIMIT_S = 20.0


class Knock(msgspec.Struct, kw_only=True):
    """Target and credentials of an attempt to open a stream."""

    address: str
    method: str
    authority: str
    certificate: str | None = None
    key: str | None = None
    token: str = ""
    #: Whether the connection has no TLS at all.
    plain: bool = False


async def try_stream(knock: Knock) -> str:
    """Say something that begins no stream, and return how it ended."""
    security = SecurityConfig(mesh_token=knock.token)
    if knock.certificate is not None and knock.key is not None:
        files = Path(knock.certificate), Path(knock.key), Path(knock.authority)
        security = replace(security, tls_cert=files[0], tls_key=files[1], tls_ca=files[2])
    ended = "it ended without a word"
    try:
        async with (
            open_channel(knock.address, security) as channel,
            open_link(channel, knock.method, WorkerDown) as link,
            anyio.create_task_group() as tasks,
        ):
            tasks.start_soon(link.pump)
            link.post(EventMessage.of(LoadReported(InstanceId("nobody"), 0, 0, 0, 0)))
            with anyio.fail_after(LIMIT_S):
                async for frame in link.frames():
                    ended = f"it was answered: {frame}"
                    break
            tasks.cancel_scope.cancel()
    except* InstanceUnavailable as group:
        ended = "; ".join(str(leaf) for leaf in leaves(group))
    return ended


async def try_without_certificate(knock: Knock) -> str:
    """Speak TLS as gRPC does, and show no certificate."""
    context = ssl.create_default_context(cafile=knock.authority)
    context.set_alpn_protocols(["h2"])
    host, _, port = knock.address.rpartition(":")
    try:
        with anyio.fail_after(LIMIT_S):
            async with await anyio.connect_tcp(
                host, int(port), ssl_context=context, tls_standard_compatible=False
            ) as stream:
                await stream.send(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\4\0\0\0\0\0")
                return f"it was answered: {await stream.receive()!r}"
    except (OSError, anyio.EndOfStream, anyio.BrokenResourceError) as error:
        return repr(error)


async def main() -> None:
    knocks = msgspec.json.decode(sys.stdin.read(), type=list[Knock])
    said = [
        await (try_stream(knock) if knock.certificate or knock.plain else try_without_certificate(knock))
        for knock in knocks
    ]
    sys.stdout.buffer.write(msgspec.json.encode(said))


if __name__ == "__main__":
    anyio.run(main)
