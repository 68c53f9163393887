"""The fence of `docs/hosts.md` around KV's ports: what a stranger says there ends a worker, and does not reach it."""

from __future__ import annotations

import re
import shutil
import socket
import struct
import subprocess
import sys
from collections.abc import AsyncGenerator, Generator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import anyio
import anyio.to_thread
import pytest

from pdmesh.config import TransferConfig
from pdmesh.transport.ucx import UcxTransport
from pdmesh_testing.hosts import Host, Hosts, running_hosts, why_no_hosts

WHY_NOT = why_no_hosts() or (None if shutil.which("nft") else "the fence takes nft (Debian's package nftables)")

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.ucx,
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT)),
]

PAGE = (Path(__file__).parents[2] / "docs/hosts.md").read_text()
FENCE = re.findall(r"^\$ (nft .*)$", PAGE, re.M)
(PORTS,) = re.findall(r"^\$ export UCX_TCP_PORT_RANGE=(\S+)", PAGE, re.M)

#: The page's machines: the scheduler's, which has no business at KV's ports, and two with instances.
STRANGER, WORKER, PEER = MACHINES = ("m1", "m2", "m3")

#: UCX takes it for a message of a connection that was never made.
DEADLY = struct.pack("<QBI", 0xCAFEBABE12345678, 7, 1) + b"A"

LISTENS = "0A"
LIMIT_S = 20.0


@dataclass
class Worker:
    """A transport in a process of its own, with a port of the page's range."""

    process: subprocess.Popen[str]
    address: bytes
    port: int

    def say(self, words: str) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        print(words, file=self.process.stdin, flush=True)
        assert self.process.stdout.readline() == "ready\n"


@pytest.fixture
def hosts(tmp_path: Path) -> Generator[Hosts]:
    with running_hosts(tmp_path / "hosts", MACHINES) as hosts:
        yield hosts


@asynccontextmanager
async def running_worker(host: Host) -> AsyncGenerator[Worker]:
    command = ["env", f"UCX_TCP_PORT_RANGE={PORTS}", sys.executable, "-m", "pdmesh_testing.ucx_peer"]
    with subprocess.Popen(  # noqa: ASYNC220  # it starts at once; what it says is waited for on a thread
        host.command([*command, "--net-devices", "eth0"]),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as process:
        try:
            assert process.stdout is not None
            address = bytes.fromhex(await anyio.to_thread.run_sync(process.stdout.readline))
            sockets = await anyio.Path(f"/proc/{process.pid}/net/tcp").read_text()
            (port,) = [int(at.split(":")[1], 16) for _, at, _, state, *_ in rows(sockets) if state == LISTENS]
            first, last = map(int, PORTS.split("-"))
            assert first <= port <= last
            yield Worker(process, address, port)
        finally:
            process.kill()


def rows(table: str) -> list[list[str]]:
    return [line.split() for line in table.splitlines()[1:]]


async def is_reached(hosts: Hosts, worker: Worker) -> bool:
    """Whether a stranger's connection to the worker's port is answered; it says what ends a worker there."""
    with hosts[STRANGER].entered(), socket.socket() as knocking:
        knocking.setblocking(False)
        with suppress(BlockingIOError):
            knocking.connect((hosts[WORKER].address, worker.port))
        with anyio.move_on_after(2.0) as waiting:  # what is dropped is answered by nobody
            await anyio.wait_writable(knocking)
            knocking.send(DEADLY)
    return not waiting.cancelled_caught


async def serves(hosts: Hosts, worker: Worker) -> bool:
    """Whether a piece of a peer on another host makes its way there and back."""
    with hosts[PEER].entered():
        config = TransferConfig(max_payload_bytes=4096, ucx_net_devices="eth0", trusted_network=True)
        async with UcxTransport(config) as transport:
            transport.admit(worker.address)
            worker.say(f"echo {transport.address.hex()}")
            async with transport.lend() as buffer:
                await transport.send(worker.address, buffer, 100)
            with anyio.move_on_after(LIMIT_S):
                (await anext(aiter(transport.receive()))).release()
                return True
    return False


async def test_what_a_stranger_says_to_kvs_port_does_not_reach_a_worker_behind_the_fence(hosts: Hosts) -> None:
    for command in FENCE:
        hosts[WORKER].run(["sh", "-c", command])
    async with running_worker(hosts[WORKER]) as worker:
        assert not await is_reached(hosts, worker)
        assert await serves(hosts, worker)
        assert worker.process.poll() is None
    (num_dropped,) = re.findall(r"counter packets (\d+) ", hosts[WORKER].run(["nft", "list", "ruleset"]))
    assert int(num_dropped) > 0


async def test_without_the_fence_fourteen_bytes_end_a_worker(hosts: Hosts) -> None:
    """What the fence is for: if this fails UCX has been mended, and the page can say so."""
    async with running_worker(hosts[WORKER]) as worker:
        assert await serves(hosts, worker)
        assert await is_reached(hosts, worker)
        with anyio.fail_after(LIMIT_S):
            assert await anyio.to_thread.run_sync(worker.process.wait) < 0
