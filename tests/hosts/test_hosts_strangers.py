"""Who has no business in a mesh knocks at its ports while streams run: refused, counted, and nobody is disturbed."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Generator, Mapping
from pathlib import Path

import httpx
import msgspec
import pytest
from msgspec.structs import replace

from pdmesh.cli.tls import make_certificates
from pdmesh.wire.roles import ServiceRole
from pdmesh_testing.certificates import make_expired
from pdmesh_testing.checkpoints import write_checkpoint
from pdmesh_testing.host_load import LIMIT_S, MOST_TOKENS, STAND_IN, HostLoad, log_of
from pdmesh_testing.hosts import (
    API_KEY,
    MESH_TOKEN,
    SCHEDULER_NAME,
    SCHEDULER_PORT,
    Hosts,
    running_hosts,
    until,
    why_no_hosts,
)
from pdmesh_testing.stranger import Knock

WHY_NOT = why_no_hosts()

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.e2e,
    pytest.mark.ucx,
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT)),
]

#: a: scheduler; b: a prefill and a decode instance; c: gateway, and the clients; x: nobody of the mesh.
HOSTS = ("a", "b", "c", "x")
ROLES = {"b": ServiceRole.WORKER, "c": ServiceRole.GATEWAY}
TOKEN_PORT = 7100

#: An instance that is silent for so long was disturbed. For 0.6 s, the default, one is silent on a busy machine, too.
SUSPECT_S = 4

#: What comes of a stream that was let in, and says nothing that one begins with.
LET_IN = "INVALID_ARGUMENT"


@pytest.fixture
def hosts(tmp_path: Path) -> Generator[Hosts]:
    settings = {
        "MODEL": str(write_checkpoint(tmp_path / "model", seed=3)),
        "SECURITY_TLS_ROLES": "true",
        "GATEWAY_TOKEN_PORT": str(TOKEN_PORT),
        "SCHEDULER_SUSPECT_S": str(SUSPECT_S),
        **STAND_IN,
    }
    with running_hosts(tmp_path / "hosts", HOSTS, settings) as hosts:
        for name, role in ROLES.items():
            named = ("127.0.0.1", hosts[name].address, SCHEDULER_NAME)
            make_certificates(hosts.folder, hosts=named, days=2, role=role)
            for suffix in ("pem", "key"):
                shutil.copy(hosts.folder / f"{role}.{suffix}", hosts[name].folder / f"mesh.{suffix}")
        hosts["a"].start("scheduler", "scheduler")
        for kind in ("prefill", "decode"):
            hosts["b"].start(kind, kind)
        hosts["c"].start("gateway", "gateway")
        yield hosts


def knocks(hosts: Hosts, other: Path, address: str, method: str) -> dict[str, Knock]:
    """By the reason for which each is refused, and a number where several are."""
    without = Knock(address=address, method=method, authority=str(hosts.folder / "ca.pem"), token=MESH_TOKEN)

    def showing(name: str, folder: Path = hosts.folder, token: str = MESH_TOKEN) -> Knock:
        certificate, key = str(folder / f"{name}.pem"), str(folder / f"{name}.key")
        return replace(without, certificate=certificate, key=key, token=token)

    return {
        "handshake 1": replace(without, plain=True),
        "handshake 2": without,
        "handshake 3": showing("mesh", other),
        "handshake 4": showing("expired"),
        "token": showing("worker", token="a guess"),
        "role 1": showing("gateway"),
        "role 2": showing("mesh", hosts["x"].folder),  # names none
    }


def knock(hosts: Hosts, at: list[Knock]) -> list[str]:
    """What comes of it, from the stranger's host."""
    command = hosts["x"].command([sys.executable, "-m", "pdmesh_testing.stranger"])
    tried = subprocess.run(command, input=msgspec.json.encode(at), capture_output=True, check=True, timeout=LIMIT_S)
    return msgspec.json.decode(tried.stdout, type=list[str])


def refused(hosts: Hosts, name: str) -> Mapping[str, int]:
    """How many a host's service has refused, by the reason, as it tells Prometheus."""
    facts = hosts[name].services[0].facts
    address = facts.get("http_address") or f"127.0.0.1:{facts['metrics_port']}"
    headers = {"Authorization": f"Bearer {API_KEY}"}
    with hosts[name].entered():
        text = httpx.get(f"https://{address}/metrics", headers=headers, verify=hosts.https(), trust_env=False).text
    return {
        reason: int(float(count))
        for reason, count in re.findall(r'^pdmesh:refused_peers_total{reason="(\w+)"} (\S+)$', text, re.M)
    }


async def test_strangers_are_refused_and_counted_and_disturb_nobody(hosts: Hosts, tmp_path: Path) -> None:
    other = tmp_path / "other"
    make_certificates(other, hosts=["10.77.0.4"], days=2)
    make_expired(hosts.folder)
    services = {
        "a": (f"{hosts['a'].address}:{SCHEDULER_PORT}", "/pdmesh.v1.Scheduler/Worker"),
        "c": (f"{hosts['c'].address}:{TOKEN_PORT}", "/pdmesh.v1.Gateway/Tokens"),
    }
    tried = {name: knocks(hosts, other, *where) for name, where in services.items()}
    said: list[str] = []
    with log_of(hosts, "a", "scheduler") as logged:
        load = HostLoad(hosts, "c")
        everybody = [each for of_one in tried.values() for each in of_one.values()]
        await load.run(lambda: said.extend(knock(hosts, everybody)), max_tokens=MOST_TOKENS)
        assert len(said) == len(everybody)
        assert not [each for each in said if LET_IN in each or "answered" in each], said
        for unwanted in ("instance joined", "silent", "lost", "gateway lost"):
            assert logged().count(unwanted) == 0
    insiders = [replace(each["token"], token=MESH_TOKEN) for each in tried.values()]
    let_in = knock(hosts, insiders)
    assert all(LET_IN in each for each in let_in), let_in
    for name in services:
        until(lambda name=name: refused(hosts, name)["handshake"] >= 4)  # type: ignore[misc]
        counts = refused(hosts, name)
        assert (counts["token"], counts["role"]) == (1, 2)
