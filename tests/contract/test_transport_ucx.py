"""UCX between two real processes, one of which is stopped, killed, or sends what it must not."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import anyio
import anyio.lowlevel
import anyio.to_thread
import psutil
import pytest

from pdmesh.config import TransferConfig
from pdmesh.errors import ConfigError, KvTransferError
from pdmesh.transport import ring
from pdmesh.transport.address import pack_address, unpack_address
from pdmesh.transport.buffers import HEADER_BYTES, MAX_PIECES, MESSAGE_BYTES
from pdmesh.transport.kv_transport import ReceivedPiece
from pdmesh.transport.prefix import PREFIX_BYTES
from pdmesh.transport.reading import read_memory
from pdmesh.transport.ucx import UcxTransport
from pdmesh.transport.ucx_api import names_shared_memory
from pdmesh_testing.kv import SMALL_TRANSFER, introduce, send_together

pytestmark = [pytest.mark.anyio, pytest.mark.ucx]

CONFIG = replace(SMALL_TRANSFER, no_progress_s=0.3)
#: With shared memory (no UCX error handling inside a host), and without it.
BOTH = pytest.mark.parametrize("tls", [None, "tcp"], ids=["shared_memory", "tcp"])


class Peer:
    """A `pdmesh_testing.ucx_peer` process."""

    def __init__(self, process: subprocess.Popen[str], address: bytes) -> None:
        self.process = process
        self.address = address

    def echo(self, transport: UcxTransport, address: bytes | None = None) -> None:
        """Have it send back to the transport whatever arrives from there."""
        transport.admit(self.address)
        self.say("echo", (address or transport.address).hex())
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "ready\n"

    def flood(self, transport: UcxTransport, num_pieces: int) -> None:
        transport.admit(self.address)
        self.say("flood", transport.address.hex(), str(num_pieces))

    def say(self, *words: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(" ".join(words) + "\n")
        self.process.stdin.flush()


@asynccontextmanager
async def open_peer(
    tls: str | None = None, max_payload_bytes: int = 4096, devices: str | None = None
) -> AsyncIterator[Peer]:
    command = [sys.executable, "-m", "pdmesh_testing.ucx_peer", "--max-payload-bytes", str(max_payload_bytes)]
    with subprocess.Popen(  # noqa: ASYNC220 - it starts at once; what it says is waited for on a thread
        [*command, *(["--tls", tls] if tls else []), *(["--net-devices", devices] if devices else [])],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        try:
            address = bytes.fromhex(await anyio.to_thread.run_sync(process.stdout.readline))
            yield Peer(process, address)
            if process.poll() is None:
                process.send_signal(signal.SIGCONT)
                _, errors = await anyio.to_thread.run_sync(lambda: process.communicate("end\n", timeout=20))
                assert (process.returncode, errors) == (0, "")
        finally:
            process.kill()


async def send(transport: UcxTransport, address: bytes, header: bytes, payload: bytes = b"") -> None:
    async with transport.lend() as buffer:
        buffer.header[:] = header.ljust(HEADER_BYTES, b"\0")
        buffer.payload[: len(payload)] = payload
        await transport.send(address, buffer, len(payload))


async def take(pieces: AsyncIterator[ReceivedPiece]) -> tuple[bytes, bytes]:
    with anyio.fail_after(20):
        piece = await anext(pieces)
    assert piece.load()
    got = bytes(piece.header).rstrip(b"\0"), bytes(piece.payload)
    piece.release()
    return got


@BOTH
@pytest.mark.parametrize("size", [0, 1, 4096, 300_000, 1 << 20, 3 << 20])
async def test_there_and_back(tls: str | None, size: int) -> None:
    config = replace(CONFIG, ucx_tls=tls, max_payload_bytes=max(size, 1))
    async with open_peer(tls, max(size, 1)) as peer, UcxTransport(config) as transport:
        peer.echo(transport)
        pieces = aiter(transport.receive())
        for number in range(8):
            payload = os.urandom(size)
            await send(transport, peer.address, b"%d" % number, payload)
            assert await take(pieces) == (b"%d" % number, payload)
        transport.check_integrity()


@BOTH
async def test_several_pieces_there_in_one_message(tls: str | None) -> None:
    payloads = [os.urandom(size) for size in (0, 4096, 1, 3000, 0, 4000)]
    async with open_peer(tls) as peer, UcxTransport(replace(CONFIG, ucx_tls=tls)) as transport:
        peer.echo(transport)
        pieces = aiter(transport.receive())
        for _ in range(3):
            await send_together(transport, peer.address, payloads)
            assert [await take(pieces) for _ in payloads] == [
                (b"%d" % number, payload) for number, payload in enumerate(payloads)
            ]
        transport.check_integrity()


async def test_a_notice_to_another_host_does_not_wait_for_its_receiver() -> None:
    """Its peer takes it later, into a buffer, as any message."""
    config = replace(CONFIG, ucx_tls="tcp")
    async with UcxTransport(config) as a, UcxTransport(config) as b, anyio.create_task_group() as tasks:
        introduce(a, b)
        pieces, held = aiter(b.receive()), list[ReceivedPiece]()
        for number in range(config.num_receive_buffers):
            tasks.start_soon(send, a, b.address, b"%d" % number)
            held.append(await anext(pieces))
        async with a.lend() as buffer:
            buffer.header[:] = b"notice".ljust(HEADER_BYTES, b"\0")
            with anyio.fail_after(20):
                await a.send(b.address, buffer, 0, is_notice=True)
            buffer.header[:] = b"overwritten".ljust(HEADER_BYTES, b"\0")
        b.check_integrity()
        for piece in held:
            piece.release()
        assert await take(pieces) == (b"notice", b"")
        b.check_integrity()


@BOTH
async def test_a_stopped_peer_is_noticed_and_reached_again_when_it_goes_on(tls: str | None) -> None:
    async with open_peer(tls) as peer, UcxTransport(replace(CONFIG, ucx_tls=tls, num_send_buffers=1)) as transport:
        peer.echo(transport)
        pieces = aiter(transport.receive())
        await send(transport, peer.address, b"before")
        assert await take(pieces) == (b"before", b"")
        peer.process.send_signal(signal.SIGSTOP)
        with pytest.raises(KvTransferError, match="received nothing"):
            await send(transport, peer.address, b"stopped", bytes(4096))
        transport.check_integrity()
        peer.process.send_signal(signal.SIGCONT)
        async with anyio.create_task_group() as tasks:

            async def send_until_answered() -> None:
                while True:
                    with contextlib.suppress(KvTransferError):  # the peer, too, has given up and must reconnect
                        await send(transport, peer.address, b"after", bytes(4096))  # the only buffer is back

            tasks.start_soon(send_until_answered)
            while (await take(pieces))[0] != b"after":
                pass
            tasks.cancel_scope.cancel()


@BOTH
async def test_a_cancelled_send_keeps_its_buffer_quarantined_until_the_endpoint_is_closed(tls: str | None) -> None:
    config = replace(CONFIG, ucx_tls=tls, num_send_buffers=1, no_progress_s=60.0, network_no_progress_s=60.0)
    async with open_peer(tls) as peer, UcxTransport(config) as transport:
        peer.echo(transport)
        await send(transport, peer.address, b"before")
        assert await take(aiter(transport.receive())) == (b"before", b"")
        peer.process.send_signal(signal.SIGSTOP)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(send, transport, peer.address, b"cancelled", bytes(4096))
            await anyio.lowlevel.checkpoint()
            await anyio.lowlevel.checkpoint()
            tasks.cancel_scope.cancel()
        transport.check_integrity()
        lent = anyio.Event()

        async def lend() -> None:
            async with transport.lend():
                lent.set()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(lend)
            for _ in range(100):
                await anyio.lowlevel.checkpoint()
            assert not lent.is_set()
            await transport.forget(peer.address)
            with anyio.fail_after(10):
                await lent.wait()
        transport.check_integrity()


@BOTH
async def test_a_killed_peer_is_an_error(tls: str | None) -> None:
    async with open_peer(tls) as peer, UcxTransport(replace(CONFIG, ucx_tls=tls)) as transport:
        peer.echo(transport)
        await send(transport, peer.address, b"before")
        assert await take(aiter(transport.receive())) == (b"before", b"")
        peer.process.kill()
        peer.process.wait()
        for _ in range(3):
            with pytest.raises(KvTransferError):
                await send(transport, peer.address, b"after", bytes(4096))
        await transport.forget(peer.address)
        transport.check_integrity()


@BOTH
async def test_a_peer_that_dies_is_noticed_before_any_limit(tls: str | None) -> None:
    config = replace(CONFIG, ucx_tls=tls, no_progress_s=600.0, network_no_progress_s=600.0)
    async with open_peer(tls) as peer, UcxTransport(config) as transport:
        peer.echo(transport)
        await send(transport, peer.address, b"before")
        assert await take(aiter(transport.receive())) == (b"before", b"")
        peer.process.send_signal(signal.SIGSTOP)
        async with anyio.create_task_group() as tasks:

            async def kill() -> None:
                await anyio.wait_all_tasks_blocked()
                peer.process.kill()

            tasks.start_soon(kill)
            with anyio.fail_after(20), pytest.raises(KvTransferError):
                await send(transport, peer.address, b"after", bytes(4096))
        peer.process.wait()
        transport.check_integrity()


@BOTH
async def test_closing_does_not_wait_for_a_stopped_sender(tls: str | None) -> None:
    """Its announced pieces are in UCX's queue; receiving them would take for ever."""
    async with open_peer(tls) as peer:
        async with UcxTransport(replace(CONFIG, ucx_tls=tls)) as transport:
            pieces = aiter(transport.receive())
            peer.flood(transport, 16)
            held = [await anext(pieces) for _ in range(CONFIG.num_receive_buffers)]
            for _ in range(100):
                await anyio.lowlevel.checkpoint()
            peer.process.send_signal(signal.SIGSTOP)
            held[0].release()
        peer.process.kill()
        peer.process.wait()


@BOTH
async def test_senders_killed_in_the_middle_of_their_pieces_cost_nothing(tls: str | None) -> None:
    """`benchmarks/faults/killed_senders.py` does it hundreds of times."""
    config = replace(CONFIG, ucx_tls=tls, max_payload_bytes=1 << 20, no_progress_s=5.0, network_no_progress_s=5.0)
    async with UcxTransport(config) as transport:
        pieces = aiter(transport.receive())
        for _ in range(4):
            async with open_peer(tls, config.max_payload_bytes) as peer:
                peer.flood(transport, 64)
                (await anext(pieces)).release()
                peer.process.kill()
                peer.process.wait()
        assert len(transport._links) <= 2  # the last one may not have been noticed, nor the one before
        held: list[ReceivedPiece] = []  # every buffer can be had
        async with anyio.create_task_group() as tasks:
            for _ in range(config.num_receive_buffers):
                tasks.start_soon(send, transport, transport.address, b"alive", bytes(config.max_payload_bytes))
            while len(held) < config.num_receive_buffers:
                piece = await anext(pieces)
                if bytes(piece.header).startswith(b"alive"):
                    held.append(piece)
                else:
                    piece.release()
        transport.check_integrity()


async def test_a_receiver_that_may_not_read_a_sender_gets_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    refusals: list[int] = []

    def refuse(pid: int, address: int, num_bytes: int, out_address: int) -> None:
        refusals.append(num_bytes)
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(ring, "read_memory", refuse)
    config = replace(CONFIG, ucx_net_devices="lo")
    async with UcxTransport(config) as a, UcxTransport(config) as b:
        introduce(a, b)
        pieces = aiter(b.receive())
        for number in range(3):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(send, a, b.address, b"%d" % number, bytes(number * 1000))
                assert await take(pieces) == (b"%d" % number, bytes(number * 1000))
        assert len(refusals) == 1  # the sender has learnt
        a.check_integrity()
        b.check_integrity()


async def test_a_sender_may_die_between_its_header_and_its_payload() -> None:
    """A large payload is read when it is loaded."""
    config = replace(CONFIG, max_payload_bytes=3 << 20)
    async with UcxTransport(config) as transport, open_peer(None, config.max_payload_bytes) as peer:
        peer.flood(transport, 8)
        piece = await anext(aiter(transport.receive()))
        peer.process.kill()
        peer.process.wait()
        assert not await anyio.to_thread.run_sync(piece.load)
        piece.release()
        transport.check_integrity()


async def test_a_payload_that_may_not_be_read_comes_as_a_message(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its header could be read: that the system forbids it is found out late."""

    def refuse(pid: int, address: int, num_bytes: int, out_address: int) -> None:
        if num_bytes > ring.EAGER_BYTES:
            raise PermissionError(errno.EPERM, "Operation not permitted")
        read_memory(pid, address, num_bytes, out_address)

    monkeypatch.setattr(ring, "read_memory", refuse)
    config = replace(CONFIG, ucx_net_devices="lo", max_payload_bytes=3 << 20)
    payload = os.urandom(config.max_payload_bytes)
    async with UcxTransport(config) as a, UcxTransport(config) as b:
        introduce(a, b)
        pieces = aiter(b.receive())
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(send, a, b.address, b"large", payload)
            piece = await anext(pieces)
            assert bytes(piece.header).startswith(b"large")
            assert not piece.load()
            piece.release()
            assert await take(pieces) == (b"large", payload)
        a.check_integrity()
        b.check_integrity()


@pytest.mark.parametrize("what", ["dead", "another piece", "garbage"])
async def test_an_offer_that_leads_nowhere_is_dropped(monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    def misread(pid: int, address: int, num_bytes: int, out_address: int) -> None:
        monkeypatch.undo()
        if what == "dead":
            raise ProcessLookupError(errno.ESRCH, "No such process")
        if what == "garbage":
            ctypes.memset(out_address, 0xFF, num_bytes)
        else:
            read_memory(pid, address, num_bytes, out_address)
            ctypes.memset(out_address + PREFIX_BYTES - 8, 0xFF, 8)

    monkeypatch.setattr(ring, "read_memory", misread)
    async with UcxTransport(CONFIG) as a, UcxTransport(CONFIG) as b:
        introduce(a, b)
        async with anyio.create_task_group() as tasks:

            async def send_both() -> None:
                await send(a, b.address, b"lost", bytes(1000))  # is answered: a sender that lives does not wait
                await send(a, b.address, b"good", bytes(1000))

            tasks.start_soon(send_both)
            assert await take(aiter(b.receive())) == (b"good", bytes(1000))
        a.check_integrity()
        b.check_integrity()


async def test_a_piece_larger_than_the_buffers_is_dropped_and_counted() -> None:
    async with open_peer(max_payload_bytes=1 << 20) as large, open_peer() as peer, UcxTransport(CONFIG) as transport:
        large.flood(transport, 3)
        peer.echo(transport)
        pieces = aiter(transport.receive())
        while transport.num_refused < 3:
            await send(transport, peer.address, b"ok", b"payload")
            assert await take(pieces) == (b"ok", b"payload")
        transport.check_integrity()


async def test_an_address_of_another_host_goes_over_ucx() -> None:
    config = replace(CONFIG, ucx_net_devices="lo")
    async with open_peer(devices="lo") as peer, UcxTransport(config) as transport:
        here, elsewhere = (
            pack_address(unpack_address(address)._replace(host_id=bytes(8)))
            for address in (transport.address, peer.address)
        )
        peer.echo(transport, here)
        await send(transport, elsewhere, b"there", bytes(4096))
        assert await take(aiter(transport.receive())) == (b"there", bytes(4096))
        peer.process.kill()
        peer.process.wait()
        with pytest.raises(KvTransferError):
            await send(transport, elsewhere, b"gone", bytes(4096))


async def test_pieces_travel_together_between_hosts_as_far_as_both_have_room() -> None:
    smaller, larger = (replace(CONFIG, ucx_tls="tcp", message_bytes=size << 20) for size in (1, 2))
    async with UcxTransport(smaller) as a, UcxTransport(larger) as b:
        introduce(a, b)
        limit = b.message_limit(a.address)
        assert 1 << 20 <= limit < 1 << 21
        assert a.message_limit(b.address) == 1 << 20
        payloads = [os.urandom(4096) for _ in range(min(limit // 4096, MAX_PIECES))]
        pieces = aiter(a.receive())
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(send_together, b, a.address, payloads)
            for number, payload in enumerate(payloads):
                assert await take(pieces) == (b"%d" % number, payload)
        a.check_integrity()
        b.check_integrity()


async def test_pieces_within_a_host_travel_together_in_smaller_messages() -> None:
    """They are read at once, on the receiver's event loop."""
    config = replace(CONFIG, ucx_net_devices="lo", message_bytes=2 << 20)
    async with UcxTransport(config) as a, UcxTransport(config) as b:
        introduce(a, b)
        assert a.message_limit(b.address) == MESSAGE_BYTES


@pytest.mark.parametrize("claim", [{"pid": 1 << 20}, {"local_name": bytes(16)}], ids=["another_pid", "another_name"])
async def test_a_host_that_only_seems_to_be_this_one_is_none(claim: dict[str, Any]) -> None:
    """Machines that are copies of one image can have one host id: a process of the peer's number would be read here."""
    config = replace(CONFIG, ucx_net_devices="lo")
    async with open_peer(devices="lo") as peer, UcxTransport(config) as transport:
        assert transport.process_of(peer.address) == peer.process.pid
        assert transport.carrier_to(peer.address) == "memory"
        here = pack_address(unpack_address(transport.address)._replace(host_id=bytes(8)))
        copied = pack_address(unpack_address(peer.address)._replace(**claim))
        peer.echo(transport, here)
        assert transport.process_of(copied) is None
        assert transport.carrier_to(copied) == "ucx, tcp"
        await send(transport, copied, b"there", bytes(4096))
        assert await take(aiter(transport.receive())) == (b"there", bytes(4096))


async def test_without_a_network_device_nothing_listens_and_another_host_is_an_error() -> None:
    async with open_peer() as peer, UcxTransport(CONFIG) as transport:
        assert psutil.Process(peer.process.pid).net_connections("inet") == []
        elsewhere = pack_address(unpack_address(peer.address)._replace(host_id=bytes(8)))
        with pytest.raises(KvTransferError, match="ucx_net_devices"):
            await send(transport, elsewhere, b"there")


async def test_a_transport_that_ucx_does_not_have_is_a_configuration_error() -> None:
    with pytest.raises(ConfigError, match="ucx_tls"):
        async with UcxTransport(TransferConfig(ucx_tls="carrier_pigeon")):
            pass


@pytest.mark.parametrize(
    ("tls", "shares"),
    [("all", True), ("tcp", False), ("tcp,sm", True), ("^sm", False), ("^ib", True), ("posix,cma", True)],
)
def test_shared_memory_in_a_tls_setting(tls: str, shares: bool) -> None:
    assert names_shared_memory(tls) is shares
