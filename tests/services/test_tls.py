"""TLS between services and for clients: with the right certificate, another authority's, an expired one, and none."""

from __future__ import annotations

import os
import shutil
import socket
import ssl
import stat
import subprocess
import sys
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path

import anyio
import anyio.to_thread
import httpx
import pytest
from prometheus_client import CollectorRegistry
from starlette.types import Receive, Scope, Send

from pdmesh import watched_file
from pdmesh.cli.tls import LOCAL_HOSTS, make_certificates
from pdmesh.config import SecurityConfig
from pdmesh.core.commands import FreeKv
from pdmesh.core.events import LoadReported
from pdmesh.errors import ConfigError, InstanceUnavailable
from pdmesh.model import Epoch, InstanceId, RequestId
from pdmesh.telemetry.exposition import serve_metrics
from pdmesh.wire import endpoint
from pdmesh.wire.endpoint import MeshChannel, open_channel, serving
from pdmesh.wire.link import FrameLink, open_link, serve_link
from pdmesh.wire.messages import CommandMessage, EventMessage, WorkerDown, WorkerUp
from pdmesh.wire.rejected_peers import HANDSHAKE_S, MAX_REMEMBERED, RejectedPeerKind, RejectedPeers
from pdmesh.wire.roles import RoleRule, ServiceRole
from pdmesh_gateway.http.server import serve_http
from pdmesh_testing.certificates import make_expired
from pdmesh_testing.checkpoints import write_checkpoint
from pdmesh_testing.exactness import complete
from pdmesh_testing.mesh import RunningMesh, running_mesh

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.skipif(shutil.which("openssl") is None, reason="no openssl to make certificates with"),
]

SERVICE = "pdmesh.test"
BEAT = EventMessage.of(LoadReported(InstanceId("i"), 0, 0, 0, 0))
ANSWER = CommandMessage.of(FreeKv(instance_id=InstanceId("i"), request_id=RequestId("r"), epoch=Epoch(0)))


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders ``right`` and ``other``, each of an authority of its own; ``right`` has an expired certificate, too."""
    folder = tmp_path_factory.mktemp("certificates")
    for name in ("right", "other"):
        make_certificates(folder / name, hosts=LOCAL_HOSTS, days=2)
    make_expired(folder / "right")
    return folder


def security_of(folder: Path, name: str = "mesh") -> SecurityConfig:
    return SecurityConfig(
        tls_cert=folder / f"{name}.pem", tls_key=folder / f"{name}.key", tls_ca=folder / "ca.pem", mesh_token="token"
    )


@asynccontextmanager
async def service(
    security: SecurityConfig, role: tuple[ServiceRole, bool] | None = None, rejected_peers: RejectedPeers | None = None
) -> AsyncGenerator[str]:
    """Answers each frame; yields its address. With a ``role``, to those of it, and whether they must name it."""
    rejected_peers = rejected_peers or RejectedPeers()

    async def serve(link: FrameLink[WorkerDown, WorkerUp], _peer: str) -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(link.pump)
            async for _ in link.frames():
                link.post(ANSWER)
            link.close()

    rule = None if role is None else RoleRule(*role, rejected_peers)
    methods = {"Echo": serve_link(serve, WorkerUp, rule)}
    async with serving(
        SERVICE, methods, host="127.0.0.1", port=0, security=security, rejected_peers=rejected_peers
    ) as port:
        yield f"127.0.0.1:{port}"


async def is_answered(address: str, security: SecurityConfig) -> bool:
    with anyio.fail_after(30):
        try:
            async with (
                open_channel(address, security) as channel,
                open_link(channel, f"/{SERVICE}/Echo", WorkerDown) as link,
                anyio.create_task_group() as tasks,
            ):
                tasks.start_soon(link.pump)
                link.post(BEAT)
                async for frame in link.frames():
                    link.close()
                    return frame == [ANSWER]
        except* InstanceUnavailable:
            pass
    return False


async def test_a_service_talks_to_those_of_its_authority_alone(certificates: Path) -> None:
    right = security_of(certificates / "right")
    other = security_of(certificates / "other")
    expired = security_of(certificates / "right", "expired")
    async with service(right) as address:
        assert await is_answered(address, right)
        assert not await is_answered(address, other)
        assert not await is_answered(address, replace(other, tls_ca=right.tls_ca))  # trusts us; we do not trust it
        assert not await is_answered(address, expired)
        assert not await is_answered(address, replace(right, tls_cert=None, tls_key=None))  # not TLS at all
        assert await is_answered(address, right)


async def test_a_service_is_what_its_certificate_says(certificates: Path) -> None:
    """Any certificate of the authority could register as any instance, or as a gateway."""
    folder = certificates / "right"
    for role in ServiceRole:
        make_certificates(folder, hosts=LOCAL_HOSTS, days=2, role=role)
    for is_needed in (False, True):
        async with service(security_of(folder), (ServiceRole.WORKER, is_needed)) as address:
            assert await is_answered(address, security_of(folder, "worker"))
            assert not await is_answered(address, security_of(folder, "gateway"))
            assert await is_answered(address, security_of(folder)) is not is_needed
    plain = SecurityConfig(mesh_token="token")
    async with service(plain, (ServiceRole.WORKER, True)) as address:
        assert await is_answered(address, plain)  # nobody has certificates


async def test_strangers_are_counted_and_disturb_nobody(certificates: Path) -> None:
    """gRPC says nothing of a handshake that failed but a line on stderr."""
    folder, now_s = certificates / "right", 0.0
    for role in ServiceRole:
        make_certificates(folder, hosts=LOCAL_HOSTS, days=2, role=role)
    right, other = security_of(folder, "worker"), security_of(certificates / "other")
    rejected_peers = RejectedPeers(lambda: now_s)
    refused = {
        RejectedPeerKind.HANDSHAKE: (
            replace(right, tls_cert=None, tls_key=None),
            replace(other, tls_ca=right.tls_ca),
            security_of(folder, "expired"),
        ),
        RejectedPeerKind.TOKEN: (replace(right, mesh_token="another"),),
        RejectedPeerKind.ROLE: (security_of(folder, "gateway"), security_of(folder)),
    }
    async with service(right, (ServiceRole.WORKER, True), rejected_peers) as address:

        async def knock() -> None:
            for securities in refused.values():
                for security in securities:
                    assert not await is_answered(address, security)

        await hold_a_stream(address, right, knock)
        assert await is_answered(address, right)
        assert rejected_peers.refused == {
            RejectedPeerKind.HANDSHAKE: 0,
            RejectedPeerKind.TOKEN: 1,
            RejectedPeerKind.ROLE: 2,
        }
        now_s = HANDSHAKE_S
        assert rejected_peers.refused.pop(RejectedPeerKind.HANDSHAKE) >= len(
            refused[RejectedPeerKind.HANDSHAKE]
        )  # gRPC may try again


def test_a_call_answers_for_one_handshake() -> None:
    now_s = 0.0
    rejected_peers = RejectedPeers(lambda: now_s)
    for peer in ("a", None, "b", None):
        rejected_peers.connected()
        if peer is not None:
            rejected_peers.called(peer)
            rejected_peers.called(peer)  # on the same connection
    now_s = HANDSHAKE_S
    assert rejected_peers.refused[RejectedPeerKind.HANDSHAKE] == 2


def test_a_flood_of_handshakes_is_counted_and_not_kept() -> None:
    rejected_peers = RejectedPeers(lambda: 0.0)
    for _ in range(MAX_REMEMBERED + 5):
        rejected_peers.connected()
    assert rejected_peers.refused[RejectedPeerKind.HANDSHAKE] == 5


async def test_a_service_may_go_by_a_name_that_is_not_its_address(tmp_path: Path) -> None:
    """Pods and tasks have no lasting addresses that a certificate could name."""
    make_certificates(tmp_path / "tls", hosts=["mesh.test"], days=2)
    security = security_of(tmp_path / "tls")
    async with service(security) as address:
        assert not await is_answered(address, security)
        assert await is_answered(address, replace(security, tls_server_name="mesh.test"))
        assert not await is_answered(address, replace(security, tls_server_name="other.test"))


async def test_a_service_is_believed_by_its_certificate_alone(certificates: Path) -> None:
    right = security_of(certificates / "right")
    for served in (
        security_of(certificates / "other"),
        replace(security_of(certificates / "right", "expired"), tls_ca=None),
        SecurityConfig(mesh_token="token"),  # not TLS at all
    ):
        async with service(served) as address:
            assert not await is_answered(address, right)


async def hold_a_stream(address: str, security: SecurityConfig, rotate: Callable[[], Awaitable[None]]) -> None:
    """A stream that is there when certificates are replaced goes on afterwards."""
    async with (
        open_channel(address, security) as channel,
        open_link(channel, f"/{SERVICE}/Echo", WorkerDown) as link,
        anyio.create_task_group() as tasks,
    ):
        tasks.start_soon(link.pump)
        frames = link.frames()
        for step in range(2):
            link.post(BEAT)
            assert await anext(frames) == [ANSWER]
            if step == 0:
                await rotate()
        link.close()
        assert await anext(frames, None) is None


def put(source: Path, folder: Path, *names: str) -> None:
    """Replace files by renaming, as a projected secret is."""
    for name in names:
        shutil.copy(source / name, folder / "new")
        (folder / "new").rename(folder / name)


async def test_certificates_are_replaced_under_a_stream(
    certificates: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From one authority's to another's: whoever connects from then on needs the new ones."""
    monkeypatch.setattr(watched_file, "LOOK_S", 0.0)
    right, other = certificates / "right", certificates / "other"
    put(right, tmp_path, "ca.pem", "mesh.pem", "mesh.key")
    rotating = security_of(tmp_path)

    async def rotate() -> None:
        put(other, tmp_path, "mesh.pem")  # half of a pair: nobody can use it, and what was there before stays
        assert await is_answered(address, security_of(right))
        put(other, tmp_path, "ca.pem", "mesh.key")
        assert await is_answered(address, security_of(other))
        assert not await is_answered(address, security_of(right))

    async with service(rotating) as address:
        await hold_a_stream(address, rotating, rotate)


async def test_a_channel_connects_with_the_certificate_that_is_there_by_then(
    certificates: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As sessions do, which open a stream on it whenever the one before has ended."""
    monkeypatch.setattr(watched_file, "LOOK_S", 0.0)
    monkeypatch.setattr(endpoint, "LOOK_S", 0.05)
    right = certificates / "right"
    put(right, tmp_path, "ca.pem")
    shutil.copy(right / "expired.pem", tmp_path / "mesh.pem")
    shutil.copy(right / "expired.key", tmp_path / "mesh.key")
    answer: list[object] | None = None
    async with service(security_of(right)) as address, open_channel(address, security_of(tmp_path)) as channel:

        async def renew() -> None:
            await anyio.sleep(0.2)  # the server has refused it by then
            put(right, tmp_path, "mesh.pem", "mesh.key")

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(renew)
            with anyio.fail_after(20):
                while answer is None:
                    await channel.channel_ready()
                    with suppress(InstanceUnavailable, BaseExceptionGroup):
                        answer = await ask_once(channel)
    assert answer == [ANSWER]


async def ask_once(channel: MeshChannel) -> list[object] | None:
    answer: list[object] | None = None
    async with (
        open_link(channel, f"/{SERVICE}/Echo", WorkerDown) as link,
        anyio.create_task_group() as tasks,
    ):
        tasks.start_soon(link.pump)
        link.post(BEAT)
        answer = await anext(link.frames(), None)
        tasks.cancel_scope.cancel()
    return answer


async def test_what_https_shows_is_replaced_too(
    certificates: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also for metrics, which are served by the same."""
    monkeypatch.setattr(watched_file, "LOOK_S", 0.0)
    put(certificates / "right", tmp_path, "ca.pem", "mesh.pem", "mesh.key")
    registry = CollectorRegistry()

    def scrape(authority: str, port: int) -> bool:
        trusts = ssl.create_default_context(cafile=certificates / authority / "ca.pem")
        try:
            return httpx.get(f"https://127.0.0.1:{port}/live", verify=trusts, trust_env=False).status_code == 200
        except httpx.ConnectError:
            return False

    with serve_metrics(registry, host="127.0.0.1", port=0, security=security_of(tmp_path)) as port:
        assert await anyio.to_thread.run_sync(scrape, "right", port)
        put(certificates / "other", tmp_path, "mesh.pem", "mesh.key", "ca.pem")
        await anyio.to_thread.run_sync(scrape, "right", port)  # at which they are read
        assert await anyio.to_thread.run_sync(scrape, "other", port)
        assert not await anyio.to_thread.run_sync(scrape, "right", port)


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory, certificates: Path) -> Generator[RunningMesh]:
    folder = tmp_path_factory.mktemp("tls")
    settings = {
        "SECURITY_TLS_CERT": str(certificates / "right" / "mesh.pem"),
        "SECURITY_TLS_KEY": str(certificates / "right" / "mesh.key"),
        "SECURITY_TLS_CA": str(certificates / "right" / "ca.pem"),
    }
    with running_mesh(folder, model=write_checkpoint(folder / "model"), settings=settings) as mesh:
        yield mesh


@pytest.mark.e2e
@pytest.mark.timeout(300)
async def test_a_mesh_serves_clients_that_trust_its_authority(mesh: RunningMesh, certificates: Path) -> None:
    url = f"https://{mesh.record.http_address}"
    right = ssl.create_default_context(cafile=certificates / "right" / "ca.pem")
    async with httpx.AsyncClient(base_url=url, verify=right, trust_env=False) as client:
        answer = await complete(client, mesh.model, [1, 2, 3], 5)
        assert len(answer.token_ids) == 5
    other = ssl.create_default_context(cafile=certificates / "other" / "ca.pem")
    for untrusting in (other, ssl.create_default_context()):
        async with httpx.AsyncClient(base_url=url, verify=untrusting, trust_env=False) as client:
            with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
                await client.get("/health")
    async with httpx.AsyncClient(base_url=url.replace("https", "http"), trust_env=False) as client:
        with pytest.raises(httpx.TransportError):
            await client.get("/health")
    assert mesh.status().instances  # the command trusts it, and goes to the scheduler with the certificate


def test_the_command_makes_what_the_settings_take(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "tls"
    command = [sys.executable, "-m", "pdmesh.cli", "tls", "dev-ca", str(folder)]
    run = subprocess.run([*command, "--host", "mesh.test"], check=True, capture_output=True, text=True, timeout=60)
    exported = dict(line.removeprefix("export ").split("=") for line in run.stdout.splitlines())
    assert exported == {
        "PDMESH_SECURITY_TLS_CERT": str(folder / "mesh.pem"),
        "PDMESH_SECURITY_TLS_KEY": str(folder / "mesh.key"),
        "PDMESH_SECURITY_TLS_CA": str(folder / "ca.pem"),
    }
    assert all(stat.S_IMODE(file.stat().st_mode) == 0o600 for file in folder.glob("*.key"))
    assert (folder / ".gitignore").read_text() == "*\n"
    authority = (folder / "ca.pem").read_bytes()
    before = (folder / "mesh.pem").read_bytes()
    subprocess.run(command, check=True, capture_output=True, timeout=60)  # again: the same authority
    assert (folder / "ca.pem").read_bytes() == authority
    assert (folder / "mesh.pem").read_bytes() != before


def test_what_openssl_says_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="openssl cannot make the certificate"):
        make_certificates(tmp_path, hosts=["not a name,"], days=2)
    monkeypatch.setitem(os.environ, "PATH", "")
    with pytest.raises(ConfigError, match="not installed"):
        make_certificates(tmp_path / "elsewhere", hosts=["localhost"], days=2)


async def test_a_client_that_closes_its_half_of_a_tls_connection_is_gone(certificates: Path) -> None:
    """asyncio closes the other half then, so that an answer could not be sent: the request must not go on."""
    security = security_of(certificates / "right")
    told: list[str] = []
    stopping, left = anyio.Event(), anyio.Event()

    async def app(_scope: Scope, receive: Receive, _send: Send) -> None:
        while told[-1:] != ["http.disconnect"]:
            told.append((await receive())["type"])
        left.set()

    def ask(address: tuple[str, int]) -> None:
        context = ssl.create_default_context(cafile=certificates / "right/ca.pem")
        with socket.create_connection(address) as plain, context.wrap_socket(plain, server_hostname="localhost") as tls:
            tls.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
            with suppress(OSError):
                tls.unwrap()

    listener = socket.create_server(("127.0.0.1", 0))
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(serve_http, app, listener, security, stopping)
        with anyio.fail_after(20):
            await anyio.to_thread.run_sync(ask, listener.getsockname())
            await left.wait()
        stopping.set()
    assert told == ["http.request", "http.disconnect"]
